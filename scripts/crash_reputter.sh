#!/usr/bin/env bash
# Kill the reputter at random moments: every message enters its queue once, in order.
# usage: scripts/crash_reputter.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main reputter "$@"
