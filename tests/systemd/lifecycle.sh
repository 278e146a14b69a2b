# Install, start, kill each part, hang one, stop in order, kill all, restart in place, uninstall.
install_units > /guest/install.txt
ok "installing makes the user" 'id -u pyengine > /dev/null && grep -q "made the system user" /guest/install.txt'
settings demo
drop_in pyengine-reputter@.service Service WatchdogSec=2
ok "units are accepted by systemd-analyze verify" 'systemd-analyze verify /etc/systemd/system/pyengine-*@.service 2>&1 | tee /guest/verify.txt; [ ! -s /guest/verify.txt ]'
ok "the target can be enabled" 'systemctl enable pyengine@demo.target 2> /dev/null && [ -L /etc/systemd/system/multi-user.target.wants/pyengine@demo.target ]'
systemctl start pyengine@demo.target
eventually "the target brings the store and every worker up" 'all_active demo'
ok "a kind that the mode does not need is left out, not failed" '[ "$(prop "$(unit committer demo)" ActiveState)" = inactive ]'
ok "a put is stored" 'put_ok demo one'
ok "the store is private to its user" '[ "$(stat -c "%U %a" /var/lib/pyengine/demo)" = "pyengine 700" ]'
ok "another user is refused" '! setpriv --reuid nobody --regid nogroup --clear-groups -- "$PYTHON" -P -m pyengine put /var/lib/pyengine/demo --topic orders no 2> /guest/refused.txt'
ok "workers run as that user without any capability" '[ "$(stat -c %U "/proc/$(pid writer demo)")" = pyengine ] && grep -q "^CapEff:.0*$" "/proc/$(pid writer demo)/status"'
for kind in $KINDS; do
    others=$(for other in store $KINDS; do [ "$other" = "$kind" ] || pid "$other" demo; done)
    before=$(pid "$kind" demo)
    kill -9 "$before"
    eventually "$kind comes back after kill -9" "back $kind demo $before"
    ok "... and the others were left alone" '[ "$(for other in store $KINDS; do [ "$other" = "$kind" ] || pid "$other" demo; done)" = "$others" ]'
    eventually "... and puts go on" "put_ok demo after-$kind"
done
workers=$(for kind in $KINDS; do pid "$kind" demo; done)
epoch=$(status_of demo 'd["epoch"]')
before=$(pid store demo)
kill -9 "$before"
eventually "the store unit comes back after kill -9" "back store demo $before"
eventually "... takes producers again" 'put_ok demo after-store'
ok "... took the living workers over, without recovery" '[ "$(for kind in $KINDS; do pid "$kind" demo; done)" = "$workers" ] && [ "$(status_of demo "d[\"epoch\"]")" = "$epoch" ]'
before=$(pid reputter demo)
kill -STOP "$before"
eventually "a worker that is stopped is killed by the watchdog and replaced" "back reputter demo $before"
ok "... the journal says why" 'journalctl -u "$(unit reputter demo)" | grep -qi "watchdog timeout"'
for kind in store $KINDS; do systemctl kill -s KILL "$(unit "$kind" demo)"; done
eventually "everything comes back after all were killed at once" 'all_active demo && put_ok demo after-all'
ok "... by recovery" '[ "$(status_of demo "d[\"epoch\"]")" -gt "$epoch" ]'
pids=$(for kind in store $KINDS; do pid "$kind" demo; done | sort)
systemctl restart pyengine@demo.target
eventually "an upgrade in place: the target restarts all of them" 'all_active demo && [ -z "$(comm -12 <(echo "$pids") <(for kind in store $KINDS; do pid "$kind" demo; done | sort))" ]'
ok "... in order: no recovery was needed" 'journalctl -u "$(unit store demo)" -o cat | grep -q "^stopped$"'
ok "... and puts go on" 'put_ok demo after-upgrade'
pids=$(for kind in store $KINDS; do pid "$kind" demo; done)
for kind in store $KINDS; do systemctl kill -s HUP "$(unit "$kind" demo)"; done
ok "SIGHUP ends no part" 'put_ok demo after-hangup && [ "$(for kind in store $KINDS; do pid "$kind" demo; done)" = "$pids" ]'
epoch=$(status_of demo 'd["epoch"]')
rm -r /dev/shm/pyengine-* /dev/shm/sem.pyengine-*
eventually "a store whose names in shared memory were removed comes back whole" 'all_active demo && [ "$(status_of demo "d[\"epoch\"]")" -gt "$epoch" ] && put_ok demo after-names'
ok "... in order: no recovery was needed" '! journalctl -u "$(unit store demo)" -o cat | grep -q "not stopped in an orderly way"'
echo PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH >> /etc/pyengine/demo.env
kill -9 "$(pid store demo)"
eventually "a store unit that finds other settings than those of its workers starts all of them with these" 'all_active demo && [ "$(status_of demo "d[\"mode\"]")" = sync ] && put_ok demo after-settings'
ok "uninstalling is refused while a store runs" '! "$SOURCES/scripts/install-systemd.sh" --uninstall 2> /guest/uninstall.txt && grep -q "still running" /guest/uninstall.txt'
expected=$(($(wc -w <<< "$KINDS") + 7)) # one, one after each kind, store, all, upgrade, hangup, names, settings
systemctl stop pyengine@demo.target pyengine-store@demo.service # the store is the last: so all of them are waited for
ok "stopping the target stops all" '[ -z "$(systemctl list-units --plain --no-legend --state=active,failed "pyengine-*@demo.service")" ]'
ok "... in order: the store is clean" '[ ! -e /var/lib/pyengine/demo/abort ] && [ "$(status_of demo "d[\"state\"]")" = stopped ]'
journalctl -o cat | sed -n 's/^Stopped.*Message log demo: \([a-z]*\).*/\1/p' | tail -n "$(($(wc -w <<< "$KINDS") + 1))" | tr '\n' ' ' > /guest/order.txt
ok "... the writer first, the store last: $(cat /guest/order.txt)" '[ "$(cat /guest/order.txt)" = "$ORDER store " ]'
ok "the store checks out" 'engine check /var/lib/pyengine/demo > /guest/check.txt 2>&1'
ok "every acknowledged message is there" '[ "$(engine tail /var/lib/pyengine/demo --topic orders --from begin --no-follow --json | wc -l)" = "$expected" ]'
ok "nothing is left in shared memory" '[ -z "$(ls /dev/shm)" ]'
ok "levels reach the journal" 'journalctl -u "$(unit store demo)" -p info -o cat | grep -q "adopted living workers" && ! journalctl -u "$(unit store demo)" -p err -o cat | grep -q "adopted"'
ok "... with fields to filter by" 'journalctl EVENT=ENGINE_ADOPTED STORE=/var/lib/pyengine/demo -o cat | grep -q "adopted living workers" && [ "$(journalctl EVENT=ENGINE_ADOPTED WORKER=writer -o cat | grep -c adopted)" = 0 ]'
"$SOURCES/scripts/install-systemd.sh" --uninstall
ok "uninstalling takes every unit and link away, and keeps the store" '[ -z "$(find /etc/systemd/system -name "pyengine*" ! -path "*.d*")" ] && [ -d /var/lib/pyengine/demo/commitlog ]'
exit $failed
