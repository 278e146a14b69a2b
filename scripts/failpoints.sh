#!/usr/bin/env bash
# Kill or stop one process at each step of the list of failpoints, in every scene and mode; then audit.
# usage: scripts/failpoints.sh [--seed S] [--nth N] [--point NAME]... [--way restart|crash|hang]...     exit 0: held, 1: lost
#
# It makes a build of its own, outside the checkout, in which the steps in C are there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case " $* " in *" --help "* | *" -h "*) use_project; exec "$PYTHON" -P -m crash.failpoint_rounds --help ;; esac
use_failpoint_build
failed=0
for scene in puts cleaning delayed start stop recovery; do
  for mode in async pool sync; do
    "$PYTHON" -P -m crash.failpoint_rounds --scene "$scene" --mode "$mode" "$@" || failed=1
  done
done
exit $failed
