"""pyengine.testing, as a user's tests use it: in a pytest of their own, and without pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import pyengine
from fix_cli import environment
from pyengine import testing
from waiting import scaled_timeout_s

TESTS = """
import os
import pyengine
import pytest
from pyengine import testing

def put_and_get(store, topic, body):
    with pyengine.connect(store) as producer:
        producer.put(topic, body, queue_id=0)
    with pyengine.open_store(store) as reader:
        assert reader.wait_for_message(topic, 0, 0, timeout_s=20)
        return [message.body for message in reader.get_message(topic, 0, 0).messages]

@pytest.fixture(scope="session")
def store_of_the_session(pyengine_store):
    return pyengine_store

@pytest.mark.parametrize("body", [b"one", b"two / three"])
def test_messages_stay_in_their_test(pyengine_store, pyengine_topic, body):
    assert put_and_get(pyengine_store, pyengine_topic, body) == [body]

def test_one_engine_serves_the_session(pyengine_engine, pyengine_store, store_of_the_session):
    assert pyengine_engine.path == pyengine_store == store_of_the_session and pyengine_engine.state == "running"
    print("store:", pyengine_store)
"""


def run_pytest(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(TESTS)
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-s", "-c", os.devnull, "-p", "no:cacheprovider", "test_mine.py"],
                          cwd=folder, env=environment(**variables), capture_output=True, text=True, check=False,
                          timeout=scaled_timeout_s(120))


@pytest.mark.parametrize("variables", [
    {}, pytest.param({"PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES": "64KiB", "PYENGINE_MAX_INDEX_NUM": "5000"}, marks=pytest.mark.ci)],
    ids=["", "sizes of the environment"])
def test_the_fixtures_give_each_test_a_topic_of_one_engine_that_ends_with_the_session(tmp_path, variables):
    ran = run_pytest(tmp_path, **variables)
    assert ran.returncode == 0 and "3 passed" in ran.stdout, ran.stdout + ran.stderr
    store = Path(ran.stdout.partition("store: ")[2].split()[0])
    assert store.name == "store" and not store.exists() and not store.parent.exists()


def test_an_ephemeral_store_is_small_and_gone_at_the_end():
    with testing.ephemeral_store(flush_disk_type="SYNC_FLUSH") as engine:
        with engine.connect() as producer:
            assert producer.put("orders", b"one apple", queue_id=0)
        used = sum(path.stat().st_blocks * 512 for path in engine.path.rglob("*") if path.is_file())
        assert used < 4 << 20
        folder = engine.path.parent
    assert not folder.exists()


def test_the_next_ephemeral_store_removes_what_a_killed_program_left():
    program = ("import os, signal\nfrom pyengine import testing\nwith testing.ephemeral_store() as engine:\n"
               "    print(engine.path.parent, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    killed = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True,
                            timeout=scaled_timeout_s(60), check=False)
    left = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and left.name.startswith("pyengine-testing-")
    with testing.ephemeral_store() as engine:
        assert not left.exists() and engine.path.exists()


def test_a_folder_is_left_alone_by_other_programs_before_and_after_it_is_locked(monkeypatch):
    make = tempfile.mkdtemp

    def another_program():
        subprocess.run([sys.executable, "-c", "from pyengine import testing\nwith testing.ephemeral_store(): pass"], env=environment(),
                       timeout=scaled_timeout_s(60), check=True)

    def made(**given):
        folder = make(**given)
        another_program()
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    with testing.ephemeral_store() as engine:
        another_program()
        assert engine.path.exists()
    assert not engine.path.parent.exists()


@pytest.mark.parametrize(("given", "says"), [
    ({"topic": "a/b"}, "cannot be a folder's name"), ({"properties": {"KEYS": "a"}}, "reserved by RocketMQ"),
    ({"keys": ["a\x01"]}, "a key"),
])
def test_a_message_that_no_store_has_is_not_made(given, says):
    with pytest.raises(pyengine.UsageError, match=says):
        testing.make_message(**given)


def test_a_made_message_is_the_message_that_the_store_would_give():
    with testing.ephemeral_store() as engine, engine.connect() as producer, engine.open_store() as store:
        result = producer.put("orders", "two äpples".encode(), tags="fruit", keys=["a", "b"], properties={"colour": "grün"},
                              queue_id=0, flag=7)
        assert store.wait_for_message("orders", 0, 0, timeout_s=scaled_timeout_s(20))
        [stored] = store.get_message("orders", 0, 0).messages
    made = testing.make_message("orders", "two äpples".encode(), tags="fruit", keys=["a", "b"], properties={"colour": "grün"}, flag=7,
                                physical_offset=result.physical_offset, store_timestamp_ms=stored.store_timestamp_ms)
    assert isinstance(made, pyengine.Message) and made.tags == "fruit" and made.keys == "a b" and made.properties["colour"] == "grün"
    for name in ("topic", "body", "queue_id", "queue_offset", "physical_offset", "size_bytes", "flag", "store_timestamp_ms",
                 "body_crc", "reconsume_times"):
        assert getattr(made, name) == getattr(stored, name), name
    assert stored.properties.items() >= made.properties.items()
