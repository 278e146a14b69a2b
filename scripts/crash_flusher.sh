#!/usr/bin/env bash
# Kill the flusher at random moments: waiting puts go on, nothing acknowledged is lost.
# usage: scripts/crash_flusher.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main flusher "$@"
