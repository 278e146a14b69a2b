#!/usr/bin/env bash
# Everything that tries to break the engine, in its long form; docs/proof.md says what it counted.
# usage: scripts/prove_all.sh [--rounds N] [--share N] [--seed S] [part ...]     exit 0: all held, 1: something did not
# parts: kills members restarts failpoints powercut disk corruption fuzz mutants page; without any: all, which takes hours.
# --share N: failpoints, disk and corruption try an Nth of their cases; the last two count the others as left out.
# A part replaces the rows of its classes in docs/proof.md, the only record; `page` alone updates their age.
# PYENGINE_PROOF=FILE keeps the lines of the single runs too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

rounds=100 share=1 seed= parts=()
while [ $# -gt 0 ]; do
  case "$1" in
    --rounds) rounds=${2:?--rounds needs a number}; shift 2 ;;
    --share) share=${2:?--share needs a number}; shift 2 ;;
    --seed) seed=${2:?--seed needs a number}; shift 2 ;;
    --help | -h) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) sed -n '2,7s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    *) parts+=("$1"); shift ;;
  esac
done
[ ${#parts[@]} -gt 0 ] || parts=(kills members restarts failpoints powercut disk corruption fuzz mutants page)
use_project
cd "$checkout"
records=${PYENGINE_PROOF:-}
if [ -z "$records" ]; then
  records=$(mktemp)
  trap 'rm -f "$records"' EXIT
fi
export PYENGINE_PROOF=$records PYENGINE_SHARE=$share
[ -z "$seed" ] || export PYENGINE_SEED=$seed
failed=0

interrupted() { echo "interrupted" >&2; exit 130; }
tests() {
  local code=0
  "$PYTHON" -m pytest -q --long "$@" || code=$?
  [ "$code" != 2 ] || interrupted
  [ "$code" = 0 ] || failed=1
}

# run_rig RIG SCRIPT ARGUMENT...: runs it and adds what it says. One that cannot run here (2) has said so and adds nothing.
run_rig() {
  local rig=$1 output code=0
  shift
  output=$("$@" --json ${seed:+--seed "$seed"}) || code=$?
  [ "$code" != 130 ] || interrupted
  [ "$code" = 0 ] || failed=1
  [ "$code" = 2 ] || "$PYTHON" -P -m crash.proof add "$records" "$rig" "$*" <<< "$output"
}

kills() {
  local victim kind modes mode
  list_victims
  for victim in "${victims[@]}"; do
    read -r kind modes <<< "$victim"
    for mode in $modes; do
      run_rig kills scripts/crash.sh "$kind" --mode "$mode" --rounds "$rounds"
    done
  done
  tests -m long tests/native/test_writer_kill.py tests/faults/test_failpoints_writer.py
}

members() {
  local kind mode
  for kind in member everything; do
    for mode in async pool sync; do
      run_rig members scripts/kill_members.sh "$kind" --mode "$mode" --rounds $((rounds / 2 + 1))
    done
  done
}

restarts() {
  local script mode
  for script in restart_loop kill_during_recovery hang_worker disk_full; do
    for mode in async pool sync; do
      run_rig restarts "scripts/$script.sh" --mode "$mode" --rounds $((rounds / 5 + 1))
    done
  done
}

failpoints() {
  local part=()
  [ "$share" = 1 ] || part=(--share "$((RANDOM % share + 1))/$share")
  run_rig failpoints scripts/failpoints.sh ${part[@]+"${part[@]}"}
}

power_cuts() {
  local mode then
  tests -m long tests/faults/test_engine_power_cut.py
  for mode in async pool sync; do
    run_rig "power cut" scripts/power_cut.sh --mode "$mode" --rounds $((rounds / 3 + 1)) --states 1000
    run_rig "power cut, blocks" scripts/power_cut.sh --block --mode "$mode" --rounds $((rounds / 10 + 1)) --states 300
    for then in recover rebuild salvage cut read; do
      run_rig "power cut" scripts/power_cut.sh --mode "$mode" --then "$then" --rounds 1 --states 500
    done
  done
}

for part in "${parts[@]}"; do
  case "$part" in
    kills) kills ;;
    members) members ;;
    restarts) restarts ;;
    failpoints) failpoints ;;
    powercut) power_cuts ;;
    disk) tests -m long tests/faults/test_failing_engine.py tests/faults/test_failing_calls.py \
      tests/faults/test_failing_commit.py ;;
    corruption) tests -m long tests/faults/test_corruption.py tests/engine/test_scribbled_memory.py ;;
    fuzz) tests -m long tests/native/test_c_fuzz.py ;;
    mutants)
      tests tests/faults/test_mutants.py
      tests -k broken tests/faults/test_engine_power_cut.py tests/faults/test_block_power_cut.py ;;
    page) ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
  esac
done
"$PYTHON" -P -m crash.proof page "$records" docs/proof.md
exit $failed
