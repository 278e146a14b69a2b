# Deaths in a row, a store that a broker has open, and places and names that are out of the ordinary.
environment="/guest/an environment, 50%" # the same one, in a place with a space and a percent sign
mkdir -p "$environment/bin"
ln -s "$PYTHON" "$environment/bin/python"
for name in pyvenv.cfg lib lib64; do ln -s "$(dirname "$PYTHON")/../$name" "$environment/$name"; done
install() { "$SOURCES/scripts/install-systemd.sh" --python "$environment/bin/python" > /dev/null; }
install
NAME='odd-one_2.x'
settings "$NAME"
systemctl start "pyengine@$NAME.target"
eventually "a path of Python with a space and a percent sign" 'all_active "$NAME"'
ok "... a put is stored where the name says" 'put_ok "$NAME" one && [ -d "/var/lib/pyengine/$NAME/commitlog" ]'
for number in $(seq 25); do
    before=$(pid writer "$NAME")
    kill -9 "$before"
    eventually "the writer is back after death $number" "back writer $NAME $before"
done
ok "... and puts go on" 'put_ok "$NAME" two'
eventually "... status counts them" '[ "$(status_of "$NAME" "[w[\"restarts\"] for w in d[\"workers\"] if w[\"kind\"] == \"writer\"][0]")" = 25 ]'
printf '# Made by `python -m pyengine.engine.unit_files systemd` from pyengine/engine/kinds.py: change it there.\n' > /etc/systemd/system/pyengine-former@.service
install
ok "installing again takes away a unit of an earlier version, and disturbs no other" '[ ! -e /etc/systemd/system/pyengine-former@.service ] && all_active "$NAME" && put_ok "$NAME" three'
systemctl stop "pyengine@$NAME.target" "$(unit store "$NAME")"
ok "stopped in order" '[ ! -e "/var/lib/pyengine/$NAME/abort" ]'
"$PYTHON" -c 'import fcntl, sys
with open(sys.argv[1], "r+") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX, 1)
    input()' "/var/lib/pyengine/$NAME/lock" < <(while [ ! -e /guest/let-go ]; do sleep 0.1; done; echo) &
systemctl start --no-block "pyengine@$NAME.target"
eventually "a store that a broker has open says so" 'journalctl -u "$(unit store "$NAME")" -p err -o cat | grep -q "probably a RocketMQ broker"'
touch /guest/let-go
eventually "... once it is gone the store comes up by itself" 'all_active "$NAME" && put_ok "$NAME" four'
systemctl stop "pyengine@$NAME.target" "$(unit store "$NAME")"
mkdir -p /srv/disk /var/lib/pyengine/far
mount --bind /srv/disk /var/lib/pyengine/far
mkdir /srv/memory
settings far PYENGINE_SHM_DIRECTORY=/srv/memory
for kind in store $KINDS; do drop_in "pyengine-$kind@far.service" Service ReadWritePaths=/srv/memory; done
systemctl start --no-block pyengine@far.target
eventually "a memory folder of root's is refused, and named" 'journalctl -u pyengine-store@far.service -p err -o cat | grep -q "cannot make /srv/memory/pyengine-"'
chown pyengine: /srv/memory
eventually "a store on a disk of its own, with its memory elsewhere" 'all_active far && put_ok far one && [ -d /srv/disk/commitlog ] && ls /srv/memory | grep -q pyengine-'
systemctl stop pyengine@far.target pyengine-store@far.service
ok "... stopped in order" '[ ! -e /srv/disk/abort ] && [ -z "$(ls /srv/memory)" ]'
exit $failed
