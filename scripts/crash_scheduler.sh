#!/usr/bin/env bash
# Kill the scheduler at random moments: each delayed message is delivered, some twice, none never.
# usage: scripts/crash_scheduler.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main scheduler "$@"
