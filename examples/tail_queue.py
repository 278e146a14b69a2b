"""Follow one queue of a store, while any producers write it: python examples/tail_queue.py STORE TOPIC [QUEUE_ID] [COUNT]"""

import sys
import time
from collections.abc import Iterator

import pyengine


def follow(store: str, topic: str, queue_id: int = 0) -> Iterator[pyengine.Message]:
    """Yield every message of the queue from its first one on, in order; wait for more."""
    with pyengine.open_store(store) as reader:
        offset, _ = reader.queue_range(topic, queue_id)
        while True:
            found = reader.get_message(topic, queue_id, offset)
            yield from found.messages
            if found.next_begin_offset == offset:
                time.sleep(0.05)
            offset = found.next_begin_offset


def main(store: str, topic: str, queue_id: str = "0", count: str = "0") -> None:
    for number, message in enumerate(follow(store, topic, int(queue_id)), start=1):
        print(message.queue_offset, message.tags, message.body.decode(errors="replace"), flush=True)
        if number == int(count):
            return


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass
