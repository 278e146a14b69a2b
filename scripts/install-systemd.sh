#!/usr/bin/env bash
# Install the systemd units, or take them away again.
#
#   scripts/install-systemd.sh [--python PYTHON] [--user USER] [--units DIR]
#   scripts/install-systemd.sh --uninstall [--units DIR]
#
#     --python  the interpreter of the environment that pyengine is installed in (default: python3 on PATH)
#     --user    the system user that runs the engine; made if it is not there (default: pyengine)
#     --units   where the units go (default: /etc/systemd/system)
#
# Afterwards, for a store called NAME, in /var/lib/pyengine/NAME:
#     systemctl enable --now pyengine@NAME.target
# Uninstalling stops nothing: it refuses while a store runs. Stores, settings (/etc/pyengine) and the user stay.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python= user=pyengine units=/etc/systemd/system uninstall=
while [ $# -gt 0 ]; do
    case $1 in
        --python) python=${2:?--python needs a path}; shift 2 ;;
        --user) user=${2:?--user needs a name}; shift 2 ;;
        --units) units=${2:?--units needs a directory}; shift 2 ;;
        --uninstall) uninstall=1; shift ;;
        *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done

say() { printf '%s\n' "$*"; }
fail() { printf 'install-systemd.sh: %s\n' "$*" >&2; exit 1; }
reload() {
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
    fi
}

[ -d "$units" ] || fail "$units is not a directory"
[ -w "$units" ] || fail "$units cannot be written: run this as root"

if [ -n "$uninstall" ]; then
    if [ -d /run/systemd/system ]; then
        running=$(systemctl list-units --plain --no-legend --state=active,activating,deactivating \
            'pyengine@*.target' 'pyengine-*@*.service')
        [ -z "$running" ] || fail "still running, stop it first (systemctl stop 'pyengine@NAME.target'):
$running"
    fi
    for source in "$here"/systemd/pyengine*; do
        name=$(basename "$source")
        rm -f "$units/$name"
        # Links that `systemctl enable` made for its instances.
        find "$units" -path '*.wants/*' -name "${name/@./@*.}" -type l -delete
    done
    reload
    say "removed; stores in /var/lib/pyengine, settings in /etc/pyengine and the user stay"
    exit 0
fi

[ -n "$python" ] || python=$(command -v python3) || fail "no python3 on PATH: give --python"
case $python in /*) ;; *) fail "$python: give an absolute path, systemd needs one" ;; esac
[ -x "$python" ] || fail "$python is no program"
problem=$("$python" -P -c 'import pyengine, workers.supervisor' 2>&1) ||
    fail "$python cannot import pyengine; install it there, or give --python another one: ${problem##*$'\n'}"
if ! id -u "$user" >/dev/null 2>&1; then
    useradd --system --user-group --home-dir /var/lib/pyengine --no-create-home --shell /usr/sbin/nologin "$user" ||
        fail "the user $user could not be made"
    say "made the system user $user"
fi
for source in "$here"/systemd/pyengine*; do
    target=$units/$(basename "$source")
    sed -e "s|@PYTHON@|$python|g" -e "s|@USER@|$user|g" "$source" > "$target.new"
    chmod 644 "$target.new"
    mv "$target.new" "$target"
done
reload
say "installed into $units"
say "start a store: systemctl enable --now pyengine@NAME.target"
