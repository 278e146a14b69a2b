# The drills with this systemd's own, installed units: nothing of them stays.
install_units > /dev/null
left() {
    systemctl list-units --plain --no-legend --state=active,activating,deactivating,failed "pyengine*drill*"
    find /etc/pyengine /dev/shm -mindepth 1
    find /run/systemd/system -name "*drill*"
    find /run -maxdepth 1 -name "drill*"
}
"$SOURCES/scripts/systemd_drills.sh" --here --drill shm-full --drill read-only --drill two-stores > /guest/drills.txt 2>&1
code=$?
cat /guest/drills.txt
ok "the drills hold with installed units ($code)" '[ "$code" = 0 ] && grep -q "^All 3 drills held: " /guest/drills.txt'
ok "... the memory that is filled is a tmpfs of its own" 'grep -q "^  /run/drill-.* is full: puts of producers that are connected go on" /guest/drills.txt'
ok "no unit, setting, drop-in, store or mount of them is left" '[ -z "$(left; find /var/lib/pyengine -mindepth 1; grep drill /proc/self/mounts)" ] || ! left'
"$SOURCES/scripts/systemd_drills.sh" --here --drill stop --rounds 100 > /guest/interrupted.txt 2>&1 &
script=$!
eventually "a drill is under way" 'grep -q "resumed, it goes on" /guest/interrupted.txt'
kill -TERM "$script"
wait "$script"
code=$?
ok "interrupted, it ends with 130 ($code)" '[ "$code" = 130 ] && grep -q "^interrupted; kept: " /guest/interrupted.txt'
ok "... and no unit, setting or drop-in is left" '[ -z "$(left)" ] || ! left'
exit $failed
