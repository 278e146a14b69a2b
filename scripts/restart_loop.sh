#!/usr/bin/env bash
# Stop and start an engine in every way, in many rounds, under producers.
# usage: scripts/restart_loop.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main restart_loop "$@"
