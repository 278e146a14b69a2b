#!/usr/bin/env bash
# An engine in sync mode and one producer, every process a child of this shell and in its process group, so
# that an outside rig can kill them all at once. Files are small, so that everything rolls.
# usage: engine.sh STORE ACKS     (PYTHON: the interpreter; PYTHONPATH is set here)
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
checkout=$(cd "$here/../../.." && pwd -P)
export PYTHONPATH=$checkout:$checkout/scripts:$here
python=${PYTHON:-python3}
settings="--set flush_disk_type=SYNC_FLUSH --set mapped_file_size_commit_log_bytes=262144
  --set mapped_file_size_consume_queue_bytes=2000 --set max_hash_slot_num=100 --set max_index_num=400"

"$python" -P -m pyengine.workers.supervisor "$1" --no-children $settings &
for kind in flusher writer reputter allocator checkpointer scheduler; do
  "$python" -P -m "pyengine.workers.$kind" "$1" $settings &
done
exec "$python" -P "$here/rig_producer.py" "$1" "$2"
