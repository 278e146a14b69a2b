#!/usr/bin/env bash
# Kill the writer at random moments: no acknowledged message may be lost, none doubled.
# usage: scripts/crash_writer.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main writer "$@"
