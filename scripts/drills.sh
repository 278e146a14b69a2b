#!/usr/bin/env bash
# The drills of docs/drills.md, each as its page has it, in an empty folder, and how long each took.
# usage: scripts/drills.sh [--list] [NAME]...     exit 0: each did what its page says, 1: one did not, 2: cannot be done here
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# name, what it needs (a user's or root's rights, or a command), page, heading above its block
drills='backup-and-restore|user|backup.md|A drill
failover|user|drills.md|Failover
more-hosts|mqadmin|hosts.md|A drill
upgrade|user|upgrades.md|Without a stop
full-disk|root|drills.md|Full disk
hung-disk|root|drills.md|Hung disk
lost-shared-memory|user|drills.md|Lost shared memory'

case ${1-} in
  --list) cut -d'|' -f1,3,4 <<<"$drills" | tr '|' '\t'; exit 0 ;;
  -*) sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; [ "$1" = --help ] || exit 2; exit 0 ;;
esac
for name in "$@"; do
  grep -q "^$name|" <<<"$drills" || { note "${0##*/}: no drill $name: --list shows them"; exit 2; }
done
use_project
work=$(mktemp -d)
end() {
  for store in "$work"/*/*/config "$work"/*/*/*/config; do
    [ ! -d "$store" ] || pyengine stop "${store%/config}" >/dev/null 2>&1 || true
  done
  rm -rf --one-file-system "$work"
}
trap end EXIT
mkdir "$work/bin"
printf '#!/bin/sh\nexec %q -P -m pyengine "$@"\n' "$PYTHON" >"$work/bin/pyengine"
chmod +x "$work/bin/pyengine"
export PATH=$work/bin:$PATH
# Two ports next to each other, of those that the system gives to no connection by itself; and a network of this machine's own.
read -r port net < <("$PYTHON" - <<'EOF'
import random, socket
while True:
    port = random.randrange(20_000, 30_000)
    try:
        with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
            break
    except OSError:
        continue
print(port, f"127.{random.randrange(64, 250)}.{random.randrange(250)}")
EOF
)
export port net
cd "$work"
failed=0
printf '| drill | took |\n|---|---:|\n'
while IFS='|' read -r name needs page heading; do
  [ $# = 0 ] || [[ " $* " == *" $name "* ]] || continue
  lacks=
  case $needs in
    user) ;;
    root) [ "$(id -u)" = 0 ] || lacks='only root may mount a disk' ;;
    *) [ -n "$(type -P "$needs")" ] || lacks="$needs is not on PATH" ;;
  esac
  if [ -n "$lacks" ]; then
    note "$name: $lacks"
    [ "$failed" != 0 ] || failed=2
    continue
  fi
  block=$(awk -v heading="$heading" '
    /^#+ / { here = ($0 ~ "^#+ " heading "$") }
    /^```$/ && shows { exit }
    shows
    /^```bash$/ && here { shows = 1 }' "$checkout/docs/$page")
  mkdir "$work/$name"
  began=$EPOCHREALTIME
  if (cd "$work/$name" && exec bash -euo pipefail -c "$block") >"$work/$name.log" 2>&1 </dev/null; then
    awk -v name="$name" -v began="$began" -v now="$EPOCHREALTIME" 'BEGIN { printf "| %s | %.1f s |\n", name, now - began }'
  else
    note "$name did not do what docs/$page says:"
    tail -n 40 "$work/$name.log" >&2
    failed=1
  fi
done <<<"$drills"
exit "$failed"
