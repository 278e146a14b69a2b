# The same store on a machine that has just come up.
if [ "$HOW" = cut ]; then
    ok "the store was not stopped" '[ -e /var/lib/pyengine/demo/abort ]'
else
    ok "the store was stopped in order" '[ ! -e /var/lib/pyengine/demo/abort ]'
fi
install_units > /dev/null
settings demo PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH
systemctl start pyengine@demo.target
eventually "the engine is up" 'all_active demo'
eventually "it takes puts" 'put_ok demo message-6'
eventually "every acknowledged message is there, in order" '[ "$(engine tail /var/lib/pyengine/demo --topic orders --from begin --no-follow --json | "$PYTHON" -c "import json, sys; print(*[json.loads(line)[\"body\"] for line in sys.stdin])")" = "message-1 message-2 message-3 message-4 message-5 message-6" ]'
systemctl stop pyengine@demo.target
exit $failed
