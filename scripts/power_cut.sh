#!/usr/bin/env bash
# Cut the power under a running engine: every tree that a cut could leave is recovered and audited.
# usage: scripts/power_cut.sh [--block] [--rounds N] [--states N] [--seed S] [--mode async|pool|sync] [--broken SWITCH] [--json]
#                             [--peer] [--with [cleaning] [delayed] [consumers]] [--then recover|rebuild|salvage|cut|read]
#        --with: what else happens in each run; by default the rounds take turns
#        --then: what is done to the store after all processes were killed; the power is cut in it or after it
#        --block: states of a disk with a real ext4 on it (root), not the trees of the strictest reading of POSIX;
#                 --file-system xfs: that one, where mkfs.xfs is
#        exit 0: held, 1: lost, 2: no such disk can be made here, 3: the broken build was not caught
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_project
export PYTHONPATH=$PYTHONPATH:$checkout/tests
rig=engine_power_cut arguments=()
for argument; do
  if [ "$argument" = --block ]; then rig=block_power_cut; else arguments+=("$argument"); fi
done
case "$rig $* " in
  block_power_cut*" --help "* | block_power_cut*" -h "*) # takes no disk
    exec "$PYTHON" -P -c 'import sys; from faults import block_power_cut as rig; sys.argv = ["power_cut.sh --block", "--help"]
rig.main(rig.__doc__, rig.BlockPowerCutRun)' ;;
esac
export PYENGINE_SCRIPT=power_cut.sh
exec "$PYTHON" -P -m "faults.$rig" ${arguments[@]+"${arguments[@]}"}
