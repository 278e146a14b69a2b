#!/usr/bin/env bash
# Install the systemd units, or take them away again.
#
#   scripts/install-systemd.sh [--python PYTHON] [--user USER] [--units DIR] [--force]
#   scripts/install-systemd.sh --uninstall [--units DIR]
#
#     --python  the interpreter of the environment that pyengine is installed in (default: python3 on PATH)
#     --user    the system user that runs the engine; made if it is not there (default: pyengine)
#     --units   where the units go (default: /etc/systemd/system)
#     --force   install also where the units as they are cannot run this Python
#
# Afterwards, for a store called NAME, in /var/lib/pyengine/NAME:
#     systemctl enable --now pyengine@NAME.target
# Uninstalling stops nothing: it refuses while a store runs. Stores, settings (/etc/pyengine) and the user stay.
set -euo pipefail

unset CDPATH # or cd prints
here=$(cd -- "$(dirname -- "$0")/.." && pwd)
python= user=pyengine units=/etc/systemd/system uninstall= force=
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=${2:?--python needs a path}; shift 2 ;;
        --user) user=${2:?--user needs a name}; shift 2 ;;
        --units) units=${2:?--units needs a directory}; shift 2 ;;
        --uninstall) uninstall=1; shift ;;
        --force) force=1; shift ;;
        --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done

say() { printf '%s\n' "$*"; }
fail() { printf 'install-systemd.sh: %s\n' "$*" >&2; exit 1; }
# For what would make every unit fail with 203/EXEC at each start.
refuse() {
    [ -n "$force" ] || fail "$*; or give --force and change the units by drop-ins"
    say "warning: $*" >&2
}
# Root never runs the given Python itself, which may be another user's; nor does that have root's terminal, into which it could type.
as_user() {
    if [ "$(id -u)" = "$(id -u "$user")" ]; then
        (cd / && "$@")
    else
        (cd / && setsid --wait setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups "$@" < /dev/null)
    fi
}
# The outermost folder on the way to PATH that the user may not pass, if any.
closed_folder() { # closed_folder PATH
    local folder=
    while IFS= read -r -d / name; do
        folder+=$name/
        as_user test -x "$folder" || { printf %s "$folder"; return; }
    done <<< "$1"
}
# A path as the first word of an ExecStart= line.
escaped() {
    local text=$1 made='' letter
    while [ -n "$text" ]; do
        letter=${text:0:1} text=${text:1}
        case $letter in
            [[:alnum:]/._+=:,@~-]) made+=$letter ;;
            %) made+=%% ;;
            [[:ascii:]]) made+=$(printf '\\x%02x' "'$letter") ;;
            *) made+=$letter ;;
        esac
    done
    printf %s "$made"
}
# Units that were installed from here, this version's or an earlier one's; not those with a file of that name in the folder KEPT.
remove_made_by_us() { # remove_made_by_us [KEPT]
    local unit
    for unit in "$units"/pyengine*; do
        [ -f "$unit" ] && head -n 1 "$unit" | grep -q -e '^# A unit of pyengine:' -e '^# Made by `python -m [a-z.]*\.unit_files' || continue
        [ -n "${1-}" ] && [ -e "$1/${unit##*/}" ] || rm -f "$unit"
    done
}
reload() {
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
}

case $units in /*) ;; *) fail "$units: give an absolute path" ;; esac
[ -d "$units" ] || fail "$units is not a directory"
[ -w "$units" ] || fail "$units cannot be written: run this as root"
# What root writes there, its owner could turn into another file by a link, and into commands of root by another unit.
[ -O "$units" ] && [ -z "$(find "$units" -maxdepth 0 -perm -o+w)" ] ||
    fail "$units belongs to another user, or every user may write in it: give a directory that only you may write in"

if [ -n "$uninstall" ]; then
    if [ -d /run/systemd/system ]; then
        running=$(systemctl list-units --plain --no-legend --state=active,activating,deactivating \
            'pyengine@*.target' 'pyengine-*@*.service')
        [ -z "$running" ] || fail "still running, stop it first (systemctl stop 'pyengine@NAME.target'):
$running"
    fi
    remove_made_by_us
    # Links that `systemctl enable` made for instances, and the folders that it made for them.
    find "$units" -path '*.wants/*' \( -name 'pyengine@*.target' -o -name 'pyengine-*@*.service' \) -type l -delete
    find "$units" -name 'pyengine@*.target.wants' -type d -empty -delete
    reload
    say "removed; stores in /var/lib/pyengine, settings in /etc/pyengine and the user stay"
    exit 0
fi

[ -n "$python" ] || python=$(command -v python3) || fail "no python3 on PATH: give --python"
case $python in /*) ;; *) fail "$python: give an absolute path, systemd needs one" ;; esac
case $python in *'$'*) fail "$python: systemd takes no path with a dollar sign" ;; esac
[ -f "$python" ] && [ -x "$python" ] || fail "$python is not a program"
case $user in '' | -* | *[!A-Za-z0-9._-]*) fail "$user is no name of a system user" ;; esac
if ! id -u "$user" >/dev/null 2>&1; then
    useradd --system --user-group --home-dir /var/lib/pyengine --no-create-home --shell /usr/sbin/nologin "$user" ||
        fail "the user $user could not be made"
    say "made the system user $user"
fi
[ "$(id -u)" = 0 ] || [ "$(id -u)" = "$(id -u "$user")" ] || fail "only root can try whether $user can run $python: run this as root"
problem=
if ! places=$(as_user "$python" -P -c 'import os, sys, pyengine, pyengine.workers.supervisor
for place in sys.executable, sys.prefix, sys.base_prefix, os.path.dirname(pyengine.__file__):
    print(place, os.path.realpath(place), sep="\n")' 2>&1); then
    problem=${places##*$'\n'} places=$(readlink -f -- "$python")
    if [ "$(id -u)" = "$(id -u "$user")" ]; then
        fail "$python cannot import pyengine; install it there, or give --python another one: $problem"
    fi
fi
while IFS= read -r place; do
    case $place/ in /tmp/* | /var/tmp/*)
        refuse "the units cannot see $place, because they have temporary folders of their own (PrivateTmp=yes): \
install pyengine somewhere else, for example in /opt/pyengine"
        break ;;
    esac
done <<< "$python"$'\n'"$places"
if [ -n "$problem" ]; then
    while IFS= read -r place; do
        closed=$(closed_folder "$place/")
        [ -z "$closed" ] || { problem="$closed is closed to that user"; break; }
    done <<< "$python"$'\n'"$places"
    refuse "the user $user cannot run pyengine with $python: $problem; install it where all users can \
read, for example in /opt/pyengine, or give --user the one that owns it"
fi
command=$(escaped "$python")
for source in "$here"/systemd/pyengine*; do
    target=$units/$(basename "$source") text=$(< "$source")
    text=${text//@PYTHON@/"$command"}
    unfinished=$(mktemp "$units/.pyengine.XXXXXX")
    printf '%s\n' "${text//@USER@/"$user"}" > "$unfinished"
    chmod 644 "$unfinished"
    mv -T -- "$unfinished" "$target"
done
remove_made_by_us "$here/systemd"
reload
say "installed into $units"
say "start a store: systemctl enable --now pyengine@NAME.target"
