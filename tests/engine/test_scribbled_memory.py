"""A control block that was overwritten with garbage: reading it does no harm, and nothing of the log is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct

import pytest

import pyengine
from in_child import InChild
from pyengine._native import ffi
from pyengine.cli.engine_status import engine_status
from pyengine.errors import EngineError
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.crashed_engine_memory import open_crashed_memory, recover_offline
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.shared_objects import find_folder
from pyengine.native.control import CONTROL_BYTES, store_position
from pyengine.native.session import producer_count
from pyengine.storage.check.check import check
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore

SCRIBBLES = 60
SCRIBBLES_LONG = 3000
OBJECTS = ("control", "store-stats", "topic-stats", "cleaning", "blocked-reasons", "queues-1")


def put_and_list(engine, path, count):
    """Acknowledged puts, and the list of them that `check --acked` reads."""
    with pyengine.connect(engine.root) as producer, open(path, "w") as acked:
        for number in range(count):
            body = b"%d " % number * (number % 50 + 1)
            result = producer.put("T", body, queue_id=number % 2, keys=f"k{number}")
            assert result.physical_offset >= 0
            acked.write(json.dumps({
                "topic": "T", "queue_id": number % 2, "queue_offset": result.queue_offset,
                "physical_offset": result.physical_offset, "body_sha256": hashlib.sha256(body).hexdigest()}) + "\n")


@pytest.fixture
def make_dead(make_engine, tmp_path):
    """make_dead(mode): an engine all of whose processes were killed, with 100 acknowledged messages."""
    def make(mode: str):
        engine = make_engine(mode)
        engine.start()
        put_and_list(engine, tmp_path / "acked", 100)
        engine.wait_noted()
        engine.kill_all()
        return engine

    return make


def scribble(path, at: int, data: bytes) -> bytes:
    """The bytes that were there before."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        before = os.pread(descriptor, len(data), at)
        os.pwrite(descriptor, data, at)
    finally:
        os.close(descriptor)
    return before


def look(root) -> None:
    """Everything that looks at the memory of an engine; whatever it finds, an EngineError is the worst."""
    for what in (lambda: engine_status(root, {}), lambda: open_store(root).close(), lambda: find_folder(root)):
        try:
            what()
        except EngineError as error:
            assert str(error)
    with open_crashed_memory(root) as left:
        assert left.undrained_bytes >= 0


def recovered(engine, acked, count: int):
    config = load_config(engine.root, {})
    report = recover_offline(engine.root, config)
    found = check(MessageStore(engine.root, config.geometry), acked=acked)
    assert (found.acked, found.acked_missing, found.messages) == (count, 0, count), report.sentence
    return report


def slot_offset(field: str, number: int) -> int:
    return ffi.offsetof("struct ms_control", "slots") + number * ffi.sizeof("struct ms_commit_slot") + ffi.offsetof(
        "struct ms_commit_slot", field)


def test_a_slot_that_was_moved_back_takes_no_message_away(make_dead, tmp_path):
    """To the end of the first message: a place where a log could well have ended."""
    dead = make_dead("async")
    control = find_folder(dead.root).path / "control"
    with open(dead.root / "commitlog" / ("0" * 20), "rb") as log:
        (first,) = struct.unpack(">i", log.read(4))
    for number in (0, 1):
        scribble(control, slot_offset("wrote", number), struct.pack("=q", first))
    report = recovered(dead, tmp_path / "acked", 100)
    assert "contradict" in report.shared_state


def scribbled_everywhere(engine, rng, count: int) -> list[str]:
    folder = find_folder(engine.root).path
    bad = []
    for _ in range(count):
        path = folder / rng.choice(("control", *OBJECTS))
        size = path.stat().st_size
        at = rng.randrange(min(size, rng.choice((256, 4096, size))))
        data = rng.choice((rng.randbytes(rng.randrange(1, 64)), b"\xff" * 16, bytes(64)))[: size - at]
        before = scribble(path, at, data)
        complaint = InChild(look, timeout_s=20)(engine.root)
        if complaint:
            bad.append(f"{data.hex()} at {at} of {path.name}: {complaint[-800:]}")
        scribble(path, at, before)
    return bad


@pytest.mark.ci
def test_scribbled_shared_memory_is_read_without_harm(make_dead, tmp_path, rng):
    dead = make_dead("pool")
    control = find_folder(dead.root).path / "control"
    assert CONTROL_BYTES == control.stat().st_size
    for field, value in (("pool_buffers", 0xFFFFFFFF), ("segment_bytes", 0), ("segment_bytes", -1), ("mode", 77)):
        at = ffi.offsetof("struct ms_control", "identity") + ffi.offsetof("struct ms_identity", field)
        size = 8 if field == "segment_bytes" else 4
        before = scribble(control, at, (value % (1 << 8 * size)).to_bytes(size, "little"))
        assert InChild(look)(dead.root) is None, f"{field} {value}"
        scribble(control, at, before)
    assert scribbled_everywhere(dead, rng, SCRIBBLES) == []
    assert recovered(dead, tmp_path / "acked", 100).shared_state == "used"


def test_a_pool_buffer_that_was_shortened_does_not_stop_recovery(make_engine):
    engine = make_engine("pool")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        producer.put("T", b"committed")
        engine.wait_noted()
    engine.kill_all()
    folder = find_folder(engine.root)
    with EngineMemory.attach(folder) as memory:  # as if the committer had not run since the engine's start
        for name in ("committed", "flushed", "reput_from"):
            store_position(getattr(memory.control, name), 0)
    for name in folder.names():
        if name.startswith("pool-"):
            os.truncate(folder.path / name, 64)
    assert "pool" in recover_offline(engine.root, load_config(engine.root, {})).shared_state


def test_an_engine_whose_control_block_is_overwritten_ends_and_loses_nothing(make_engine, tmp_path):
    engine = make_engine()
    engine.start()
    put_and_list(engine, tmp_path / "acked", 100)
    engine.wait_noted()
    scribble(find_folder(engine.root).path / "control", 0, bytes(CONTROL_BYTES))
    engine.wait_gone()
    assert "the control block was written over" in engine.log()
    assert [producer_count(semaphore) for semaphore in engine.semaphores] == [None], "no next start could find it"
    recovered(engine, tmp_path / "acked", 100)


@pytest.mark.parametrize("replaced", [True, pytest.param(False, marks=pytest.mark.long)], ids=["a pipe", "all gone"])
def test_an_engine_whose_control_block_cannot_be_opened_is_stopped_all_the_same(make_engine, replaced):
    engine = make_engine()
    engine.start()
    folder = find_folder(engine.root).path
    if replaced:
        (folder / "control").unlink()
        os.mkfifo(folder / "control")
    else:
        shutil.rmtree(folder)
    assert engine.stop() and not (engine.root / "abort").exists()
    assert not folder.exists()


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["async", "pool"])
def test_thousands_of_scribbles_in_shared_memory_are_looked_at_without_harm(make_dead, rng, proof, share, mode):
    count = len(share(range(SCRIBBLES_LONG)))
    bad = scribbled_everywhere(make_dead(mode), rng, count)
    proof("corruption", f"scribbles in shared memory, {mode}", cases=count, **{"left out": SCRIBBLES_LONG - count}, bad=len(bad))
    assert bad == []
