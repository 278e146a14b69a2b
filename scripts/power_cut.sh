#!/usr/bin/env bash
# Cut the power under a running engine: every tree that a cut could leave is recovered and audited.
# usage: scripts/power_cut.sh [--rounds N] [--states N] [--seed S] [--mode async|pool|sync] [--broken SWITCH] [--json] [--peer]
#        exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
use_project
export PYTHONPATH=$PYTHONPATH:$checkout/tests
exec "$PYTHON" -P -m faults.engine_power_cut "$@"
