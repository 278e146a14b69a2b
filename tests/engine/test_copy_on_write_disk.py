"""A disk that copies on write (btrfs) has no room to write over what it holds: full, it makes puts wait, and loses none.

Without root: tests/faults/test_failing_engine.py has a disk that only seems to be one.
"""

from __future__ import annotations

import os
import shutil

import pytest

import pyengine
from fix_small_disk import fill
from pyengine.cli.engine_status import engine_status
from pyengine.results import PutStatus
from waiting import eventually

PUTS = 200


@pytest.fixture
def make_small_engine(make_disk, make_engine):
    """make_small_engine(mode, disk) -> an engine that runs on a small file system of that kind and does not watch how full it is."""

    def make(mode, disk):
        engine = make_engine(mode, flush_interval_commit_log_ms=10, disk_space_warning_level_ratio=100, put_timeout_ms=2000)
        engine.root = make_disk(disk) / "store"
        engine.start()
        return engine

    return make


def copy_files(root):
    """Each segment, queue and index file becomes a copy: without the attribute that a file has from its making."""
    for folder in ("commitlog", "consumequeue", "index"):
        for path in [path for path in (root / folder).rglob("*") if path.is_file()]:
            copy = path.with_name("copy")
            shutil.copyfile(path, copy)
            copy.rename(path)


@pytest.mark.root
@pytest.mark.parametrize("disk", ["btrfs", pytest.param("xfs", marks=pytest.mark.long), pytest.param("overlay", marks=pytest.mark.long)])
@pytest.mark.parametrize("mode, made", [
    ("async", "here"), ("async", "copied"), ("pool", "copied"), ("sync", "copied"),
    pytest.param("pool", "here", marks=pytest.mark.long), pytest.param("sync", "here", marks=pytest.mark.long)])
def test_a_full_disk_makes_puts_wait_and_nothing_acknowledged_is_out_of_sight(make_small_engine, mode, made, disk):
    engine = make_small_engine(mode, disk)
    if made == "copied":
        with pyengine.connect(engine.root, refusals="return") as producer:
            assert producer.put("topic", b"", keys="k").ok
        assert engine.stop()
        copy_files(engine.root)
        engine.start()
    filler = engine.root.parent / "filler"
    incarnations = {kind: engine.incarnation(kind) for kind in engine.pids()}
    acked, refused = {0: b""} if made == "copied" else {}, set()
    with pyengine.connect(engine.root, refusals="return") as producer:

        def put(number):
            body = b"%d" % number * 100
            result = producer.put("topic", body, keys=f"k{number}")
            if result.status is PutStatus.PUT_OK:
                acked[result.queue_offset] = body
            else:
                refused.add(result.status)
            return result.ok

        assert all(put(number) for number in range(PUTS))
        fill(filler)
        for number in range(PUTS, 3 * PUTS):
            put(number)
        filler.unlink()
        eventually(lambda: put(0), "puts are taken again")
    with pyengine.open_store(engine.root) as reader:
        eventually(lambda: reader.queue_range("topic", 0)[1] == len(acked), "all that was acknowledged is in its queue")
        found, offset = {}, 0
        while offset < len(acked):
            read = reader.get_message("topic", 0, offset, level="committed")
            found |= {message.queue_offset: bytes(message.body) for message in read.messages}
            offset = read.next_begin_offset
    assert found == acked
    eventually(lambda: engine_status(engine.root, {})["reason"] == "", "every worker goes on")
    assert engine_status(engine.root, {})["state"] == "running"
    assert {kind: engine.incarnation(kind) for kind in engine.pids()} == incarnations, "no process died of it"
    assert refused <= {PutStatus.SERVICE_NOT_AVAILABLE, PutStatus.CREATE_MAPEDFILE_FAILED}
    assert engine.stop()


def test_a_mapped_segment_that_takes_no_stores_costs_one_writer_not_one_after_the_other(make_engine):
    """As of a disk that copies on write and is not known for it: here the segment's file was cut short."""
    engine = make_engine("async")
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("topic", b"before").ok
        engine.wait_noted()  # and so every worker has mapped the segment while it was whole
        incarnation = engine.incarnation("writer")
        segment = engine.root / "commitlog" / f"{0:020d}"
        size = segment.stat().st_size
        os.truncate(segment, 4096)
        bodies = [b"%04d" % number * 500 for number in range(20)]
        assert all(producer.put("topic", body).ok for body in bodies)  # many at once would be written, not stored
        assert segment.stat().st_size < size
        os.truncate(segment, size)  # for the checks: RocketMQ's segments have one length
        assert producer.put("topic", b"after").ok
    assert engine.incarnation("writer") == incarnation + 1
    assert "writer: killed by SIGBUS" in engine.log() or "SIGBUS" in engine.log()
    assert engine.stop()
    with pyengine.open_store(engine.root) as reader:
        found = reader.get_message("topic", 0, 0, level="committed").messages
        assert [bytes(message.body) for message in found] == [b"before", *bodies, b"after"]
