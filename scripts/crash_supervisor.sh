#!/usr/bin/env bash
# Kill the supervisor at random moments: workers and producers go on, its successor adopts them.
# usage: scripts/crash_supervisor.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main supervisor "$@"
