#!/usr/bin/env bash
# Every crash script in every mode that has its worker, one line each.
# usage: scripts/crash_all.sh [--rounds N] [--seed S] [--peer]     exit 0: all held, 1: something was lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_project
failed=0
for kind in writer flusher reputter allocator checkpointer scheduler cleaner replicator supervisor producer all committer; do
  modes="async pool sync"
  [ "$kind" = committer ] && modes=pool
  for mode in $modes; do
    "$PYTHON" -P -m crash.rounds "$kind" --mode "$mode" "$@" || failed=1
  done
done
exit $failed
