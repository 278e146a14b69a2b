#!/usr/bin/env bash
# Fuzz the C parsers under ASan and UBSan, from the kept corpus (csrc/fuzz/corpus).
# With a clang that has libFuzzer by that, else by driver.c with this compiler's coverage.
# usage: csrc/fuzz/run.sh [--runs N] [--seed N] [--keep] [--build FOLDER] [--planted-bug] [target ...]     exit 0 = nothing found
# --keep adds inputs that reach new code to the corpus; --planted-bug builds a target that must fail;
# --build keeps the compiled sources there, for the next run.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
runs=100000 seed=$RANDOM keep=no build= defines=() targets=()
while [ $# -gt 0 ]; do
    case "$1" in
        --runs) runs=$2; shift 2 ;;
        --seed) seed=$2; shift 2 ;;
        --keep) keep=yes; shift ;;
        --build) build=$2; shift 2 ;;
        --planted-bug) defines=(-DPLANTED_BUG); shift ;;
        *) targets+=("$1"); shift ;;
    esac
done
if [ ${#targets[@]} -eq 0 ]; then
    for path in "$here"/fuzz_*.c; do targets+=("$(basename "$path" .c)"); done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags=(-O1 -g -std=gnu11 -Wall -Wextra -Werror -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
compiler=${CC:-cc} covers=(-fsanitize-coverage=trace-pc) links=() driver=("$here/driver.c")
echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d == 0 && n == 1; }' > "$work/probe.c"
if clang -fsanitize=fuzzer "$work/probe.c" -o "$work/probe" 2> "$work/probe.log"; then
    compiler=clang covers=(-fsanitize=fuzzer-no-link) links=(-fsanitize=fuzzer) driver=()
fi

build=${build:-$work/objects}
mkdir -p "$build"
if [ ! -e "$build/all.a" ]; then
    find "$here/.." -maxdepth 1 -name '*.c' ! -name '*_native.c' -print0 | (cd "$build" &&
        xargs -0 -n 4 -P "$(nproc)" "$compiler" "${flags[@]}" "${covers[@]}" -c)
    ar rcs "$build/all.a" "$build"/*.o
fi
for target in "${targets[@]}"; do
    "$compiler" "${flags[@]}" "${defines[@]}" "$here/$target.c" "${driver[@]}" "$build/all.a" "${links[@]}" -lrt -lpthread \
        -o "$work/$target"
    corpus=$here/corpus/${target#fuzz_} grown=$work/corpus-$target last=()
    mkdir -p "$corpus" "$grown"
    [ ${#driver[@]} -eq 0 ] || last=("-last=$work/last")
    if ! (cd "$work" && "./$target" "-runs=$runs" "-seed=$seed" "${last[@]}" "$grown" "$corpus"); then
        kept=$(mktemp "${TMPDIR:-/tmp}/$target-XXXXXX")
        if [ -e "$work/last" ]; then
            size=$(od -An -tu8 -N8 "$work/last" | tr -d ' ')
            head -c $((size + 8)) "$work/last" | tail -c +9 > "$kept" # in this order: no pipe is closed too early
        else
            cat "$work"/crash-* > "$kept"
        fi
        echo "failed: $target, seed $seed; the input is kept as $kept" >&2
        exit 1
    fi
    if [ "$keep" = yes ]; then cp "$grown"/* "$corpus"/ 2> "$work/probe.log" || true; fi
    echo "passed: $target"
done
