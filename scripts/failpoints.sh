#!/usr/bin/env bash
# Kill or stop one process at each step of the list of failpoints, in every scene and mode; then audit.
# usage: scripts/failpoints.sh [--seed S] [--nth N] [--way restart|crash|hang]... [--scene S] [--mode M] [--share K/N] [--json] [--peer]
# exit 0: held, 1: lost
#
# It makes a build of its own, outside the checkout, in which the steps in C are there.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case " $* " in *" --help "* | *" -h "*) use_project; exec "$PYTHON" -P -m crash.failpoints --help ;; esac
scenes="" modes="async pool sync" more=() ways=""
while [ $# -gt 0 ]; do
  case "$1" in
    --scene) scenes=${2:?--scene needs a name}; shift 2 ;;
    --mode) modes=${2:?--mode needs async, pool or sync}; shift 2 ;;
    --way) ways+=" ${2:?--way needs restart, crash or hang}"; more+=("$1" "$2"); shift 2 ;;
    --way=*) ways+=" ${1#--way=}"; more+=("$1"); shift ;;
    *) more+=("$1"); shift ;;
  esac
done
if [ -z "$scenes" ]; then
  scenes="puts cleaning delayed ext replicated"
  case "$ways " in
    " " | *" restart "*) scenes+=" start stop recovery promoted tables" ;;
    *) echo "start, stop, recovery, promoted and tables are left out: they know --way restart only" >&2 ;;
  esac
fi
use_failpoint_build
failed=0
at_scene() { run_part "$PYTHON" -P -m crash.failpoints --scene "$@" || failed=1; }

for scene in $scenes; do
  if [ "$scene" = tables ]; then # one grows once in the life of a store
    for step in table_wanted table_made table_offered table_copied table_used; do
      at_scene tables --point "$step" ${more[@]+"${more[@]}"}
    done
    continue
  fi
  case "$scene ${more[*]-}" in
    *" --point"* | *" --share"*) shares=1 ;;
    puts* | replicated*) shares=4 ;; # each round checks all that was put
    *) shares=1 ;;
  esac
  for mode in $modes; do
    for ((share = 1; share <= shares; share++)); do
      at_scene "$scene" --mode "$mode" --share "$share/$shares" ${more[@]+"${more[@]}"}
    done
  done
done
exit $failed
