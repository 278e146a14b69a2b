"""The writer killed -9 at random: every submitted entry is executed exactly once, in order."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import pytest

from fix_writer_rig import WriterRig, queue_entries, submit
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.record import decode_record
from pyengine.native import control as control_native
from pyengine.native.session import MANY, PUT, pack_many
from pyengine.native.writer import get_queue_offset
from waiting import scaled_timeout_s

SLOTS = (0, 70, 600)  # so far apart that passes choose among sessions
PRODUCERS = len(SLOTS)
KILLS_LONG = 3000
MORE = 20  # times as many kills at most, while none has hit a pass
QUEUES = 4
GATHER_BYTES_MIN = 3000  # some passes are longer, some are not


def writer_process(rig: WriterRig) -> int:
    """Fork a writer over the rig's shared memory; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        rig.start_writer()
        while True:
            rig.drain(deadline_s=1.0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)


def producer_process(rig: WriterRig, producer, number: int, seed: int, stop) -> int:
    """Fork a producer that submits numbered messages until the stop byte is set; its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        chance = random.Random(seed * 31 + number)
        message = 0
        while not stop[0]:
            topic = b"P%d" % number
            queue_id = chance.randrange(QUEUES)
            if chance.random() < 0.2:
                bodies = [struct.pack("<qq", number, message + k) + bytes(chance.randrange(200))
                          for k in range(1 + chance.randrange(40))]
                submit(producer, MANY, topic, b"TAGS\x01m", pack_many(bodies), count=len(bodies), queue_id=queue_id,
                       timeout_s=120)  # on a busy machine many a writer is killed before it has done anything
                message += len(bodies)
            else:
                submit(producer, PUT, topic, b"TAGS\x01s", struct.pack("<qq", number, message) + bytes(chance.randrange(400)),
                       queue_id=queue_id, timeout_s=120)
                message += 1
            stop[8 + 8 * number: 16 + 8 * number] = struct.pack("<q", message)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        print("session closed for", producer.pointer.session.closed, file=sys.stderr)
    finally:
        os._exit(4)


def run(kills: int, chance: random.Random, folder: Path | None = None) -> dict:
    """So many kills of one rig's writers, or fewer once its log is full; what they came to. With a folder large passes are
    gathered and written, others stored. While no kill has hit the middle of a pass, on a busy machine, more of them."""
    seed = chance.randrange(1 << 32)
    rig = WriterRig(segment_bytes=1 << 20, segments=600)
    rig.folder, rig.gather_bytes_min = folder, GATHER_BYTES_MIN if folder else 0
    stop = mmap.mmap(-1, 4096)
    pids: list[int] = []
    in_pass = 0
    try:
        producers = [rig.open_session(slot) for slot in SLOTS]
        pids = [producer_process(rig, producer, n, seed, stop) for n, producer in enumerate(producers)]
        done = 0
        while done < (kills if in_pass else MORE * kills) and rig.wrote() < 550 << 20:
            pid = writer_process(rig)
            time.sleep(chance.uniform(0.0003, 0.004))  # the moment of the kill, not a wait for anything
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            done += 1
            in_pass += rig.control.writer.intended_pass == control_native.load(rig.control.slot_pass, "value") + 1
        stop[0] = 1
        pids.insert(0, writer_process(rig))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pids.pop(), 0)[1]) for _ in producers]
        assert codes == [0] * PRODUCERS
        deadline = time.monotonic() + scaled_timeout_s(20)
        views = [view for _, view in rig.sessions.values()]
        while any(view.acked != producer_sequence(view) for view in views):
            assert time.monotonic() < deadline, "the last writer did not finish"
            time.sleep(0.002)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids.pop(), 0)
        rig.load_files()
        records = verify(rig, [struct.unpack_from("<q", stop, 8 + 8 * n)[0] for n in range(PRODUCERS)])
        return {"kills": done, "in_pass": in_pass, "records": records}
    finally:
        stop[0] = 1
        for each in pids:
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)
        rig.close()


def producer_sequence(view) -> int:
    """Sequence of the last entry published in a ring: counted by walking is not needed, head == tail says drained."""
    return view.acked if view.head == view.tail else -1


def verify(rig: WriterRig, sent: list[int]) -> int:
    at, end = 0, rig.wrote()
    expected = [0] * PRODUCERS
    queue_offsets: dict[tuple[str, int], int] = {}
    records = 0
    while at < end:
        size, magic = struct.unpack_from(">iI", rig.log, at)
        if magic != BLANK_MAGIC:
            message = decode_record(rig.log, at)
            number, sequence = struct.unpack_from("<qq", message.body)
            assert message.physical_offset == at
            assert sequence == expected[number], f"producer {number}: message {sequence} where {expected[number]} was due"
            expected[number] += 1
            queue = (message.topic, message.queue_id)
            assert message.queue_offset == queue_offsets.get(queue, 0)
            queue_offsets[queue] = message.queue_offset + 1
            records += 1
        at += size
    assert at == end and expected == sent
    for (topic, queue_id), offset in queue_offsets.items():
        assert get_queue_offset(rig.table, topic, queue_id) == offset
    assert not any("\0" in topic for topic, _, _ in queue_entries(rig.table)), "a queue that has no name yet can be found"
    behind = rig.log[end:end + 4096]
    assert not any(behind), "bytes behind the end that no pass owns"
    return records


@pytest.mark.ci
@pytest.mark.parametrize("gathers", [False, True], ids=["stored", "gathered"])
def test_no_kill_of_the_writer_loses_doubles_or_reorders_a_message(rng, tmp_path, gathers):
    outcome = run(120, rng, tmp_path if gathers else None)
    print(outcome)
    assert outcome["in_pass"] > 0, "no kill hit the middle of a pass: the test saw nothing"
    assert outcome["records"] > 1000


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_thousands_of_kills_of_the_writer_lose_double_or_reorder_no_message(rng, proof):
    total = Counter()
    while total["kills"] < KILLS_LONG:
        total.update(run(KILLS_LONG - total["kills"], rng))
    print(dict(total))
    proof("kills", "a writer alone, at random moments", kills=total["kills"], kills_in_the_middle=total["in_pass"],
          checked=total["records"])
    assert total["in_pass"] > KILLS_LONG // 30
