#!/usr/bin/env bash
# Kill the checkpointer at random moments: the checkpoint never runs ahead of the disk.
# usage: scripts/crash_checkpointer.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main checkpointer "$@"
