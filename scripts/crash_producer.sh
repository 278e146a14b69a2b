#!/usr/bin/env bash
# Kill a producer at random moments: it hurts only its own session.
# usage: scripts/crash_producer.sh [--rounds N] [--seed S] [--mode async|pool|sync] [--json] [--peer]     exit 0: held, 1: lost
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
crash_main producer "$@"
