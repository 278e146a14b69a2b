#!/usr/bin/env bash
# An upgrade drill: another version of pyengine and this one take turns with one store, stopped and running, forth and back.
# usage: scripts/upgrade.sh [REVISION]     default: the last release; any revision of this repository, as git knows it
#
# The other version is built from the repository's history into a folder of its own. Every message put must be read back by
# both, exactly once and in order, after each step; each step says how long it took. Exit 0: all of it held.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
source "$here/environment.sh"

last_release=a719f76 # 0.2.0
case ${1-} in
  -*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; [ "$1" = --help ] || exit 2; exit 0 ;;
esac
revision=$(git -C "$checkout" rev-parse --verify --quiet "${1:-$last_release}^{commit}") ||
  give_up "this checkout's history has no revision ${1:-$last_release} (a shallow clone?)"
use_environment test
new=$VIRTUAL_ENV/bin/pyengine

work=$(mktemp -d)
store="$work/a store"
old=$work/env/bin/pyengine
clean_up() {
  [ ! -x "$old" ] || "$old" stop "$store" >/dev/null 2>&1 || true
  "$new" stop "$store" >/dev/null 2>&1 || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
mkdir "$work/source"
git -C "$checkout" archive "$revision" | tar -x -C "$work/source"
quietly() { "$@" >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2; give_up "failed: $*"; }; }
note "building $revision ..."
quietly "$PYTHON" -m venv "$work/env"
quietly "$work/env/bin/python" -m pip install --disable-pip-version-check "$work/source"
cd "$work" # not the checkout: its packages would be found first

count=0
step() { # step WHAT command...: runs it, says how long it took
  local what=$1 began=$EPOCHREALTIME
  shift
  quietly "$@"
  printf '%-70s %5.1f s\n' "$what" "$(awk -v a="$began" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
}
refused() { # refused CODE command...: it must end with that code, and say that another version runs
  local code=0 wanted=$1
  shift
  "$@" >"$work/log" 2>&1 || code=$?
  [ "$code" = "$wanted" ] && grep -q "another version of pyengine" "$work/log" || { cat "$work/log" >&2; give_up "exit code $code: $*"; }
}
put() { # put PYENGINE: three messages more
  local number
  for number in 1 2 3; do
    count=$((count + 1))
    quietly "$1" put "$store" --topic orders --keys "k$count" "message $count"
  done
}
read_back() { # read_back PYENGINE: all of them, in order, by queue and by key; then the whole store is checked
  "$1" get "$store" --topic orders --queue-id 0 --offset 0 --max-messages 1000 --json >"$work/found"
  "$PYTHON" - "$count" "$work/found" <<'END'
import json, sys
bodies = [message["body"] for message in json.load(open(sys.argv[2]))["messages"]]
assert bodies == [f"message {number}" for number in range(1, int(sys.argv[1]) + 1)], bodies
END
  quietly "$1" query "$store" --topic orders --key "k$count"
  grep -q "message $count" "$work/log" || give_up "message $count is not found by its key"
}
supervisor() {
  "$1" status "$store" --json |
    "$PYTHON" -c 'import json, sys; print(next(one["pid"] for one in json.load(sys.stdin)["workers"] if one["kind"] == "supervisor"))'
}
layout() { "$1" -c 'from pyengine.native import control; print(control.lib.MS_CONTROL_LAYOUT_VERSION)'; }
share_memory=false # whether each knows the memory of the other's engine
[ "$(layout "$work/env/bin/python")" != "$(layout "$PYTHON")" ] || share_memory=true

sizes=(--set mapped_file_size_commit_log_bytes=1MiB --set max_index_num=4000 --set max_hash_slot_num=1000)
step "the other version makes a store" "$old" start "$store" "${sizes[@]}"
put "$old"
step "it stops" "$old" stop "$store"
step "this version starts on it" "$new" start "$store"
read_back "$new"
put "$new"
step "it stops" "$new" stop "$store"
quietly "$new" check "$store"
step "back: the other version starts on it" "$old" start "$store"
read_back "$old"
put "$old"

if $share_memory; then
  step "this version takes the running engine over" "$new" start "$store" --take-over
  put "$new"
  put "$old" # it opens a session, as each program does that still runs with the other version
  read_back "$new"
  step "it stops" "$new" stop "$store"
else
  note "their shared memory has different layouts: each must refuse the other's running engine, and harm nothing"
  refused 1 "$new" start "$store" --take-over
  refused 1 "$new" put "$store" --topic orders "refused"
  kill -KILL "$(supervisor "$old")"
  refused 5 "$new" start "$store"
  step "the other version takes its own workers over" "$old" start "$store"
  read_back "$old"
  put "$old"
  step "this version stops the other's engine in order" "$new" stop "$store"
fi
step "this version starts" "$new" start "$store"
read_back "$new"
put "$new"
if $share_memory; then
  step "back: the other version takes the running engine over" "$old" start "$store" --take-over
  put "$old"
  read_back "$old"
  step "and this version takes it over again" "$new" start "$store" --take-over
else # an older version has words of its own for it
  ! "$old" start "$store" --take-over >"$work/log" 2>&1 || give_up "the other version took over an engine whose memory it does not know"
  ! "$old" put "$store" --topic orders "refused" >"$work/log" 2>&1 || give_up "the other version put into an engine whose memory it does not know"
fi
read_back "$new"
put "$new" # the engine still takes puts
quietly pkill -KILL -f "pyengine[.]workers[.][a-z]+ $store"
step "this version recovers after a kill of all its processes" "$new" start "$store"
read_back "$new"
put "$new"
quietly pkill -KILL -f "pyengine[.]workers[.][a-z]+ $store"
step "back: the other version recovers after such a kill" "$old" start "$store"
read_back "$old"
step "it stops" "$old" stop "$store"
quietly "$old" check "$store"
quietly "$new" check "$store"
echo "held: $count messages, read back by both versions after each step"
