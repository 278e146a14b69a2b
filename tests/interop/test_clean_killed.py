"""The real store opens what a cleaner that was killed again and again has left, and reads from it what we read."""

from __future__ import annotations

import os

import pytest

import pyengine
from fix_cli import run
from fix_golden import compare_inspect
from pyengine.ipc.cleaning import Cleaning
from pyengine.native import control as native
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

SIZES = {"mappedFileSizeCommitLog": "65536", "mappedFileSizeConsumeQueue": "400", "maxHashSlotNum": "16", "maxIndexNum": "40"}
EAGER = {"file_reserved_time_hours": 0, "delete_when": ";".join(map(str, range(24))), "clean_resource_interval_ms": 1,
         "delete_commit_log_files_interval_ms": 1, "delete_consume_queue_files_interval_ms": 1,
         "flush_interval_consume_queue_ms": 1}
KILLS = 5


@pytest.mark.ci
@pytest.mark.parametrize("mode", [pytest.param("async", marks=pytest.mark.long), "pool"])
def test_the_real_store_opens_what_a_killed_cleaner_left(make_engine, judge, rng, mode):
    engine = make_engine(mode, **SIZES, **EAGER)
    engine.settings = {**engine.settings, **SIZES}
    for ours in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
                 "max_index_num"):
        engine.settings.pop(ours)
    engine.start()
    with pyengine.connect(engine.root) as producer, engine.memory() as memory, Cleaning(memory.folder) as cleaning:
        for number in range(KILLS):
            incarnation = engine.incarnation("cleaner")
            removed = native.load(cleaning.block, "removed_segments")
            wanted = removed + rng.randrange(1, 4)  # killed behind the deletion of so many more
            while native.load(cleaning.block, "removed_segments") < wanted:
                assert producer.put_many("T", [os.urandom(900)] * 60, queue_id=number % 2, keys=f"k{number}").ok
            engine.kill("cleaner")
            engine.wait_back("cleaner", incarnation)
        eventually(lambda: native.load_position(memory.control.min_offset) > 0, "it has deleted")
    engine.kill_all()
    assert run("recover", engine.root).code == 0
    checked = run("check", engine.root, "--json")
    assert (checked.code, checked.document["findings"]) == (0, []), checked.document
    found = judge.verify(engine.root, SIZES).result(timeout=scaled_timeout_s(240))
    assert found["loadOk"] and found["facts"]["minPhy"] > 0
    ours = run("inspect", engine.root, "--json").document
    assert compare_inspect(ours, found, ignore=("byTime", "messages")) == []
    assert messages_of(ours) == messages_of(found) != set()


def messages_of(document: dict) -> set[tuple]:
    """Return what getMessage found. If queue files lag the log, RocketMQ answers the entry of byte 0, which is gone,
    with the first message that is left (findMappedFileByOffset gives the first file for offset 0); that is one of these too."""
    return {(one["queueId"], one["queueOffset"], one["phy"], one["bodySha"]) for one in document["messages"] if "phy" in one}
