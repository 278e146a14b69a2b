"""A producer that cuts its own session object short loses its session; no other client notices."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pyengine
from pyengine.client.outgoing import RawMessage
from pyengine.formats.record import BatchMember
from pyengine.ipc.crashed_engine_memory import rebuild_offline
from pyengine.native import control as native
from pyengine.native.session import RING_BYTES_MIN, session_bytes
from pyengine.results import PutStatus
from pyengine.storage.config import load_config
from waiting import eventually

RING_AT = session_bytes(RING_BYTES_MIN) - RING_BYTES_MIN
TAIL_AT = 128
PAGE = 4096
BODY_BYTES = 10_000

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


def run_hostile(engine, good, program: str, *arguments: int) -> None:
    """Let a program spoil a session of its own, until that is freed; the `good` producer puts meanwhile."""
    hostile = subprocess.Popen([sys.executable, "-c", program, str(engine.root), *map(str, arguments)],
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


@pytest.mark.parametrize(("size_bytes", "claimed_bytes"), [
    pytest.param(0, 0, id="all of it", marks=pytest.mark.ci),
    pytest.param(RING_AT, 128, id="the ring", marks=pytest.mark.ci),
    pytest.param(PAGE, 128, id="all but the page of the counters"),
])
def test_cutting_a_session_object_short_costs_that_session_only(make_engine, size_bytes, claimed_bytes):
    engine = make_engine()
    engine.start()
    writer, incarnation = engine.pid("writer"), engine.incarnation("writer")
    with pyengine.connect(engine.root) as good:
        assert good.put("G", b"before").ok
        run_hostile(engine, good, HOSTILE, size_bytes, claimed_bytes)
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


# Puts once, writes a second entry of which only the first page is left, and then publishes it: the writer finds
# its header, topic and lengths, and loses the bodies under its copy. argv[2]: bodies, 1 for an ordinary put.
CUTS_BODIES = f"""
import os, struct, sys
import pyengine
producer = pyengine.connect(sys.argv[1])
assert producer.put("H", b"x").ok
session = producer._puts.session
descriptor, tail = session._object.descriptor, session.session.tail
count = int(sys.argv[2])
lengths = struct.pack(f"<{{count}}I", *[{BODY_BYTES}] * count).ljust((4 * count + 7) // 8 * 8, b"\\0") if count > 1 else b""
entry = bytearray(os.pread(descriptor, 128, {RING_AT})) + b"H".ljust(8, b"\\0") + lengths
size = len(entry) + count * {BODY_BYTES}
struct.pack_into("<IHHQ", entry, 0, size, 2 if count > 1 else 1, 0, 2)
struct.pack_into("<IIII", entry, 96, count, 1, 0, len(lengths) + count * {BODY_BYTES})
os.pwrite(descriptor, entry, {RING_AT} + tail)
os.ftruncate(descriptor, {RING_AT} + {PAGE})
os.pwrite(descriptor, struct.pack("<Q", tail + size), {TAIL_AT})
print(session.slot, flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize(("mode", "count"), [  # 150: over segments
    ("async", 1), ("pool", 150), *(pytest.param(mode, 150, marks=pytest.mark.ci) for mode in ("async", "sync"))])
def test_bodies_cut_short_under_their_copy_cost_that_session_only(make_engine, mode, count):
    engine = make_engine(mode)
    engine.start()
    writer, incarnation = engine.pid("writer"), engine.incarnation("writer")
    with pyengine.connect(engine.root) as good:
        assert good.put("G", b"before").ok
        run_hostile(engine, good, CUTS_BODIES, count)
        assert good.put_many("G", [b"after"] * 100).ok
    assert (engine.pid("writer"), engine.incarnation("writer")) == (writer, incarnation), "the writer never died"
    engine.stop()
    with pyengine.open_store(engine.root) as store:
        assert store.queue_range("H", 0) == (0, 1)
        last = store.queue_range("G", 0)[1] - 1
        assert store.get_message("G", 0, last).messages[0].body == b"after"


@pytest.mark.parametrize("multi_dispatch", [True, False])
def test_a_place_in_the_queue_of_others_that_a_producer_gives_itself_counts_nowhere(make_engine, multi_dispatch):
    """Not in a batch, where no writer gives places, and not at a rebuild, which goes by what is in the log."""
    engine = make_engine(enable_multi_dispatch=multi_dispatch)
    engine.start()
    claims = "INNER_MULTI_DISPATCH\x01G\x02INNER_MULTI_QUEUE_OFFSET\x010"
    with pyengine.connect(engine.root, refusals="return") as hostile, pyengine.connect(engine.root, refusals="return") as good:
        if not multi_dispatch:
            assert hostile.put_raw(RawMessage("H", b"hostile", properties_text=claims)).ok
        batches = [hostile.put_batch_raw(RawMessage("H", properties_text=shared), [BatchMember(b"hostile", 0, own)])
                   for shared, own in ((claims, ""), ("", claims))]
        assert good.put("G", b"good").ok
    engine.stop()
    found = [bodies_of_good(engine)]
    assert rebuild_offline(engine.root, load_config(engine.root, {})).exit_code == 0
    found.append(bodies_of_good(engine))
    assert found == [[b"good"]] * 2
    assert all(batch.status is PutStatus.MESSAGE_ILLEGAL and "INNER_MULTI_QUEUE_OFFSET" in batch.reason for batch in batches)


def bodies_of_good(engine) -> list[bytes]:
    with pyengine.open_store(engine.root) as store:
        return [message.body for message in store.get_message("G", 0, 0).messages]
