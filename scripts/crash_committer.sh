#!/usr/bin/env bash
# Kill the committer at random moments (pool mode): what waits in the pool gets into the files.
# usage: scripts/crash_committer.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main committer "$@"
