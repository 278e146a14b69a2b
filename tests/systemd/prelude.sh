# Read by each guest script: PYTHON and SOURCES are set before.
failed=0
export PYTHONPATH=$SOURCES
ok() { if eval "$2"; then echo "ok      $1"; else echo "FAILED  $1"; failed=1; fi; }
# Wait for a condition, with a deadline.
eventually() {
    local until=$((SECONDS + 60))
    while [ "$SECONDS" -lt "$until" ]; do
        if eval "$2"; then echo "ok      $1"; return; fi
        sleep 0.05
    done
    echo "FAILED  $1"; failed=1
}
prop() { systemctl show -P "$2" "$1"; }
unit() { echo "pyengine-$1@$2.service"; }
pid() { prop "$(unit "$1" "$2")" MainPID; }
active() { systemctl is-active -q "$(unit "$1" "$2")"; }
# Another process than before: back KIND STORE PID
back() { local now; now=$(pid "$1" "$2"); [ "$now" != 0 ] && [ "$now" != "$3" ] && active "$1" "$2"; }
all_active() { local kind; for kind in store $KINDS; do active "$kind" "$1" || return 1; done; }
# pyengine as the user that the units run as.
engine() { setpriv --reuid pyengine --regid pyengine --init-groups -- "$PYTHON" -P -m pyengine "$@"; }
status_of() { engine status "/var/lib/pyengine/$1" --json | "$PYTHON" -c "import json, sys; d = json.load(sys.stdin); print($2)"; }
put_ok() { engine put "/var/lib/pyengine/$1" --topic orders "$2" --json > /dev/null; }
settings() {
    mkdir -p /etc/pyengine
    printf '%s\n' "PYTHONPATH=$SOURCES" PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES=1MiB PYENGINE_MAPPED_FILE_SIZE_CONSUME_QUEUE_BYTES=6000 \
        PYENGINE_MAX_HASH_SLOT_NUM=1000 PYENGINE_MAX_INDEX_NUM=4000 "${@:2}" > "/etc/pyengine/$1.env"
}
drop_in() { # UNIT SECTION LINE
    mkdir -p "/etc/systemd/system/$1.d"
    printf '[%s]\n%s\n' "$2" "$3" > "/etc/systemd/system/$1.d/test.conf"
    systemctl daemon-reload
}
install_units() { "$SOURCES/scripts/install-systemd.sh" --python "$PYTHON"; }
