"""A full disk: puts are refused with a sentence, the store stays whole, and goes on once there is room."""

from __future__ import annotations

import re
import time

import pytest

import pyengine
from fix_cli import run
from fix_engine import EACH_MODE
from fix_small_disk import fill, resize
from pyengine.client import consumer
from pyengine.errors import DiskFullError
from pyengine.results import PutStatus
from waiting import eventually

SETTINGS = {"mapped_file_size_commit_log_bytes": 4 << 20, "mapped_file_size_consume_queue_bytes": 600_000}


@pytest.fixture
def small_disk(make_small_disk):
    return make_small_disk("48m")


@pytest.mark.root
def test_an_ingest_meets_a_full_disk(small_disk, make_engine, tmp_path):
    one = make_engine(**SETTINGS)
    one.root = small_disk / "store"
    one.start()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(24 << 20))
    path = tmp_path / "in.txt"
    path.write_bytes(b"%0100d\n" % 1 * 300_000)
    ran = run("ingest", one.root, "--topic", "t", path, "--json")
    assert ran.code == 1 and ran.document["exit_code"] == 1, ran
    assert f"{path}, line " in ran.stderr and ran.stderr.count("\n") == 1
    assert "not stored" in ran.stderr or "may or may not be stored" in ran.stderr
    document = run("status", one.root, "--json").document
    assert document["state"] in ("running", "read_only") and document["positions"]["wrote"] > 0
    assert run("check", one.root).code == 0
    ballast.unlink()
    eventually(lambda: run("put", one.root, "--topic", "t", "there is room again", "--timeout", 5).code == 0 or None,
               "the store resumes by itself", timeout_s=60)
    eventually(lambda: one.positions()["reput_from"] == one.positions()["wrote"], "queues resume by themselves", timeout_s=60)
    assert one.stop()
    checked = run("check", one.root, "--json")
    assert (checked.code, checked.document["findings"]) == (0, []), checked


@pytest.mark.root
@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_segment_may_be_larger_than_its_disk(make_small_disk, make_engine, mode):
    """Puts are taken while there is space for their bytes, and no process is killed by a store into a hole."""
    disk = make_small_disk("44m")
    one = make_engine(mode, mapped_file_size_commit_log_bytes=64 << 20, disk_space_warning_level_ratio=100)
    one.root = disk / "store"
    one.start()
    incarnations = {kind: one.incarnation(kind) for kind in one.pids()}
    bodies = {}
    with pyengine.connect(one.root, refusals="return") as producer:
        while (result := producer.put("t", bytes([len(bodies) % 256]) * 100_000, keys=f"k{len(bodies)}")).ok:
            bodies[result.queue_offset] = len(bodies) % 256
        assert result.status is PutStatus.CREATE_MAPEDFILE_FAILED and len(bodies) * 100_000 >= 32 << 20
        document = run("status", one.root, "--json").document
        assert document["state"] == "running" and document["space"]["disk_bytes"] < 44 << 20 < document["space"]["length_bytes"]
        resize(disk, "160m")
        eventually(lambda: producer.put("t", b"more").ok, "it resumes by itself")
    with pyengine.open_store(one.root) as reader:
        eventually(lambda: reader.queue_range("t", 0)[1] == len(bodies) + 1, "all that was acknowledged is in its queue")
        for offset, byte in bodies.items():
            (message,) = reader.get_message("t", 0, offset, 1).messages
            assert message.body == bytes([byte]) * 100_000
        assert [message.queue_offset for message in reader.query_message("t", "k3")] == [3]
    assert {kind: one.incarnation(kind) for kind in one.pids()} == incarnations
    assert one.stop()
    assert run("check", one.root, "--json").document["findings"] == []


@pytest.mark.root
def test_a_disk_without_space_for_a_new_store_is_refused_alike_by_all_that_start_one(make_small_disk):
    root = make_small_disk("48m") / "store"
    with pytest.raises(DiskFullError, match=r"a new store needs [\d,]+ bytes on .*max_index_num=100000") as raised:
        pyengine.Engine(root).start()
    refused = run("start", root)
    assert (refused.code, refused.stderr) == (1, f"error: {raised.value}\n")
    assert not root.exists()
    small = {"mapped_file_size_commit_log_bytes": "16MiB", "max_index_num": 100000, "max_hash_slot_num": 25000}
    with pyengine.Engine(root, **small) as engine, engine.connect() as producer:
        assert producer.put("t", b"x", keys="k").ok, "as the sentence says"


@pytest.mark.root
@pytest.mark.parametrize("topics", [pytest.param("new", marks=pytest.mark.ci), re.compile("old|new")], ids=["name", "pattern"])
def test_a_consumer_that_waits_for_a_topic_sees_it_once_there_is_room(small_disk, make_engine, monkeypatch, topics):
    monkeypatch.setattr(consumer, "REST_S_MAX", 1e6)  # nothing but a change wakes it
    one = make_engine(**SETTINGS, disk_space_warning_level_ratio=100)
    one.root = small_disk / "store"
    one.start()
    queue = one.root / "consumequeue" / "new" / "0"
    with pyengine.connect(one.root) as producer:
        assert producer.put("old", b"x").ok
        waiting = pyengine.consume(one.root, topics, group="g", timeout_s=60)
    with pyengine.connect(one.root) as producer, waiting:
        if topics != "new":
            assert [message.body for message in waiting.pull(timeout_s=60)] == [b"x"]
            waiting.commit()
        fill(small_disk / "ballast")
        assert producer.put("new", b"found").ok
        eventually(lambda: queue.is_dir() and time.time() - queue.stat().st_mtime > 7, "the folder is there, and not new", timeout_s=60)
        assert [*queue.iterdir()] == [] and waiting.pull(timeout_s=1) == []
        (small_disk / "ballast").unlink()
        assert [message.body for message in waiting.pull(timeout_s=60)] == [b"found"]
