"""A producer that cuts its own session object short loses its session; nobody else notices."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyengine
from pyengine.native import control as native
from pyengine.native.session import RING_BYTES_MIN, session_bytes
from pyengine.results import PutStatus
from waiting import eventually

RING_AT = session_bytes(RING_BYTES_MIN) - RING_BYTES_MIN
TAIL_AT = 128
PAGE = 4096

# Puts once, cuts its session object down to argv[2] bytes, then claims through the descriptor (its own
# mapping would be its death) that the ring holds argv[3] bytes more. Waits to be killed.
HOSTILE = f"""
import os, struct, sys
import pyengine
producer = pyengine.connect(sys.argv[1])
assert producer.put("H", b"x").ok
session = producer._puts.session
descriptor, tail = session._object.descriptor, session.session.tail
size, more = int(sys.argv[2]), int(sys.argv[3])
os.ftruncate(descriptor, size)
if more:
    os.pwrite(descriptor, struct.pack("<Q", tail + more), {TAIL_AT})
print(session.slot, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize(("size_bytes", "claimed_bytes"), [
    pytest.param(0, 0, id="all of it"),
    pytest.param(RING_AT, 128, id="the ring"),
    pytest.param(PAGE, 128, id="all but the page of the counters"),
])
def test_cutting_a_session_object_short_costs_that_session_only(make_engine, size_bytes, claimed_bytes):
    engine = make_engine()
    engine.start()
    writer, incarnation = engine.pid("writer"), engine.incarnation("writer")
    with pyengine.connect(engine.root) as good:
        assert good.put("G", b"before").ok
        hostile = subprocess.Popen([sys.executable, "-c", HOSTILE, str(engine.root), str(size_bytes), str(claimed_bytes)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            slot = int(hostile.stdout.readline())
            with engine.memory() as memory:
                row = memory.control.sessions[slot]

                def is_over() -> bool:
                    assert good.put("G", b"meanwhile").status is PutStatus.PUT_OK
                    return native.load(row, "state") == native.SESSION_FREE

                eventually(is_over, "the hostile session is closed and freed")
        finally:
            hostile.communicate("\n")
        assert good.put("G", b"after").ok
    with pyengine.connect(engine.root) as late:
        assert late.put("G", b"the slot can be had again").ok
    assert (engine.pid("writer"), engine.incarnation("writer")) == (writer, incarnation), "the writer never died"
    engine.stop()
    with pyengine.open_store(engine.root) as store:
        assert store.queue_range("H", 0) == (0, 1)
        offset, bodies = 0, []
        while messages := store.get_message("G", 0, offset).messages:
            bodies += [message.body for message in messages]
            offset += len(messages)
    assert bodies[0] == b"before" and bodies[-2:] == [b"after", b"the slot can be had again"]
    assert set(bodies[1:-2]) == {b"meanwhile"}
