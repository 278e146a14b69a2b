"""A big commit log in a moment: real records, stamped in bulk, with no engine and no queues. For benchmarks of readers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy

from pyengine.formats.paths import StorePaths
from pyengine.formats.record import Message, encode_blank, encode_message, encode_properties, store_timestamp_at

QUEUE_OFFSET_AT = 20
PHYSICAL_OFFSET_AT = 28
BLANK_BYTES_MIN = 8
DISTINCT = 8192  # records that differ in more than their stamps
TOPICS, QUEUES = 16, 4
T0_MS = 1_700_000_000_000


def write_log(root: Path, log_bytes: int, body_bytes: int, segment_bytes: int, seed: int = 1, *, topics: int = TOPICS) -> int:
    """A store at `root` with about `log_bytes` of log; the number of messages. Bodies are words, half compressible."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(4000)]
    records, queues = [], []
    for number in range(DISTINCT):
        topic, queue_id = rng.randrange(topics), rng.randrange(QUEUES)
        text = " ".join(rng.choices(words, k=body_bytes // 5)).encode()
        body = text[: body_bytes // 2] + rng.randbytes(body_bytes - body_bytes // 2)
        records.append(encode_message(Message(
            f"topic-{topic:03d}", body, queue_id, queue_offset=0, physical_offset=0, size_bytes=0,
            raw_properties=encode_properties({"KEYS": f"order-{number}", "TAGS": f"tag{number % 5}", "UNIQ_KEY": f"{number:032X}",
                                              "WAIT": "true"}),
            born_timestamp_ms=T0_MS + number, store_timestamp_ms=T0_MS)))
        queues.append(topic * QUEUES + queue_id)
    block = numpy.frombuffer(b"".join(records), numpy.uint8)
    starts = numpy.cumsum([0, *map(len, records)])
    sizes = numpy.diff(starts)
    nth = numpy.array([queues[:number].count(queue) for number, queue in enumerate(queues)])
    of_queue = numpy.bincount(queues, minlength=TOPICS * QUEUES)[queues]
    folder = StorePaths(root).commit_log
    folder.mkdir(parents=True)
    passed, messages = 0, 0
    time_at = store_timestamp_at(0)
    for segment in range(0, max(segment_bytes, log_bytes // segment_bytes * segment_bytes), segment_bytes):
        repeats = segment_bytes // int(sizes.min() * DISTINCT) + 2
        ids = (numpy.arange(repeats * DISTINCT) + passed) % DISTINCT
        ends = numpy.cumsum(sizes[ids])
        count = int(numpy.searchsorted(ends, segment_bytes - BLANK_BYTES_MIN, "right"))
        ids, places = ids[:count], numpy.concatenate(([0], ends[: count - 1]))
        data = numpy.zeros(segment_bytes, numpy.uint8)
        shift = int(starts[passed % DISTINCT])
        tiled = numpy.tile(block, repeats)
        data[: ends[count - 1]] = tiled[shift : shift + ends[count - 1]]
        numbers = numpy.arange(passed, passed + count)
        _stamp(data, places + PHYSICAL_OFFSET_AT, places + segment)
        _stamp(data, places + QUEUE_OFFSET_AT, nth[ids] + numbers // DISTINCT * of_queue[ids])
        _stamp(data, places + time_at, T0_MS + numbers // 100)
        left = segment_bytes - int(ends[count - 1])
        data[ends[count - 1] : ends[count - 1] + BLANK_BYTES_MIN] = numpy.frombuffer(encode_blank(left),
                                                                                     numpy.uint8)[:BLANK_BYTES_MIN]
        data.tofile(folder / f"{segment:020d}")
        passed += count
        messages += count
    return messages


def _stamp(data: numpy.ndarray, places: numpy.ndarray, values: numpy.ndarray) -> None:
    """Big-endian 64-bit values at these places."""
    data[places[:, None] + numpy.arange(8)] = values.astype(">i8").view(numpy.uint8).reshape(-1, 8)
