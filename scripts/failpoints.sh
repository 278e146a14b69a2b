#!/usr/bin/env bash
# Kill or stop one process at each step of the list of failpoints, in every scene and mode; then audit.
# usage: scripts/failpoints.sh [--seed S] [--nth N] [--way restart|crash|hang]... [--json] [--peer]     exit 0: held, 1: lost
#
# It makes a build of its own, outside the checkout, in which the steps in C are there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case " $* " in *" --help "* | *" -h "*) use_project; exec "$PYTHON" -P -m crash.failpoint_rounds --help ;; esac
use_failpoint_build
failed=0
at_scene() { "$PYTHON" -P -m crash.failpoint_rounds --scene "$@" || failed=1; }

for scene in puts cleaning delayed start stop recovery ext replicated promoted; do
  for mode in async pool sync; do
    at_scene "$scene" --mode "$mode" "$@"
  done
done
for step in table_made table_offered table_copied table_used; do # a table grows once in the life of a store
  at_scene tables --point "$step" "$@"
done
exit $failed
