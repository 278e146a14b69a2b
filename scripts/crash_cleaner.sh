#!/usr/bin/env bash
# Kill the cleaner at random moments: what it deletes is whole segments, oldest first, and nothing else.
# usage: scripts/crash_cleaner.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main cleaner "$@"
