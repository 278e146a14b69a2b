"""Commands on a living engine: start, status, put, ingest, get, tail, check, stop; and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import time

import psutil
import pytest

import pyengine
from fix_cli import changes, command_line, environment, picture, run, spawn
from fix_engine import SMALL
from fix_golden import usual
from fix_owner import CHECKOUT
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import load_config
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from waiting import eventually, scaled_timeout_s

MODES = ("async", "sync", "pool")


def set_options(settings: dict) -> list[str]:
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def engine(make_engine):
    """engine(mode) -> RunningEngine that `pyengine start` has started."""
    def started(mode: str = "async", **settings):
        one = make_engine(mode, **settings)
        ran = run("start", one.root, "--json", *set_options(one.settings))
        assert ran.code == 0, ran
        with one.memory() as memory:
            one.semaphores.add(memory.identity.sysv_semaphore_id)
        return one
    return started


def test_a_delayed_put_says_where_it_waits(engine):
    one = engine("async")
    later = run("put", one.root, "--topic", "orders", "--delay-level", 18, "later")
    assert re.search("^PUT_OK [0-9A-F]{32} waits in SCHEDULE_TOPIC_XXXX queue 17 offset 0$", later.stdout, re.MULTILINE)


def test_a_body_without_end_is_refused_after_the_first_byte_too_much(engine):
    one = engine("async")
    zeros = subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE)
    ran = subprocess.run(command_line("put", one.root, "--topic", "orders", "-"), stdin=zeros.stdout, env=environment(),
                         capture_output=True, text=True, timeout=scaled_timeout_s(60))
    zeros.stdout.close()
    zeros.wait()
    most = load_config(one.root).max_message_size_bytes
    assert ran.returncode == 1 and f"the body has {most + 1} bytes, {most} are possible" in ran.stderr


def test_start_and_status_say_that_the_groups_offsets_are_unusable_and_leave_the_file(engine):
    one, said = engine("async"), "config/consumerOffset.json cannot be used"
    assert run("put", one.root, "--topic", "orders", "one").code == 0 and one.stop()
    path = one.root / "config" / "consumerOffset.json"
    path.write_text('{"offsetTable":{"orders@billing":{0:1}}')
    assert said in run("status", one.root).stdout
    ran = run("start", one.root, *set_options(one.settings))
    assert ran.code == 0 and said in ran.stderr and said in run("status", one.root).stdout
    assert path.read_text() == '{"offsetTable":{"orders@billing":{0:1}}'
    path.write_text('{"offsetTable":{"orders@billing":{0:1}}}')
    assert said not in run("status", one.root).stdout


@pytest.mark.parametrize("mode", MODES)
def test_a_message_goes_in_and_comes_out(engine, mode):
    one = engine(mode)
    assert run("status", one.root, "--json").document["state"] == "running"
    put = run("put", one.root, "--topic", "orders", "--queue-id", 2, "--tags", "paid", "--keys", "k1 k2", "--property", "a=b",
              "--flag", 7, "grüße", "--json")
    assert put.code == 0 and put.document["status"] == "PUT_OK"
    assert (put.document["queue_offset"], put.document["physical_offset"], put.document["queue_id"]) == (0, 0, 2)
    second = run("put", one.root, "--topic", "orders", "--queue-id", 2, "-", stdin=b"\xff\x00")
    assert second.code == 0 and "PUT_OK" in second.stdout and "waits" not in second.stdout

    def shown():
        ran = run("get", one.root, "--topic", "orders", "--queue-id", 2, "--offset", 0, "--json")
        return ran.document if len(ran.document["messages"]) == 2 else None

    first, other = eventually(shown, "both messages are dispatched")["messages"]
    assert (first["body"], first["tags"], first["keys"], first["properties"]["a"], first["flag"]) == (
        "grüße", "paid", "k1 k2", "b", 7)
    assert first["msg_id"] == put.document["msg_id"] and other["body_base64"] == "/wA="
    assert run("message", one.root, put.document["msg_id"], "--json").document == first
    assert run("query", one.root, "--topic", "orders", "--key", "k2", "--json").document["messages"] == [first]
    assert run("check", one.root).code == 0
    stopped = run("stop", one.root, "--json")
    assert stopped.code == 0 and stopped.document["was_running"] and not stopped.document["unclean"]
    got = run("get", one.root, "--topic", "orders", "--queue-id", 2, "--offset", 0, "--json")
    assert got.document["messages"] == [first, other]
    checked = run("check", one.root, "--json").document
    assert checked["findings"] == [] and checked["messages"] == 2
    status = run("status", one.root, "--json").document
    assert (status["state"], status["unclean"]) == ("stopped", False)


@pytest.mark.parametrize("producers", [1, 3])
def test_every_line_of_real_files_is_a_message(engine, tmp_path, producers):
    one = engine()
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    files[0].write_bytes(b"".join(b"%d eins\n" % number for number in range(3000)))
    files[1].write_bytes(b"\n".join(b"zwei %d" % number for number in range(2500)))
    acked = tmp_path / "acked.jsonl"
    ran = run("ingest", one.root, "--topic", "lines", "--queues", 3, "--producers", producers, "--acked", acked, *files, "--json")
    assert ran.code == 0, ran
    assert ran.document["messages"] == 5500 and ran.document["producers"] == producers
    assert ran.document["read_bytes"] == sum(path.stat().st_size for path in files)
    assert ran.document["messages_per_s"] > 0
    run("stop", one.root)
    bodies = []
    for line in run("tail", one.root, "--topic", "lines", "--from", "first", "--no-follow", "--json").stdout.splitlines():
        bodies.append(json.loads(line)["body"].encode())
    assert sorted(bodies) == sorted(line for path in files for line in path.read_bytes().splitlines())
    ran = run("check", one.root, "--acked", acked, "--json")
    assert (ran.code, ran.document["acked"], ran.document["acked_missing"]) == (0, 5500, 0)
    assert len(run("status", one.root, "--json").document["positions"]) == 6


def test_order_of_one_producer_and_queue_is_the_files(engine, tmp_path):
    one = engine()
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(5000)))
    assert run("ingest", one.root, "--topic", "t", path).code == 0
    run("stop", one.root)
    shown = run("tail", one.root, "--topic", "t", "--from", "first", "--no-follow", "--json").stdout.splitlines()
    assert [int(json.loads(line)["body"]) for line in shown] == list(range(5000))


def test_json_lines_and_standard_input(engine, tmp_path):
    one = engine()
    rows = [{"body": f"{number}", "keys": f"k{number}", "tags": "A" if number % 2 else "B"} for number in range(700)]
    rows[3]["delay_level"] = 18
    acked = tmp_path / "acked.jsonl"
    ran = run("ingest", one.root, "--topic", "j", "--format", "jsonl", "--acked", acked, "-", "--json",
              stdin="".join(json.dumps(row) + "\n" for row in rows))
    assert ran.code == 0 and ran.document["messages"] == 700
    run("stop", one.root)
    found = run("query", one.root, "--topic", "j", "--key", "k699", "--json").document["messages"]
    assert [one["body"] for one in found] == ["699"]
    ran = run("check", one.root, "--acked", acked, "--json")
    assert (ran.code, ran.document["acked"], ran.document["acked_missing"]) == (0, 700, 0)


def test_a_tag_that_no_program_may_put_goes_through_tail_and_ingest(engine):
    one = engine()
    with pyengine.connect(one.root) as producer, pyengine.open_store(one.root) as store:
        producer.put_raw(pyengine.RawMessage("T", b"x", properties_text="TAGS\x01a||b\x02KEYS\x01k l"))
        assert store.wait_for_message("T", 0, 0, scaled_timeout_s(30))
        printed = run("tail", one.root, "--topic", "T", "--from", "first", "--no-follow", "--json").stdout
        ran = run("ingest", one.root, "--topic", "copy", "--format", "jsonl", "-", stdin=printed)
        assert ran.code == 0, ran
        assert store.wait_for_message("copy", 0, 0, scaled_timeout_s(30))
        copy, = store.get_message("copy", 0, 0).messages
    assert (copy.tags, copy.keys) == ("a||b", "k l")


def test_a_message_that_goes_through_tail_and_ingest_is_not_put_once_again(engine):
    one = engine()
    with pyengine.connect(one.root) as producer:
        producer.put("from", b"charge", unique_key="order-17", once=True)
        lines = run("tail", one.root, "--topic", "from", "--from", "first", "--no-follow", "--json").stdout
        lines += json.dumps({"body": "refund", "unique_key": "order-18"}) + "\n"
        assert run("ingest", one.root, "--topic", "to", "--format", "jsonl", "-", stdin=lines).code == 0
        assert [producer.put("to", b"again", unique_key=f"order-{number}", once=True).queue_offset for number in (17, 18)] == [0, 1]


@pytest.mark.parametrize(("row", "sentence"), [
    ({"properties": {"a": 1}}, "the property a must be str"), ({"queue_id": 10 ** 30}, "MESSAGE_ILLEGAL: the queue id"),
    *usual([({"queue_id": "1"}, "queue_id must be int, not str"), ({"tags": 5}, "tags must be str, not int")], [], pytest.mark.ci),
])
def test_a_line_with_a_field_of_a_wrong_kind_is_named(engine, tmp_path, row, sentence):
    one, path = engine(), tmp_path / "in.jsonl"
    path.write_text(json.dumps({"body": "fine"}) + "\n" + json.dumps({"body": "x"} | row) + "\n")
    ran = run("ingest", one.root, "--topic", "j", "--format", "jsonl", path)
    assert ran.code in (1, 2) and f"{path}, line 2: " in ran.stderr and sentence in ran.stderr


@pytest.mark.parametrize(("command", "arguments", "says"), [
    ("put", ("--topic", "t", "--timeout", "60", "x"), "PUT_OK"), pytest.param("wait", (), "running", marks=pytest.mark.ci),
])
def test_put_and_wait_wait_for_an_engine_that_is_started_later(make_engine, command, arguments, says):
    one = make_engine()
    process = subprocess.Popen(command_line("-v", command, one.root, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=environment())
    try:
        assert "does not exist" in process.stderr.readline()  # it waits for the store
        one.start()
        assert says in process.communicate(timeout=scaled_timeout_s(60))[0] and process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_wait_names_a_file_in_the_place_of_a_store_at_once(tmp_path):
    (tmp_path / "file").touch()
    ran = run("wait", tmp_path / "file", "--timeout", 3600)
    assert ran.code != 0 and f"{tmp_path / 'file'} is a file; STORE is the store's root directory" in ran.stderr, ran


def test_a_topic_that_is_no_text_is_refused_by_tail_and_has_no_messages(engine):
    one = engine()
    ran = run("tail", one.root, "--topic", "t\udcff", "--queue-id", "0")
    assert ran.code == 2 and "the topic 't\\udcff' holds a lone surrogate: give it as valid text" in ran.stderr, ran
    with pyengine.open_store(one.root) as store:
        assert not store.wait_for_message("t\udcff", 0, 0, 0)


def test_wait_says_after_its_timeout_what_is_missing(make_engine):
    one = make_engine()
    ran = run("wait", one.root, "--timeout", 0.1)
    assert ran.code == 1 and f"{one.root}, which does not exist: it was moved or removed, or the path is wrong" in ran.stderr
    assert "waited 0.1 s" in ran.stderr
    one.start()
    assert run("wait", one.root, "--timeout", 0, "--json").document["store"] == str(one.root)
    one.stop()
    assert "no engine is running" in run("wait", one.root, "--timeout", 0).stderr


def test_a_put_with_a_time_waits_for_it(engine):
    one = engine()
    arguments = ("put", one.root, "--topic", "t", "--json")
    assert run(*arguments, "--deliver-at", "2020-01-01T00:00:00Z", "over").document["topic"] == "t"
    in_an_hour = f"@{time.time_ns() // 1_000_000 + 3_600_000}"
    assert run(*arguments, "--deliver-at", in_an_hour, "later").document["topic"] == "SCHEDULE_TOPIC_XXXX"


def test_a_put_takes_a_queue_in_turn_or_by_key(engine):
    one = engine()
    TopicConfigs(one.root).create(TopicConfig("shared", 2, 2))
    spread: set[int] = set()
    while len(spread) < 2:  # chance decides when
        spread.add(run("put", one.root, "--topic", "shared", "--json", "x").document["queue_id"])
    assert spread == {0, 1}
    keyed = [run("put", one.root, "--topic", "shared", "--json", "--sharding-key", key, "x").document["queue_id"] for key in "abca"]
    assert keyed == [1, 0, 1, 1], "by the key's hash"


def test_tail_shows_messages_as_they_come(engine):
    one = engine()
    run("put", one.root, "--topic", "t", "before")
    process = subprocess.Popen(command_line("tail", one.root, "--topic", "t", "--json", "--max-messages", 2, "--from", "first"),
                               stdout=subprocess.PIPE, env=environment())
    try:
        assert json.loads(process.stdout.readline())["body"] == "before"
        run("put", one.root, "--topic", "t", "--queue-id", 1, "in another queue")
        assert json.loads(process.stdout.readline())["body"] == "in another queue"
        assert process.wait(timeout=scaled_timeout_s(60)) == 0
    finally:
        process.kill()
        process.communicate()


# (arguments, exit code, what the sentence says); tried on one running engine, which goes on running.
WRONG_REQUESTS = (
    (["put", "STORE", "--topic", "", "x"], 1, "MESSAGE_ILLEGAL"),
    (["put", "STORE", "--topic", "a/b", "x"], 1, "MESSAGE_ILLEGAL"),
    (["put", "STORE", "--topic", "t" * 128, "x"], 1, "MESSAGE_ILLEGAL"),
    (["put", "STORE", "--topic", "t", "--property", "KEYS=x", "x"], 1, "MESSAGE_ILLEGAL"),
    (["put", "STORE", "--topic", "t", "--property", "novalue", "x"], 2, "name=value"),
    (["put", "STORE", "--topic", "t", "--queue-id", "-1", "x"], 2, "-1"),
    (["put", "STORE", "--topic", "t", "--timeout", "0", "x"], 2, "0"),
    (["put", "STORE", "--topic", "t", "--deliver-at", "tomorrow", "x"], 2, "give a time like"),
    (["put", "STORE", "--topic", "t", "--deliver-at", "2999-01-01", "x"], 2, "more than 40 days ahead"),
    (["put", "STORE", "--topic", "t", "--deliver-at", "@1764340000", "x"], 2, "milliseconds since 1970"),
    (["put", "STORE", "--topic", "a@b", "x"], 1, "holds '@'"),
    (["put", "STORE", "--topic", "t", "--queue-id", "0", "--sharding-key", "k", "x"], 2, "give one of"),
    (["put", "STORE", "--topic", "t"], 2, "BODY"),
    (["ingest", "STORE", "--topic", "t", "/nonexistent"], 2, "does not exist"),
    (["ingest", "STORE", "--topic", "t", "--acked", "/nonexistent/list", "INPUT"], 2, "list of acknowledged"),
    (["ingest", "STORE", "--topic", "t", "/dev/null"], 2, "not a regular file"),
    (["ingest", "STORE", "--topic", "t", "-", "--producers", "2"], 2, "standard input"),
    (["ingest", "STORE", "--topic", "t", "--format", "jsonl", "--tags", "a", "-"], 2, "--tags"),
    (["ingest", "STORE", "--topic", "a/b", "INPUT"], 1, "line 1"),
    (["ingest", "STORE", "--topic", "a/b", "--producers", "2", "INPUT"], 1, "INPUT"),
    (["start", "STORE"], 5, "running"),
    (["recover", "STORE"], 5, "is in use by another engine"),
)


def test_wrong_requests_get_a_sentence_and_store_nothing(engine, tmp_path):
    one = engine()
    path = tmp_path / "INPUT"
    path.write_text("eins\nzwei\n")
    places = {"STORE": one.root, "INPUT": path}
    for arguments, code, sentence in WRONG_REQUESTS:
        ran = run(*[places.get(word, word) for word in arguments])
        assert ran.code == code and sentence in ran.stderr and ran.stdout == "", (arguments, ran)
        assert one.positions()["wrote"] == 0, arguments
    assert run("status", one.root, "--json").document["state"] == "running"


def test_a_put_of_unknown_fate_says_so_once(engine):
    one = engine()
    writer = one.kill("writer", signal.SIGSTOP)
    try:
        ran = run("put", one.root, "--topic", "t", "--timeout", "0.2", "x")
    finally:
        os.kill(writer, signal.SIGCONT)
    assert ran.code == 1 and ran.stderr.count("may or may not be stored") == 1, ran


def test_without_an_engine_puts_say_how_to_start_one(golden, monkeypatch):
    store = golden("basic")
    before = picture(store.root)
    monkeypatch.setattr("pyengine.ipc.session_client.CONNECT_TIMEOUT_S", 0.1)
    for arguments in (["put", store.root, "--topic", "t", "--timeout", "0.1", "x"], ["ingest", store.root, "--topic", "t", __file__]):
        ran = run(*arguments)
        assert ran.code == 1 and "pyengine start" in ran.stderr, ran
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize(("arguments", "code", "says"), [
    (("put", "STORE", "--topic", "a/b", "x"), 1, "MESSAGE_ILLEGAL: the topic 'a/b'"),
    (("put", "STORE", "--topic", "t", "--property", "KEYS=x", "x"), 1, "MESSAGE_ILLEGAL: the property name KEYS is reserved"),
    (("put", "STORE", "--topic", "t", "--deliver-at", "2999-01-01", "x"), 2, "more than 40 days ahead"),
])
def test_what_no_engine_accepts_is_said_before_one_is_waited_for(golden, arguments, code, says):
    store = golden("basic")
    ran = run(*(store.root if word == "STORE" else word for word in arguments))
    assert ran.code == code and says in ran.stderr and "pyengine start" not in ran.stderr


def test_stop_of_an_engine_that_does_not_run_is_no_error(golden):
    store = golden("abnormal")
    before = picture(store.root)
    ran = run("stop", store.root, "--json")
    assert ran.code == 0 and not ran.document["was_running"] and ran.document["unclean"]
    assert "the next start recovers it" in run("stop", store.root).stdout
    assert changes(before, picture(store.root)) == []


def test_after_kill_9_of_everything_start_recovers_and_nothing_is_lost(engine):
    one = engine("pool")
    bodies = [f"message {number}" for number in range(20)]
    one.kill("committer", signal.SIGSTOP)
    for body in bodies:
        assert run("put", one.root, "--topic", "t", body).code == 0
    undrained = run("status", one.root, "--json").document["undrained_bytes"]
    one.kill_all()
    status = run("status", one.root, "--json").document
    assert status["unclean"] and status["undrained_bytes"] == undrained > 0 and "shared memory only" in status["reason"]
    ran = run("start", one.root, "--json", *set_options(one.settings))
    assert ran.code == 0 and not ran.document["adopted"]
    with one.memory() as memory:
        one.semaphores.add(memory.identity.sysv_semaphore_id)
    document = run("get", one.root, "--topic", "t", "--queue-id", 0, "--offset", 0, "--json").document
    assert [message["body"] for message in document["messages"]] == bodies
    assert run("stop", one.root).code == 0 and run("check", one.root).code == 0


def test_start_takes_over_the_workers_of_a_killed_supervisor(engine):
    one = engine()
    writer = one.pid("writer")
    one.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(one.root), "the supervisor is gone")
    assert "no supervisor" in run("status", one.root, "--json").document["reason"]
    ran = run("start", one.root, "--json", *set_options(one.settings))
    assert ran.code == 0 and ran.document["adopted"] and one.pid("writer") == writer


def test_foreground_stays_until_sigterm_and_stops_in_order(make_engine):
    one = make_engine()
    process = subprocess.Popen(command_line("start", one.root, "--foreground", *set_options(one.settings)),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        eventually(lambda: one.root.exists() and run("status", one.root, "--json").document["state"] == "running"
                   if (one.root / "commitlog").exists() else None, "it runs")
        with one.memory() as memory:
            one.semaphores.add(memory.identity.sysv_semaphore_id)
        assert one.pid("supervisor") == process.pid
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and b"stopped" in err
    assert not (one.root / "abort").exists()


@pytest.mark.parametrize(("setting", "code", "sentence"), [
    ("flushDiskTyp=SYNC_FLUSH", 2, "did you mean flush_disk_type?"),
    ("put_timeout_ms=0", 2, "1 to 86,400,000 ms"),
    ("mapped_file_size_commit_log_bytes=10", 2, "1,024 to"),
])
def test_start_with_a_wrong_setting_makes_nothing(tmp_path, setting, code, sentence):
    ran = run("start", tmp_path / "store", "--set", setting)
    assert ran.code == code and sentence in ran.stderr and list(tmp_path.iterdir()) == []


def test_start_where_something_else_lies_is_refused(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("hello")
    (tmp_path / "file").write_text("hello")
    before = picture(tmp_path)
    for name, sentence in (("letters", "holds no store"), ("file", "is a file")):
        ran = run("start", tmp_path / name)
        assert ran.code == 2 and sentence in ran.stderr
    assert changes(before, picture(tmp_path)) == []


def test_start_of_a_store_that_rocketmq_would_refuse_is_refused(golden):
    store = golden("abnormal-shortfile")
    before = picture(store.root / "commitlog")
    ran = run("start", store.root, *[word for key, value in store.manifest["config"].items()
                                     for word in ("--set", f"{key}={value}")])
    assert ran.code == 3 and "00000000000000000000" in ran.stderr
    assert changes(before, picture(store.root / "commitlog")) == []


def test_ctrl_c_before_it_is_ready_leaves_no_engine(make_engine):
    one = make_engine()
    process = subprocess.Popen(command_line("start", one.root, *set_options(one.settings)), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=environment(), start_new_session=True)
    try:
        eventually(lambda: (one.root / "engine.log").exists(), "the supervisor is being started")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    if process.returncode == 0:  # it was ready before the signal came
        assert b"running" in out
        assert run("stop", one.root).code == 0
    else:
        assert process.returncode == 130 and out == b"" and b"Traceback" not in err
    assert living_kinds(one.root) == [] and not (one.root / "abort").exists()
    # a supervisor that has not taken its lock yet would be seen in the table of processes only
    assert [pid for pid in psutil.pids() if names_store(pid, one.root)] == []


def names_store(pid: int, root) -> bool:
    """Whether a process was started with this store as an argument."""
    try:
        return str(root) in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def test_progress_bars_show_on_a_terminal_and_nowhere_else(engine, tmp_path):
    """stderr is a terminal here, stdout is not: the answer stays one document."""
    one = engine()
    path = tmp_path / "in.txt"
    path.write_bytes(b"%050d\n" % 1 * 20_000)
    master, slave = pty.openpty()
    process = subprocess.Popen(command_line("ingest", one.root, "--topic", "t", path, "--json"), stdout=subprocess.PIPE,
                               stderr=slave, env=environment(TERM="xterm", COLUMNS="100"))
    os.close(slave)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the last writer of the terminal has gone
        while piece := os.read(master, 65536):
            seen += piece
    os.close(master)
    assert json.loads(process.communicate()[0])["messages"] == 20_000 and process.returncode == 0
    assert b"ingest into t" in seen and b"\x1b[" in seen
    ran = spawn("ingest", one.root, "--topic", "t", path, "--json")
    assert ran.document["messages"] == 20_000 and ran.stderr == ""


def test_start_names_the_space_that_is_missing(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr("os.statvfs", lambda path: os.statvfs_result([*real[:4], 1000, *real[5:]]))
    ran = run("start", tmp_path / "store")
    assert ran.code == 1 and "20,971,520 of an index file" in ran.stderr and "settings mapped_file_size_commit_log_bytes" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def start_long_ingest(root, folder):
    """Start an ingest with two producers, in a process group of its own."""
    path = folder / "long.txt"
    path.write_bytes(b"%0200d\n" % 7 * 100_000)
    return subprocess.Popen(
        command_line("ingest", root, "--topic", "t", "--producers", 2, "--repeat", 100, path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), start_new_session=True)


def test_an_interrupted_ingest_leaves_no_producer(engine, tmp_path):
    one = engine()
    process = start_long_ingest(one.root, tmp_path)
    try:
        eventually(lambda: one.positions()["wrote"] > 0, "messages arrive")
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and b"Traceback" not in err and out == b""
    eventually(lambda: run("status", one.root, "--json").document["sessions"] == 0, "their sessions are closed")
    assert spawn("stop", one.root).code == 0 and run("check", one.root).code == 0


def test_an_interrupt_ends_an_ingest_of_a_stream_and_keeps_its_list(engine, tmp_path):
    one, acked = engine(), tmp_path / "acked.jsonl"
    process = subprocess.Popen(command_line("ingest", one.root, "--topic", "t", "--acked", acked, "-"), stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        for piece in (b"one\ntwo\nthr", b"ee\nfo"):
            before = one.positions()["wrote"]
            process.stdin.write(piece)
            process.stdin.flush()
            eventually(lambda before=before: one.positions()["wrote"] > before, "whole lines are put")
        process.send_signal(signal.SIGINT)
        eventually(lambda: process.poll() is not None, "it ends")
        out, err = process.stdout.read(), process.stderr.read()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and b"Traceback" not in err and out == b""
    assert [json.loads(line)["queue_offset"] for line in acked.read_text().splitlines()][:2] == [0, 1], "the batch before the last"


def has_pending(process: psutil.Process, number: int) -> bool:
    with open(f"/proc/{process.pid}/status") as lines:
        shared = next(line for line in lines if line.startswith("ShdPnd:"))
    return bool(int(shared.split()[1], 16) >> (number - 1) & 1)


def test_a_second_interrupt_of_an_ingest_ends_producers_that_do_not_answer(engine, tmp_path):
    one = engine()
    process = start_long_ingest(one.root, tmp_path)
    try:
        eventually(lambda: run("status", one.root, "--json").document["sessions"] == 2, "both put")
        producers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
        assert len(producers) == 2
        for producer in producers:
            producer.suspend()
        eventually(lambda: all(producer.status() == psutil.STATUS_STOPPED for producer in producers), "both stand")
        process.send_signal(signal.SIGINT)
        eventually(lambda: all(has_pending(producer, signal.SIGTERM) for producer in producers), "both are asked to end")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled_timeout_s(15))  # less than STOP_TIMEOUT_S
        assert not any(producer.is_running() for producer in producers)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 130 and b"Traceback" not in err and out == b""


def test_several_producers_need_no_current_directory(engine, tmp_path):
    one = engine()
    path, gone = tmp_path / "in.txt", tmp_path / "gone"
    path.write_bytes(b"a\nb\nc\n")
    gone.mkdir()
    line = shlex.join(map(str, command_line("ingest", one.root, "--topic", "t", "--producers", 2, path, "--json")))
    ran = subprocess.run(["bash", "-c", f"rmdir {shlex.quote(str(gone))} && exec {line}"], cwd=gone, env=environment(),
                         capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert ran.returncode == 0 and json.loads(ran.stdout)["messages"] == 3, ran


@pytest.mark.parametrize("closed", usual(
    ["0<&-", "1>&-", "2>&-", "0<&- 1>&-", "0<&- 1>&- 2>&-"], ["0<&- 1>&- 2>&-"], pytest.mark.ci))
def test_commands_work_with_closed_standard_streams(make_engine, tmp_path, closed):
    """As a shell detaches programs; no file of the store gets such a number, and what is printed goes nowhere."""
    root = make_engine().root

    def call(*words):
        line = f"exec {shlex.join(map(str, command_line(*words)))} {closed}"
        return subprocess.run(["bash", "-c", line], env=environment(), timeout=scaled_timeout_s(120), cwd=tmp_path,
                              stdin=subprocess.DEVNULL, capture_output=True)

    sizes = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    try:
        for words in (["start", root, *sizes], ["put", root, "--topic", "T", "one"], ["status", root, "--json"],
                      ["check", root], ["get", root, "--topic", "T", "--queue-id", 0, "--offset", 0], ["stop", root]):
            ran = call(*words)
            assert (ran.returncode, ran.stderr) == (0, b""), (words, ran)
            assert ran.stdout or "1>" in closed
    finally:
        run("stop", root)
    assert run("check", root, "--json").document["findings"] == []


def test_a_started_engine_does_not_use_the_directory_of_its_starter(make_engine, tmp_path):
    """The store may be named by a relative path; a disk that somebody was on when the engine was started can be unmounted."""
    root = make_engine().root
    folder = tmp_path / "here"
    folder.mkdir()
    sizes = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    environ = environment() | {"PYTHONPATH": os.path.relpath(CHECKOUT, folder)}
    words = command_line("start", os.path.relpath(root, folder), *sizes)
    assert subprocess.run(words, env=environ, cwd=folder, stdout=subprocess.DEVNULL).returncode == 0
    try:
        pids = [row["pid"] for row in run("status", root, "--json").document["workers"]]
        assert pids and not [pid for pid in pids if psutil.Process(pid).cwd() == str(folder)]
        folder.rmdir()
        assert run("put", root, "--topic", "T", "one").code == 0
    finally:
        assert run("stop", root).code == 0
