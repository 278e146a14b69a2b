#!/usr/bin/env bash
# Kill every process at once, recover, check, go on: what was acknowledged is there (pool: drained).
# usage: scripts/crash_everything.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main all "$@"
