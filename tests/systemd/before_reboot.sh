# Puts that are acknowledged as durable; then the machine stops in order, or at once.
install_units > /dev/null
settings demo PYENGINE_FLUSH_DISK_TYPE=SYNC_FLUSH
systemctl start pyengine@demo.target
eventually "the engine is up" 'all_active demo'
for number in 1 2 3 4 5; do ok "put $number" "put_ok demo message-$number"; done
if [ "$HOW" = cut ]; then
    echo $failed > /guest/code
    exec systemctl --force --force poweroff
fi
exit $failed
