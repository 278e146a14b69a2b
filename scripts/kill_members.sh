#!/usr/bin/env bash
# Kill members of groups that acknowledge by message, and the writer beside them, or everything at once, in many rounds; then count.
# usage: scripts/kill_members.sh [member|everything] [--rounds N] [--seed S] [--mode async|pool|sync] [--json]     exit 0: held, 1: lost or repeated
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main members "$@"
