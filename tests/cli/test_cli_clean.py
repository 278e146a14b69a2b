"""`pyengine clean`: beside an engine and on a stopped store; what it refuses, and what it says."""

from __future__ import annotations

import os
import time

import pytest

import pyengine
from broker_lock import held_by_a_broker
from damage import flip
from fix_cli import run
from fix_failpoints import Interrupted, at_failpoints
from pyengine.errors import ExitCode
from pyengine.ipc import live_reader
from pyengine.ipc.cleaning import Cleaning
from pyengine.native import control as native
from pyengine.storage.check import check as check_module
from pyengine.storage.check import parts as check_work
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from pyengine.storage.ofd_lock import try_lock
from pyengine.storage.recovery.rebuild import rebuild

SEGMENT = 1 << 20
BODY = b"x" * 4000
DAY_S = 86_400


@pytest.fixture
def engine(make_engine):
    """An engine with four full segments and the one it writes to, all of it noted; the first two a week old."""
    made = make_engine()
    made.start()
    with pyengine.connect(made.root) as producer:
        for _ in range(4):
            assert producer.put_many("T", [BODY] * 260, keys="k").ok
    made.wait_noted()
    for name in sorted(os.listdir(made.root / "commitlog"))[:2]:
        os.utime(made.root / "commitlog" / name, (time.time() - 7 * DAY_S,) * 2)
    return made


def first_segment(engine) -> int:
    return min(map(int, os.listdir(engine.root / "commitlog")))


@pytest.mark.parametrize("stopped", [False, True])
def test_by_age_as_set_as_told_and_down_to_the_last_segment(engine, stopped):
    if stopped:
        engine.stop()
    document = run("clean", engine.root, "--json").document
    assert document | {"store": str(engine.root), "segments": 2, "bytes": 2 * SEGMENT, "min": 2 * SEGMENT} == document
    assert document["queue_files"] > 0
    assert "deleted 0 segments (0 B)" in run("clean", engine.root, "--older-than", 1).stdout
    document = run("clean", engine.root, "--older-than", 0, "--json").document
    assert (document["segments"], document["min"]) == (2, 4 * SEGMENT) and first_segment(engine) == 4 * SEGMENT
    checked = run("check", engine.root, "--json")
    assert (checked.code, checked.document["findings"]) == (0, [])


def test_down_to_a_share_of_the_disk_whatever_the_age(engine):
    assert run("clean", engine.root, "--until-used", 99, "--json").document["segments"] == 0
    assert run("clean", engine.root, "--until-used", 1, "--json").document["segments"] == 4


def test_the_setting_given_here_counts_on_a_stopped_store(engine):
    engine.stop()
    assert run("clean", engine.root, "--set", "fileReservedTime=200", "--json").document["segments"] == 0
    assert run("clean", engine.root, "--set", "file_reserved_time_hours=100", "--json").document["segments"] == 2


def test_arguments_that_contradict_are_refused(engine):
    for arguments, says in ((("--older-than", 1, "--until-used", 50), "not both"), (("--older-than", -1), "--older-than"),
                            (("--until-used", 0), "--until-used"), (("--until-used", 100), "--until-used")):
        ran = run("clean", engine.root, *arguments)
        assert ran.code == 2 and says in ran.stderr and first_segment(engine) == 0


def test_a_store_that_was_not_stopped_in_order_is_recovered_first(engine):
    engine.kill_all()
    ran = run("clean", engine.root)
    assert ran.code == 1 and "`pyengine recover" in ran.stderr and first_segment(engine) == 0


def test_a_rebuild_that_was_cut_short_keeps_its_log(engine):
    """Its queues are in the quarantine, and could not be rebuilt from messages that are deleted now."""
    engine.stop()

    def cut(step: str) -> None:
        if step == "recovery_log_done":
            raise Interrupted

    with pytest.raises(Interrupted), at_failpoints(cut):
        rebuild(MessageStore(engine.root, load_config(engine.root).geometry))
    assert not (engine.root / "consumequeue" / "T").exists()
    ran = run("clean", engine.root, "--older-than", 0)
    assert ran.code == 1 and "`pyengine recover" in ran.stderr and first_segment(engine) == 0
    assert run("recover", engine.root).code == 0
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] == 4
    assert run("check", engine.root).code == 0


def test_a_store_that_a_broker_has_open_is_left_alone(engine):
    engine.stop()
    with held_by_a_broker(engine.root):
        assert run("clean", engine.root).code == 5
    assert first_segment(engine) == 0


def test_clean_reports_a_cleaner_that_does_not_answer_in_time(engine, monkeypatch):
    os.kill(engine.pid("cleaner"), 19)
    ran = run("clean", engine.root, "--older-than", 0, "--timeout", 0.2)
    assert ran.code == 1 and "and continues" in ran.stderr
    os.kill(engine.pid("cleaner"), 18)
    document = run("clean", engine.root, "--older-than", 0, "--json").document  # what was asked before is done first
    assert document["segments"] == 0 and document["min"] == 4 * SEGMENT


def test_only_one_asks_at_a_time(engine):
    with engine.memory(writable=True) as memory, Cleaning(memory.folder) as cleaning:
        assert try_lock(cleaning.shared.descriptor, 0, "cleaning")
        ran = run("clean", engine.root)
        assert ran.code == 5 and "another `pyengine clean`" in ran.stderr


def test_a_frozen_store_is_not_waited_for(engine):
    with engine.memory(writable=True) as memory:
        native.freeze(memory.control, native.FLUSHER, 5, "gone")
    ran = run("clean", engine.root, "--older-than", 0)
    assert ran.code == 1 and "frozen" in ran.stderr and first_segment(engine) == 0


def test_a_degraded_engine_which_has_no_cleaner_is_not_waited_for(engine):
    engine.stop()
    flip(engine.root / "commitlog" / f"{3 * SEGMENT:020d}", 4)
    assert engine.start()["state"] == "degraded"
    ran = run("clean", engine.root, "--older-than", 0, "--timeout", 0.2)
    assert ran.code == ExitCode.DEGRADED and "damaged at offset" in ran.stderr and first_segment(engine) == 0


def test_a_check_beside_the_engine_holds_the_log(engine, monkeypatch):
    """While it looks nothing is deleted; a queue file that goes under its eyes makes it look again."""
    real, looked = check_module.check, []

    def look(root, *arguments, **named):
        looked.append(run("clean", root, "--older-than", 0, "--json").document["segments"])
        if len(looked) == 1:
            raise FileNotFoundError("a queue file")
        return real(root, *arguments, **named)

    monkeypatch.setattr(check_module, "check", look)
    checked = run("check", engine.root, "--json")
    assert (checked.code, checked.document["findings"], looked) == (0, [], [0, 0])
    assert run("clean", engine.root, "--older-than", 0, "--json").document["segments"] == 4
    monkeypatch.setattr(check_module, "check", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError("again")))
    monkeypatch.setattr(live_reader, "CHECK_TRIES", 2)
    assert run("check", engine.root).code == 5


def test_a_queue_file_that_is_deleted_while_a_check_has_it_open_is_looked_at_again(engine, monkeypatch):
    real, gone = check_work.used_end, []

    def late(path, start=0):
        if not gone:
            gone.append(path.unlink())
        return real(path, start)

    monkeypatch.setattr(check_work, "used_end", late)
    checked = run("check", engine.root, "--json")
    assert gone and checked.code in (0, 3) and "cannot open" not in checked.stderr
