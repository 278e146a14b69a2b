#!/usr/bin/env bash
# Replay a manifest's puts through the real writer, with its inputs and its clock, and compare every answer.
# usage: scripts/replay_manifest.sh MANIFEST STORE [async|pool|sync]     exit 0: all equal, 1: not
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
[ $# -ge 2 ] || give_up "usage: scripts/replay_manifest.sh MANIFEST STORE [async|pool|sync]"
use_project
manifest=$1 store=$2
shift 2
case ${1:-} in async | pool | sync) mode=(--mode "$1") && shift ;; *) mode=() ;; esac
exec "$PYTHON" -P "$checkout/scripts/replay.py" "$manifest" "$store" ${mode[@]+"${mode[@]}"} "$@"
