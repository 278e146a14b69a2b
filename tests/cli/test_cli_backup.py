"""`pyengine backup` and `restore`: what they say, to people and programs, and what they refuse."""

from __future__ import annotations

import re
import signal
import subprocess
import time

import pytest

import pyengine
from fix_cli import command_line, environment, run
from pyengine.ipc.heartbeat import is_stopped
from pyengine.storage.log_holds import LogHold, read_log_holds, write_log_hold
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def store(make_engine):
    """A running store with ten messages."""
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put_many("orders", [b"apple %d" % number for number in range(10)], keys="k").ok
    return engine.root


def test_a_backup_and_a_restore_say_what_they_did(store, tmp_path):
    ran = run("backup", store, tmp_path / "dest")
    assert ran.code == 0 and f"backup 1 of {store} is complete" in ran.stdout and "cloned bytes" in ran.stdout
    document = run("backup", store, tmp_path / "dest", "--check", "--json").document
    assert (document["number"], document["new_bytes"], document["damage"], document["exit_code"]) == (2, 0, [], 0)
    assert document["checked_bytes"] == document["bytes"] > document["end_offset"] > 0
    ran = run("restore", tmp_path / "dest", tmp_path / "new")
    assert ran.code == 0 and "is restored from" in ran.stdout and "Nothing is wrong" in ran.stdout
    document = run("restore", tmp_path / "dest", tmp_path / "other", "--json").document
    assert document["check"]["messages"] == 10 and document["rebuilt"]["queues"] == [{"topic": "orders", "queueId": 0}]
    assert "apple 9" in run("get", tmp_path / "new", "--topic", "orders", "--queue-id", 0, "--offset", 9).stdout


def test_refusals_are_sentences_with_their_exit_codes(store, tmp_path):
    (tmp_path / "dest").mkdir()
    (tmp_path / "dest/notes.txt").write_text("mine")
    for arguments, code, says in (
        (("backup", store, ""), 2, "DEST is empty"), (("backup", store, tmp_path / "dest"), 2, "holds notes.txt"),
        (("backup", tmp_path / "none", tmp_path / "dest"), 2, "does not exist"),
        (("restore", tmp_path / "dest", store), 2, "holds no backup"), (("restore", tmp_path / "none", tmp_path / "new"), 2, "no backup"),
    ):
        ran = run(*arguments)
        assert ran.code == code and says in ran.stderr, ran
        assert run(*arguments, "--json").document["exit_code"] == code


def test_an_interrupt_ends_a_backup_with_its_hold_and_the_next_one_finishes_it(store, tmp_path):
    stopped = subprocess.Popen(command_line("backup", store, tmp_path / "dest"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment(PYENGINE_FAILPOINT="backup_piece_noted:1:stop"))
    eventually(lambda: is_stopped(stopped.pid), "it waits with a piece written")
    assert read_log_holds(store)
    stopped.send_signal(signal.SIGINT)
    stopped.send_signal(signal.SIGCONT)
    _, said = stopped.communicate(timeout=scaled_timeout_s(60))
    assert stopped.returncode == 130 and b"interrupted" in said
    assert read_log_holds(store) == []
    assert run("backup", store, tmp_path / "dest", "--json").document["new_bytes"] == 0


def test_status_and_clean_name_what_holds_the_log(store):
    now_ms = time.time_ns() // 1_000_000
    write_log_hold(store, LogHold("nightly", "backup to /b (pid 1)", 77, now_ms + 60_000))
    (store / "config/log-holds/torn").write_bytes(b"{")
    holds = run("status", store, "--json").document["log_holds"]
    assert [(hold["name"], hold["active"], hold["offset"]) for hold in holds] == [("torn", False, 0), ("nightly", True, 77)]
    shown = run("status", store).stdout
    assert "nightly" in shown and re.search(r"^torn .* no .*holds nothing", shown, re.MULTILINE)
    ran = run("clean", store)
    assert ran.code == 0 and "the log hold nightly of backup to /b (pid 1) keeps the log from 77 on" in ran.stderr
