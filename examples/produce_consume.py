"""Put messages into a store and read them back: python examples/produce_consume.py [STORE]"""

import sys
import tempfile
from pathlib import Path

import pyengine


def main(store: Path) -> None:
    # Small files: a real store keeps the defaults (1 GiB segments).
    small: pyengine.EngineSettings = {"mapped_file_size_commit_log_bytes": "16MiB", "max_hash_slot_num": 1000, "max_index_num": 4000}
    with pyengine.Engine(store, **small):                      # workers as children, orderly stop at the end
        with pyengine.connect(store) as producer:
            answer = producer.put("orders", b"17 paid", tags="paid", keys="order-17")
            print("put:", answer.status.name, answer.msg_id, "queue offset", answer.queue_offset)
            many = producer.put_many("orders", [b"%d sent" % number for number in range(18, 28)], tags="sent")
            print("put_many:", many.status.name, many.count, "messages from queue offset", many.first_queue_offset)

    with pyengine.open_store(store) as reader:                 # reading needs no engine
        found = reader.get_message("orders", 0, offset=0, tags="sent")
        print("sent:", [message.body.decode() for message in found.messages])
        for message in reader.query_message("orders", "order-17"):
            print("by key:", message.body.decode(), message.properties)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder) / "store")
