#!/usr/bin/env bash
# Fill the disk under a running engine in many rounds, with and without killing everything (needs root).
# usage: scripts/disk_full.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost, 2: not root
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main disk_full_rounds "$@"
