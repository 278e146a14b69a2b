#!/usr/bin/env bash
# Build and run the C tests: plain, with ASan and UBSan, and stress_* also with TSan.
# TSan sees threads only, so in stress tests threads play the processes.
# usage: csrc/tests/run.sh [--plain|--sanitize|--thread] [test ...]     exit 0 = all passed
# CHECK_SEED=N repeats the random part of a failed run. CC chooses the compiler, RUN what runs its programs (an emulator).
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
flavours=(plain sanitize thread)
case "${1:-}" in
    --plain) flavours=(plain); shift ;;
    --sanitize) flavours=(sanitize); shift ;;
    --thread) flavours=(thread); shift ;;
esac
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then
    for path in "$here"/test_*.c "$here"/stress_*.c; do
        tests+=("$(basename "$path" .c)")
    done
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings=(-Wall -Wextra -Werror -std=gnu11)

for flavour in "${flavours[@]}"; do
    flags=(-O1)  # the module itself is built with -O2
    if [ "$flavour" = sanitize ]; then
        flags=(-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all)
    fi
    chosen=("${tests[@]}")
    if [ "$flavour" = thread ]; then
        # -Wno-tsan: fences order a store before a load here, which TSan does not model and does not need.
        flags=(-O1 -g -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan)
        chosen=()
        for test in "${tests[@]}"; do
            case "$test" in stress_*) chosen+=("$test") ;; esac
        done
        [ ${#chosen[@]} -gt 0 ] || continue
    fi
    mkdir "$work/$flavour"
    find "$here/.." -maxdepth 1 -name '*.c' ! -name '*_native.c' -print0 | (cd "$work/$flavour" &&
        xargs -0 -n 4 -P "$(nproc)" "${CC:-cc}" "${warnings[@]}" "${flags[@]}" -c)
    # An archive, so that a test which includes a concept's .c brings its own copy.
    ar rcs "$work/$flavour.a" "$work/$flavour"/*.o
    for test in "${chosen[@]}"; do
        "${CC:-cc}" "${warnings[@]}" "${flags[@]}" "$here/$test.c" "$work/$flavour.a" -lrt -lpthread -o "$work/$test.$flavour"
        UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 ${RUN:-} "$work/$test.$flavour"
    done
    echo "passed: $flavour (${chosen[*]})"
done
