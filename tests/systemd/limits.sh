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
for name in store $KINDS committer replicator gateway metrics; do
    echo "exposure $name $(systemd-analyze security --no-pager "pyengine-$name@plain.service" 2>/dev/null | sed -n 's/.*Overall exposure level.*: \([0-9.]*\).*/\1/p')"
done
systemctl stop pyengine@plain.target
exit $failed
