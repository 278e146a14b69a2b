#!/usr/bin/env bash
# Stop each kind of process (SIGSTOP), put meanwhile, then resume it or kill it.
# usage: scripts/hang_worker.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main hang_rounds "$@"
