"""Whether a queue ends where the log says: by the number in the record of its last entry.

A queue whose entries have moved up, by a foreign hand or a bad copy, has no hole: it only
ends sooner than its last message says. Its next message must not get a number that another
one has, or no rebuilding could tell the two apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pyengine.errors import FormatError
from pyengine.formats.record import I64, QUEUE_OFFSET_AT, decode_record
from pyengine.storage.log_scan import LogView
from pyengine.storage.mapped_file import mapped
from pyengine.storage.recovery.queues import QueueState


def next_offsets_from_log(log: LogView, queues: Sequence[QueueState], start: int, end: int) -> dict[tuple[str, int], int]:
    """The next number of each queue that ends sooner than its last message says, as far as that lies in [start, end).

    The range was read a moment ago, so its pages are in memory; of a queue that is right only a number is looked at.
    """
    found: dict[tuple[str, int], int] = {}
    asked = [queue for queue in queues if queue.last_offset is not None and start <= queue.last_offset < end]
    base, view = -1, None
    with contextlib.ExitStack() as stack:
        for queue in sorted(asked, key=lambda queue: queue.last_offset):
            index = log.index_of(queue.last_offset)
            if index is None:
                continue
            segment = log.segments[index]
            if segment.start_offset != base:
                stack.close()
                base, view = segment.start_offset, stack.enter_context(mapped(segment.path))
            at = queue.last_offset - base
            if at + QUEUE_OFFSET_AT + I64.size > len(view) or I64.unpack_from(view, at + QUEUE_OFFSET_AT)[0] < queue.max_offset:
                continue
            with contextlib.suppress(FormatError):
                message = decode_record(view, at)
                if (message.topic, message.queue_id, message.physical_offset) == (queue.topic, queue.queue_id, queue.last_offset):
                    found[queue.topic, queue.queue_id] = message.queue_offset + 1
    return found
