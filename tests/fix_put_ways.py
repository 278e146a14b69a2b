"""All ways of a put, for tests of what is the same in each."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable

from pyengine import RawMessage
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.record import BatchMember, decode_record
from pyengine.native import control as native
from waiting import eventually, scaled_timeout_s

LARGE_BYTES = 900_000  # goes beside a ring of 1 MiB


def bodies(parts) -> list[bytes]:
    """Return the bodies in the log, once all that was written is committed."""
    eventually(lambda: native.load_position(parts.control.committed) == native.load_position(parts.control.wrote), "committed")
    log, found, at = parts.log(), [], 0
    while at < native.load_position(parts.control.committed):
        if int.from_bytes(log[at + 4:at + 8], "big") == BLANK_MAGIC:
            at += int.from_bytes(log[at:at + 4], "big")
            continue
        record = decode_record(log, at)
        found.append(record.body)
        at += record.size_bytes
    return found


def _called_back(future):
    """The result as a callback sees it."""
    seen = queue.SimpleQueue()
    future.add_done_callback(lambda done: seen.put(done.exception(0) or done.result(0)))
    found = seen.get(timeout=scaled_timeout_s(60))
    if isinstance(found, Exception):
        raise found
    return found


RAW, MEMBERS = RawMessage("T", b"x"), [BatchMember(b"x", 0, "")]
BLOCKING = {
    "put": lambda producer: producer.put("T", b"x"),
    "put with keys": lambda producer: producer.put("T", b"x", keys="k"),
    "put_many": lambda producer: producer.put_many("T", [b"x"]),
    "put_many with keys": lambda producer: producer.put_many("T", [b"x"], keys="k"),
    "put_batch": lambda producer: producer.put_batch("T", [b"x"]),
    "put_raw": lambda producer: producer.put_raw(RAW),
    "put_batch_raw": lambda producer: producer.put_batch_raw(RAW, MEMBERS),
    "a large put": lambda producer: producer.put("T", bytes(LARGE_BYTES)),
}
FUTURES = {
    "put_async": lambda producer: producer.put_async("T", b"x"),
    "put_async with keys": lambda producer: producer.put_async("T", b"x", keys="k"),
    "put_many_async": lambda producer: producer.put_many_async("T", [b"x"]),
    "put_raw_async": lambda producer: producer.put_raw_async(RAW),
    "put_batch_raw_async": lambda producer: producer.put_batch_raw_async(RAW, MEMBERS),
    "a large put_async": lambda producer: producer.put_async("T", bytes(LARGE_BYTES)),
}


def _way(make: Callable, take: Callable) -> Callable:
    return lambda producer: take(make(producer))


async def _in_a_loop(make: Callable, producer):
    return await make(producer)


WAYS = BLOCKING | {
    name: _way(make, lambda future: future.result(scaled_timeout_s(60))) for name, make in FUTURES.items()
} | {
    f"{name}, called back": _way(make, _called_back) for name, make in FUTURES.items()
} | {
    f"{name}, awaited": lambda producer, make=make: asyncio.run(_in_a_loop(make, producer)) for name, make in FUTURES.items()
}
