# Two stores side by side, one with the pool, and limits that are too low.
install_units > /dev/null
settings plain METRICS_LISTEN=127.0.0.1:0
settings pool PYENGINE_TRANSIENT_STORE_POOL_ENABLE=true PYENGINE_TRANSIENT_STORE_POOL_SIZE=3 \
    PYENGINE_HA_LISTEN_PORT=$((20000 + RANDOM % 10000)) PYENGINE_GATEWAY_ENABLE=true PYENGINE_GATEWAY_NAMESRV_PORT=0 \
    PYENGINE_GATEWAY_BROKER_PORT=0 # the guest shares this machine's network
drop_in pyengine-writer@pool.service Service LimitMEMLOCK=64K
systemctl start pyengine@plain.target pyengine@pool.target
eventually "two stores run side by side" 'all_active plain && all_active pool'
eventually "the pool has its committer" 'active committer pool && ! active committer plain'
eventually "a master that listens has its replicator" 'active replicator pool && ! active replicator plain'
ok "a memlock limit below the pool's size only makes it slower" 'put_ok pool one && grep -q "Max locked memory *65536" "/proc/$(pid writer pool)/limits"'
ok "... and is warned of, once" '[ "$(journalctl -u "$(unit writer pool)" -p warning -o cat | grep -c "raise the memlock limit")" = 1 ]'
ok "... it is what status says" '[ "$(status_of pool "d[\"mode\"]")" = pool ]'
eventually "where it is wanted the gateway runs" 'active gateway pool && ! active gateway plain'
for kind in committer replicator gateway; do
    before=$(pid $kind pool)
    kill -9 "$before"
    eventually "the $kind comes back" "back $kind pool $before && put_ok pool $kind"
done
systemctl stop pyengine@pool.target pyengine-store@pool.service
ok "stopping one leaves the other" 'all_active plain && put_ok plain one'
ok "... and the pool was drained" '[ "$(status_of pool "d[\"undrained_bytes\"]")" = 0 ] && [ ! -e /var/lib/pyengine/pool/abort ]'
settings plain PYENGINE_FLUSH_DISK_TYPE=NO_SUCH_FLUSH
systemctl restart pyengine@plain.target 2> /dev/null
eventually "a setting that is refused is a failure that says so" 'journalctl -u "$(unit store plain)" -p err -o cat | grep -q NO_SUCH_FLUSH'
ok "... and is not tried for ever" '[ "$(prop "$(unit store plain)" SubState)" = failed ]'
systemctl stop pyengine@plain.target pyengine-store@plain.service
settings plain METRICS_LISTEN=127.0.0.1:0
systemctl reset-failed 'pyengine-*'
systemctl start pyengine@plain.target
eventually "corrected, it comes up" 'all_active plain && put_ok plain two'
systemctl start pyengine-metrics@plain.service
eventually "metrics are a unit too" 'journalctl -u pyengine-metrics@plain.service -o cat | grep -q "^http://127"'
url=$(journalctl -u pyengine-metrics@plain.service -o cat | grep "^http://127")
ok "... that answers on the loopback" '"$PYTHON" -c "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())" "$url" | grep -q "^pyengine_put_messages_total [1-9]"'
settings held
for kind in store $KINDS; do drop_in "$(unit "$kind" held)" Unit JobRunningTimeoutSec=3; done
install -d -o pyengine -g pyengine -m 0700 /var/lib/pyengine/held
setpriv --reuid pyengine --regid pyengine --init-groups -- "$PYTHON" -c '
import fcntl, time
lock = open("/var/lib/pyengine/held/lock", "w")
fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
print("locked", flush=True)
time.sleep(600)' > /guest/locked.txt &
holder=$!
eventually "another program has a store open" 'grep -q locked /guest/locked.txt'
timeout 120 systemctl start pyengine@held.target 2> /guest/held.txt
code=$?
ok "a start that cannot succeed ends, and says that it failed ($code)" '[ "$code" = 1 ] && grep -q "dependency job for pyengine@held.target failed" /guest/held.txt'
ok "... the journal has the reason" 'journalctl -u pyengine-up@held.service -p err -o cat | grep -q "^pyengine-store@held.service is not up: cannot start: .*open in another program"'
ok "... and the store is tried further" '! all_active held && [ "$(prop "$(unit store held)" ActiveState)" = activating ]'
kill "$holder"
eventually "once it can be, it is up by itself" 'all_active held && put_ok held one'
systemctl start pyengine@held.target
ok "a start that succeeds says so" 'systemctl is-active -q pyengine@held.target'
systemctl stop pyengine@held.target pyengine-store@held.service
ok "stopping the target stops it" '[ -z "$(systemctl list-units --plain --no-legend --state=active,failed "pyengine-*@held.service")" ]'
for name in store $KINDS committer replicator gateway metrics; do
    echo "exposure $name $(systemd-analyze security --no-pager "pyengine-$name@plain.service" 2>/dev/null | sed -n 's/.*Overall exposure level.*: \([0-9.]*\).*/\1/p')"
done
systemctl stop pyengine@plain.target
exit $failed
