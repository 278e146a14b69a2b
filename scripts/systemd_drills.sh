#!/usr/bin/env bash
# What can happen to an engine of systemd units, drill by drill, under producers: kill -9, SIGTERM, SIGSTOP, a memory limit,
# a disk that turns read-only, a full /dev/shm, two stores, a restore over a store. Root only.
# usage: scripts/systemd_drills.sh [--here] [--list] [--drill NAME]... [--rounds N] [--seed S] [--mode async|pool|sync] [--json]
#        exit 0: held, 1: something was lost, 2: cannot be done here
# This machine's systemd is booted once more for it, in namespaces of its own and over a throw-away copy of /: nothing
# outside changes. --here: this machine's own systemd, with the units that scripts/install-systemd.sh has installed; the stores,
# settings and drop-ins of the drills go at the end.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${1-}" = --here ]; then
  shift
  rounds_main systemd_drills "$@"
fi
for word in "$@"; do
  case $word in --list | --help | -h) rounds_main systemd_drills "$@" ;; esac
done
seen_by_units() { # the units have temporary folders of their own
  case $1/ in /tmp/* | /var/tmp/*) note "${0##*/}: the units cannot see $1 (PrivateTmp=yes): have it in another folder"; exit 2 ;; esac
}
[ "$(id -u)" = 0 ] || { note "${0##*/}: only root may boot a systemd"; exit 2; }
seen_by_units "$checkout"
[ -x /lib/systemd/systemd ] || [ -x /usr/lib/systemd/systemd ] || { note "${0##*/}: there is no systemd to boot"; exit 2; }
use_project
PYTHON=$(realpath -s "$(command -v "$PYTHON")") # it may be a word that PATH explains
seen_by_units "$PYTHON"
out=$(mktemp -d "${TMPDIR:-/tmp}/pyengine-drills.XXXXXX")
mkdir "$out/boot" "$out/shared" "$out/shared/stores"
chmod 711 "$out/shared"
touch "$out/shared/stdout" "$out/shared/stderr"
base=$(realpath "$("$PYTHON" -c 'import sys; print(sys._base_executable)')")
{
  printf '#!/bin/bash\nexec > /drills/stdout 2> /drills/stderr\nexport PYTHONPATH=%q TMPDIR=/drills PYENGINE_DRILLS_IN_GUEST=1 PYENGINE_SCRIPT=%q\n' \
    "$PYTHONPATH" "${0##*/}"
  printf '%q --python %q > /dev/null || exit 2\n' "$scripts/install-systemd.sh" "$PYTHON"
  printf 'exec %q -P -m crash.systemd_drills' "$PYTHON"
  [ $# = 0 ] || printf ' %q' "$@"
  printf '\n'
} >"$out/guest"
binds=(-v "$out/shared:/drills" -v "$out/shared/stores:/var/lib/pyengine")
for path in "$checkout" "$(dirname "$(dirname "$PYTHON")")" "$(dirname "$(dirname "$base")")"; do
  [ "$(stat -c %d "$path")" = "$(stat -c %d /)" ] || binds+=(-v "$path:$path") # the copy of / has no other file systems
done
tail -q -s 0.1 -n +1 -f "$out/shared/stderr" >&2 &
shows=$! keeps=
end() {
  sleep 0.3 # the last lines are shown
  kill "$shows" 2>/dev/null || true
  if [ -n "$keeps" ]; then note "kept: $out"; else rm -rf "$out"; fi
}
trap end EXIT # also where run_part ends the script
code=0
run_part "$checkout/tests/systemd/boot.sh" -m -t 3600 -r "$checkout" -r "$PYTHON" -r "$base" "${binds[@]}" "$out/boot" "$out/guest" >/dev/null ||
  code=$?
cat "$out/shared/stdout"
[ "$code" = 0 ] || keeps=1
exit "$code"
