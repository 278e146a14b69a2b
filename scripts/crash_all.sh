#!/usr/bin/env bash
# crash.sh with every kind of process in every mode that has it, one line each.
# usage: scripts/crash_all.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]
# exit 0: all held, 1: something was lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
only='' more=()
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --mode) only=${2:?--mode needs async, pool or sync}; shift 2 ;;
    *) more+=("$1"); shift ;;
  esac
done
use_project
failed=0
list_victims
for victim in "${victims[@]}"; do
  read -r kind modes <<< "$victim"
  for mode in $modes; do
    [ "$mode" = "${only:-$mode}" ] || continue
    run_part "$PYTHON" -P -m crash.kills "$kind" --mode "$mode" ${more[@]+"${more[@]}"} || failed=1
  done
done
exit $failed
