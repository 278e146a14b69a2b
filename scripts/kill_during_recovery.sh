#!/usr/bin/env bash
# Kill everything, then the recovery of that, and the recovery of that: three deep.
# usage: scripts/kill_during_recovery.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main recovery_rounds "$@"
