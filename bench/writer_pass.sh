#!/usr/bin/env bash
# What a pass of the writer costs, in nanoseconds: by open sessions and by size (bench/writer_pass.c).
# usage: bench/writer_pass.sh [--pairs N] [TREE ...]     default: this checkout, one round of the rows
# With several trees (checkouts) each row is run in turns, so that what else the machine does meets all of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
pairs=1
if [ "${1-}" = --pairs ]; then pairs=$2; shift 2; fi
trees=("$@")
[ ${#trees[@]} -gt 0 ] || trees=("$here/..")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for n in "${!trees[@]}"; do
    csrc="${trees[$n]}/csrc"
    find "$csrc" -maxdepth 1 -name '*.c' ! -name '*_native.c' -print0 |
        xargs -0 "${CC:-cc}" -O2 -I "$csrc" "$here/writer_pass.c" -lrt -lpthread -o "$work/$n"
done
# body bytes, entries in a round, messages in an entry (0: a put), sessions
for row in "128 1 0 1" "128 1 0 300" "128 1 0 1000" "128 64 0 1" "1024 64 0 1" "4096 64 0 1" "128 1 256 1" "1024 1 256 1"; do
    for ((pair = 0; pair < pairs; pair++)); do
        for n in "${!trees[@]}"; do
            read -ra values <<<"$row"
            echo "$n: $("$work/$n" "${values[@]}" 20000)"
        done
    done
done
