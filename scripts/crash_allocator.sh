#!/usr/bin/env bash
# Kill the allocator at random moments: segments appear whole or not at all.
# usage: scripts/crash_allocator.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main allocator "$@"
