#!/usr/bin/env bash
# Kill one kind of process at random moments while producers put: what was acknowledged must be there afterwards.
# usage: scripts/crash.sh KIND [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
# KIND: a worker (--help lists them), supervisor, producer, or everything: all processes at once, then recovery
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
rounds_main kills "$@"
