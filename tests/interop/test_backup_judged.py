"""The real store opens what was restored from a backup that was taken while producers put, and reads what we read. The original was
cleaned, killed, recovered and deleted meanwhile."""

from __future__ import annotations

import shutil
import threading

import pytest

import pyengine
from fix_cli import run
from fix_golden import compare_inspect
from pyengine.client.backup import backup_store, restore_store
from pyengine.storage.backup_files import Folder
from waiting import eventually, patience

pytestmark = [pytest.mark.java, pytest.mark.maven]

SIZES = {"mappedFileSizeCommitLog": "65536", "mappedFileSizeConsumeQueue": "400", "maxHashSlotNum": "16", "maxIndexNum": "40"}
OURS = ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num", "max_index_num")


@pytest.mark.ci
@pytest.mark.parametrize("mode", ["async", pytest.param("pool", marks=pytest.mark.long), pytest.param("sync", marks=pytest.mark.long)])
def test_the_real_store_opens_a_restored_backup(make_engine, judge, tmp_path, mode):
    engine = make_engine(mode, **SIZES)
    engine.settings = {name: value for name, value in engine.settings.items() if name not in OURS}
    engine.start()
    over, count = threading.Event(), [0]

    def put():
        with pyengine.connect(engine.root) as producer:
            while not over.is_set():
                assert producer.put("T", b"%d" % count[0] * 100, queue_id=count[0] % 2, tags="a", keys=f"k{count[0] % 50}").ok
                count[0] += 1

    producer = threading.Thread(target=put)
    producer.start()
    try:
        for wanted in (200, 500):
            eventually(lambda: count[0] > wanted, "the producer goes on")
            acked = count[0]
            backup_store(engine.root, Folder(tmp_path / "dest"))
    finally:
        over.set()
        producer.join()
    engine.wait_noted()
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] > 0
    engine.kill_all()
    assert run("recover", engine.root).code == 0
    shutil.rmtree(engine.root)
    assert restore_store(Folder(tmp_path / "dest"), tmp_path / "new").exit_code == 0
    found = judge.verify(tmp_path / "new", SIZES).result(timeout=patience(240))
    assert found["loadOk"] and found["facts"]["minPhy"] == 0
    assert sum("phy" in one for one in found["messages"]) >= acked
    assert compare_inspect(run("inspect", tmp_path / "new", "--json").document, found) == []
