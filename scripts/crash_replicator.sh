#!/usr/bin/env bash
# Kill the replicator of a SYNC_MASTER or of its slave, or either whole engine, at random moments: what was
# acknowledged is on both sides, and the logs are equal.
# usage: scripts/crash_replicator.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main replicator "$@"
