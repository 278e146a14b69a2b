"""The real store opens what was copied while producers put, and reads what we read: a restored backup, whose original was cleaned,
killed, recovered and deleted meanwhile, and a `cp` of the running store."""

from __future__ import annotations

import shutil
import subprocess
import threading

import pytest

import pyengine
from fix_cli import run
from fix_golden import compare_inspect
from pyengine.client.backup import backup_store, restore_store
from pyengine.storage.backup_files import Folder
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

SIZES = {"mappedFileSizeCommitLog": "65536", "mappedFileSizeConsumeQueue": "400", "maxHashSlotNum": "16", "maxIndexNum": "40"}
OURS = ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")


class Putting:
    """A producer that puts from a thread of its own; `count` of its messages are acknowledged."""

    def __init__(self, engine) -> None:
        # What the judge is told by RocketMQ's names must reach the engine once.
        engine.settings = {name: value for name, value in engine.settings.items() if name not in OURS}
        engine.start()
        self.engine, self.count = engine, 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.put)

    def put(self) -> None:
        with pyengine.connect(self.engine.root) as producer:
            while not self.stopped.is_set():
                assert producer.put("T", b"%d" % self.count * 100, queue_id=self.count % 2, tags="a", keys=f"k{self.count % 50}").ok
                self.count += 1

    def wait(self, wanted: int) -> None:
        eventually(lambda: self.count > wanted, "the producer goes on")

    def __enter__(self) -> Putting:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.thread.join()


def judged(judge, root, acked, **looser):
    """The real store opens it from its beginning, has all that was acknowledged, and reads what we read."""
    found = judge.verify(root, SIZES).result(timeout=scaled_timeout_s(240))
    assert found["loadOk"] and found["facts"]["minPhy"] == 0
    assert sum("phy" in one for one in found["messages"]) >= acked
    if looser:
        assert run("recover", root).code == 0
    assert compare_inspect(run("inspect", root, "--json").document, found, **looser) == []


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["async", pytest.param("pool", marks=pytest.mark.long), pytest.param("sync", marks=pytest.mark.long)])
def test_the_real_store_opens_a_restored_backup(make_engine, judge, tmp_path, mode):
    with Putting(engine := make_engine(mode, **SIZES)) as live:
        for wanted in (200, 500):
            live.wait(wanted)
            acked = live.count
            backup_store(engine.root, Folder(tmp_path / "dest"))
    engine.wait_noted()
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] > 0
    engine.kill_all()
    assert run("recover", engine.root).code == 0
    shutil.rmtree(engine.root)
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    judged(judge, tmp_path / "new", acked)


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.long), pytest.param("pool", marks=pytest.mark.long)])
def test_the_real_store_opens_a_cp_of_a_running_store_that_took_the_log_last(make_engine, judge, tmp_path, mode):
    copy = tmp_path / "copy"
    copy.mkdir()
    with Putting(engine := make_engine(mode, **SIZES)) as live:
        live.wait(300)
        acked, wrote = live.count, engine.positions()["wrote"]
        eventually(lambda: engine.positions()["flushed"] >= wrote, "what is acknowledged is flushed")
        for path in sorted(engine.root.iterdir(), key=lambda path: path.name == "commitlog"):
            live.wait(live.count + 50)
            subprocess.run(["cp", "-a", path, copy], check=True)
    # RocketMQ finds a time by those of the queue files, which recovery writes, and its recovery may leave an index without keys.
    judged(judge, copy, acked, ignore=("byTime",), more_allowed=("queries",))
