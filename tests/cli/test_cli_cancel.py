"""pyengine cancel: a delayed message by the id that its put printed, beside an engine and without one."""

from __future__ import annotations

import shutil
import signal
import subprocess

import pytest

import pyengine
from fix_cli import command_line, environment, run
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def engine(make_engine):
    engine = make_engine(message_delay_level="1s 1h")
    engine.start()
    return engine


def put(root, body: str, level: int) -> str:
    return run("put", root, "--topic", "T", "--delay-level", level, "--json", body).document["msg_id"]


def bodies(root) -> list[bytes]:
    with pyengine.open_store(root) as store:
        return [message.body for message in store.get_message("T", 0, 0).messages]


def test_a_cancelled_message_is_never_delivered_and_a_delivered_one_not_cancelled(engine):
    gone, kept = put(engine.root, "gone", 1), put(engine.root, "kept", 1)
    ran = run("cancel", engine.root, gone)
    assert (ran.code, ran.stdout) == (0, "cancelled: it is never delivered\n")
    eventually(lambda: bodies(engine.root) == [b"kept"], "the other is delivered")
    ran = run("cancel", engine.root, kept)
    assert (ran.code, ran.stdout) == (1, "not cancelled: it is due, delivered or deleted\n")
    assert run("cancel", engine.root, kept, "--json").document == {"msg_id": kept, "cancelled": False}
    assert run("cancel", engine.root, gone, "--json").document == {"msg_id": gone, "cancelled": True}


def test_a_cancelled_message_is_shown_as_such(engine):
    gone, kept = put(engine.root, "gone", 2), put(engine.root, "kept", 2)
    assert run("cancel", engine.root, gone).code == 0
    assert "is cancelled" in run("message", engine.root, gone).stderr and "is cancelled" not in run("message", engine.root, kept).stderr
    assert run("message", engine.root, gone, "--json").document["cancelled"]
    assert "cancelled" not in run("message", engine.root, kept, "--json").document


def test_a_lost_entry_of_the_first_message_is_not_taken_for_one_that_is_due(engine):
    first = put(engine.root, "first", 2)
    assert engine.stop()
    file = engine.root / "consumequeue" / "SCHEDULE_TOPIC_XXXX" / "1" / f"{0:020d}"
    file.write_bytes(bytes(file.stat().st_size))
    ran = run("cancel", engine.root, first)
    assert ran.code == 1 and "lacks its offset 0 since a crash" in ran.stderr


def test_no_engine_is_needed(engine):
    gone, kept = put(engine.root, "gone", 2), put(engine.root, "kept", 1)
    assert engine.stop()
    assert run("cancel", engine.root, gone).code == 0
    engine.start()
    eventually(lambda: bodies(engine.root) == [b"kept"], "the other is delivered")
    assert engine.stop()
    assert run("cancel", engine.root, kept).code == 1 and run("cancel", engine.root, gone).code == 0


def test_what_a_crash_took_from_its_queue_is_not_cancelled_before_recovery(engine):
    """It may have been delivered, and only its queue says when it is due."""
    msg_id = put(engine.root, "later", 2)
    engine.kill_all()
    if (queues := engine.root / "consumequeue" / "SCHEDULE_TOPIC_XXXX").exists():  # the kill may have come before the reputter's write
        shutil.rmtree(queues)
    ran = run("cancel", engine.root, msg_id)
    assert ran.code == 1 and "start the engine" in ran.stderr
    engine.start()
    assert run("cancel", engine.root, msg_id).code == 0


def test_an_id_that_names_no_delayed_message_is_an_error(engine):
    now = run("put", engine.root, "--topic", "T", "--json", "now").document["msg_id"]
    for msg_id, why in ((now, "is in T"), (now[:16] + "0" * 12 + "ABCD", "no message has the id"), ("xyz", "is not a message id")):
        ran = run("cancel", engine.root, msg_id)
        assert ran.code == 2 and why in ran.stderr, ran


@pytest.mark.parametrize("state", [ReplicationState("SLAVE", 0), ReplicationState("ASYNC_MASTER", 0, term=1, fenced_by=2)])
def test_a_store_that_another_delivers_for_cancels_nothing(engine, state):
    msg_id = put(engine.root, "later", 2)
    assert engine.stop()
    ReplicationStateFile(engine.root).write(state)
    ran = run("cancel", engine.root, msg_id)
    assert ran.code == 1 and "cancel the message at its master" in ran.stderr


def test_a_killed_cancel_counts_once_its_mark_is_written_and_can_be_given_again(engine):
    for step in ("cancel_marked", "cancel_durable"):
        msg_id = put(engine.root, step, 2)
        done = subprocess.run(command_line("cancel", engine.root, msg_id), env=environment(PYENGINE_FAILPOINT=f"{step}:1:kill"),
                              timeout=scaled_timeout_s(60))
        assert done.returncode == -signal.SIGKILL, step
        assert run("message", engine.root, msg_id, "--json").document["cancelled"]
        assert run("cancel", engine.root, msg_id).code == 0
