"""Where STORE stands in a command line: after the action, or nowhere if the environment has it."""

from __future__ import annotations

import os
import pty
import subprocess

import pytest

import pyengine
from fix_cli import command_line, environment, run


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.delenv("PYENGINE_STORE", raising=False)
    with pyengine.Engine(tmp_path / "store", mapped_file_size_commit_log_bytes=1 << 20) as engine, engine.connect() as producer:
        for at in range(3):
            producer.put("orders", b"%d" % at)
    return tmp_path / "store"


def names(ran) -> set[str]:
    assert ran.code == 0, ran
    return {row["topic"] for row in ran.document["topics"]}


@pytest.mark.parametrize("words", [
    ("topics", "list"), ("topics",),
    *(pytest.param(words, marks=pytest.mark.ci) for words in (
        ("dump", "checkpoint"), ("groups", "list"), ("groups", "lag"), ("dlq", "list"), ("quarantine", "list"), ("config", "explain"))),
])
def test_the_action_comes_before_the_store(store, words):
    ran = run(*words, store, "--json")
    assert ran.code == 0 and ran.document is not None and "note:" not in ran.stderr


@pytest.mark.parametrize("words", [
    ("topics", "create", "new"), ("dump", "checkpoint"),
    *(pytest.param(words, marks=pytest.mark.ci) for words in (("groups", "lag"), ("dlq", "list"))),
])
def test_an_action_after_the_store_is_taken_too(store, words):
    command, action, *more = words
    later, first = run(command, store, action, *more, "--json"), run(command, action, store, *more, "--json")
    assert later.code == 0 and later.stderr == ""
    assert first.stderr == "" if command != "topics" else "already" in first.stderr


def test_a_terminal_gets_a_note_of_the_order_that_ends(store):
    master, slave = pty.openpty()
    command = command_line("topics", store, "list")
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=slave, env=environment(), check=True, timeout=60)
    os.close(slave)
    assert b"note: the action comes first, `pyengine topics list STORE`" in os.read(master, 4096).replace(b"\r\n", b" ")
    os.close(master)


def test_without_a_store_the_environment_has_it(store, monkeypatch):
    monkeypatch.setenv("PYENGINE_STORE", str(store))
    assert run("topics", "create", "new", "--queues", 2).code == 0
    assert names(run("topics", "--json")) == names(run("topics", "list", "--json")) == {"orders", "new"}
    assert run("get", "--topic", "orders", "--queue-id", 0, "--offset", 1, "--json").document["messages"][0]["body"] == "1"
    assert run("config", "explain", "flush_disk_type", "--json").document["store"] == str(store)
    assert run("config", "set", "flush_disk_type=SYNC_FLUSH").code == 0
    assert run("dump", "queue", "--topic", "orders", "--queue-id", 0, "--json").code == 0


def test_a_store_that_is_given_is_not_that_of_the_environment(store, tmp_path, monkeypatch):
    other = tmp_path / "other"
    assert run("restore", tmp_path / "none", other).code != 0
    monkeypatch.setenv("PYENGINE_STORE", str(tmp_path / "elsewhere"))
    assert names(run("topics", store, "--json")) == names(run("topics", "list", store, "--json")) == {"orders"}
    assert run("topics", "create", store, "new").code == 0
    assert run("check", store).code == 0
    assert "elsewhere" in run("check").stderr


def test_the_count_of_words_says_whether_the_store_is_among_them(store, tmp_path, monkeypatch):
    assert run("backup", store, tmp_path / "copy").code == 0
    monkeypatch.setenv("PYENGINE_STORE", str(store))
    assert run("backup", tmp_path / "copy", "--json").document["number"] == 2
    assert run("restore", tmp_path / "copy", tmp_path / "new").code == 0
    monkeypatch.setenv("PYENGINE_STORE", str(tmp_path / "newer"))
    assert run("restore", tmp_path / "copy").code == 0
    assert names(run("topics", "--json")) == {"orders"}


def test_a_wrong_action_is_named(store, monkeypatch):
    assert "'crate' is not one of" in run("topics", store, "crate", "new").stderr
    assert "'crate' is not one of" in run("topics", "crate", store, "new").stderr
    monkeypatch.setenv("PYENGINE_STORE", str(store))
    assert "'crate' is not one of" in run("topics", "crate", "new").stderr


def test_a_folder_with_the_name_of_a_topic_is_not_the_store(store, tmp_path, monkeypatch):
    monkeypatch.setenv("PYENGINE_STORE", str(store))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    assert run("topics", "create", "new").code == 0 and names(run("topics", "--json")) == {"orders", "new"}


def test_a_missing_store_is_said_with_the_name_of_the_variable(store):
    ran = run("status")
    assert ran.code == 2 and "STORE" in ran.stderr and "set PYENGINE_STORE" in ran.stderr
