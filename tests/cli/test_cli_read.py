"""Commands that read: inspect, get, tail, query, message, offset-at, status, against what RocketMQ reads."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import signal
import subprocess
import zlib
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from fix_cli import changes, command_line, environment, picture, run, spawn
from fix_golden import compare_inspect
from pyengine.cli.output import message_document
from pyengine.formats.record import Message
from waiting import scaled_timeout_s


def sha256(document: dict) -> str:
    """SHA-256 of the body in a message document."""
    body = document["body"].encode() if "body" in document else base64.b64decode(document["body_base64"])
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def basic(golden):
    """The golden store `basic`; the test fails if reading changed anything in it."""
    store = golden("basic")
    before = picture(store.root)
    yield store
    assert changes(before, picture(store.root)) == []


def queues(store) -> list[dict]:
    return store.verify["facts"]["queues"]


@pytest.mark.parametrize("recipe", ["basic", "roll", "cleaned", "tx"])
def test_inspect_prints_what_the_real_store_reads(golden, recipe):
    store = golden(recipe)
    before = picture(store.root)
    ran = run("inspect", store.root, "--json")
    assert ran.code == 0 and ran.stderr == ""
    assert compare_inspect(ran.document, store.verify) == []
    assert changes(before, picture(store.root)) == []


def test_inspect_for_people_is_a_summary(basic):
    ran = run("inspect", basic.root)
    assert ran.code == 0
    for queue in queues(basic):
        assert any(line.split()[:2] == [queue["topic"], str(queue["queueId"])] for line in ran.stdout.splitlines())


def test_get_gives_every_message_of_a_queue(basic):
    for queue in queues(basic):
        document = run("get", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", 0,
                       "--json").document
        assert document["status"] == "FOUND"
        assert (document["min_offset"], document["max_offset"]) == (queue["min"], queue["max"])
        expected = [entry[0] for entry in queue["entries"]]
        assert [message["physical_offset"] for message in document["messages"]] == expected[: len(document["messages"])]
        assert [message["queue_offset"] for message in document["messages"]] == list(range(len(document["messages"])))


@pytest.mark.parametrize(("offset", "status"), [
    ("max", "OFFSET_OVERFLOW_ONE"), ("beyond", "OFFSET_OVERFLOW_BADLY"), (0, "FOUND"),
])
def test_get_answers_with_rocketmqs_status(basic, offset, status):
    queue = queues(basic)[0]
    at = {"max": queue["max"], "beyond": queue["max"] + 5}.get(offset, offset)
    ran = run("get", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", at)
    assert ran.code == 0 and status in ran.stdout


def test_get_of_an_unknown_topic_says_that_there_is_nothing(basic):
    ran = run("get", basic.root, "--topic", "Nobody", "--queue-id", 0, "--offset", 0)
    assert ran.code == 0 and "NO_MESSAGE_IN_QUEUE: the queue holds no message" in ran.stdout


def test_get_filters_by_tags(basic):
    queue = max(queues(basic), key=lambda one: one["max"])
    arguments = ("get", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", 0, "--json")
    every = run(*arguments).document["messages"]
    tag = next(message["tags"] for message in every if message["tags"] and "|" not in message["tags"])
    some = run(*arguments, "--tags", tag).document["messages"]
    assert some and [one["queue_offset"] for one in some] == [one["queue_offset"] for one in every if one["tags"] == tag]


def test_get_and_tail_take_an_sql_condition(basic):
    queue = max(queues(basic), key=lambda one: one["max"])
    where = ("--topic", queue["topic"], "--queue-id", queue["queueId"])
    every = run("get", basic.root, *where, "--offset", 0, "--json").document["messages"]
    tag = next(message["tags"] for message in every if message["tags"] and "'" not in message["tags"])
    condition = ("--sql", f"TAGS = '{tag}' OR TAGS = 'no such'")
    some = run("get", basic.root, *where, "--offset", 0, "--json", *condition).document["messages"]
    expected = [one["queue_offset"] for one in every if one["tags"] == tag]
    assert expected and [one["queue_offset"] for one in some] == expected
    lines = run("tail", basic.root, *where, "--from", "first", "--no-follow", "--json", *condition).stdout.splitlines()
    assert [json.loads(line)["queue_offset"] for line in lines][: len(expected)] == expected
    refused = run("get", basic.root, *where, "--offset", 0, "--sql", "price >")
    assert refused.code == 2 and "SQL condition 'price >', character 8: a property" in refused.stderr


@pytest.mark.parametrize("group", [(), ("--group", "billing")])
def test_tail_goes_on_to_the_end_past_many_messages_that_do_not_match(builder, monkeypatch, group):
    for _ in range(1000):
        builder.put("T", b"", tags="other")
    builder.put("T", b"last", tags="wanted")
    clock = itertools.count(1.0)  # each look at it takes a second, so no pull comes to the end
    monkeypatch.setattr("pyengine.client.consumer.time", SimpleNamespace(monotonic=clock.__next__))
    ran = run("tail", builder.root, "--topic", "T", "--from", "first", "--no-follow", "--tags", "wanted", "--json", *group)
    assert [json.loads(line)["body"] for line in ran.stdout.splitlines()] == ["last"]


def test_message_by_id_and_by_position(basic):
    record = basic.verify["messages"][0]
    by_position = run("message", basic.root, record["phy"], "--json").document
    by_id = run("message", basic.root, by_position["msg_id"], "--json").document
    by_lower_id = run("message", basic.root, by_position["msg_id"].lower(), "--json").document
    assert by_position == by_id == by_lower_id
    assert by_id["physical_offset"] == record["phy"] and by_id["topic"] == record["topic"]
    human = run("message", basic.root, by_position["msg_id"])
    assert human.code == 0 and by_position["msg_id"] in human.stdout


@pytest.mark.parametrize(("msg_id", "code", "sentence"), [
    ("1", 1, "no message 1"),
    ("999999999", 1, "no message 999999999"),
    ("7F00000100002A9F0000000000FFFFFF", 1, "no message"),
    ("7F00000100002A9F00000000000000", 1, "32 or 56 characters"),
    ("hello", 1, "plain number"),
    ("", 1, "32 or 56 characters"),
])
def test_a_message_that_is_not_there(basic, msg_id, code, sentence):
    ran = run("message", basic.root, msg_id)
    assert ran.code == code and sentence in ran.stderr and ran.stdout == ""


def test_query_finds_by_key_what_the_real_store_finds(basic):
    checked = 0
    for query in basic.verify["queries"][:20]:
        if not query["phys"]:
            continue
        ran = run("query", basic.root, "--topic", query["topic"], "--key", query["key"], "--json")
        assert {one["physical_offset"] for one in ran.document["messages"]} <= set(query["phys"])
        assert all(query["key"] in [*(one["keys"] or "").split(" "), one["properties"].get("UNIQ_KEY")]
                   for one in ran.document["messages"])
        checked += len(ran.document["messages"])
    assert checked
    ran = run("query", basic.root, "--topic", "Nobody", "--key", "k")
    assert ran.code == 0 and "0 messages" in ran.stdout


def test_offset_at_agrees_with_the_real_store(basic):
    samples = [one for one in basic.verify["byTime"] if "ts" in one and "offset" in one][:30]
    assert samples
    for sample in samples:
        ran = run("offset-at", basic.root, "--topic", sample["topic"], "--queue-id", sample["queueId"],
                  "--timestamp", sample["ts"])
        assert (ran.code, ran.stdout) == (0, f"{sample['offset']}\n")


def test_a_time_is_iso_8601_or_milliseconds(basic):
    sample = next(one for one in basic.verify["byTime"] if one.get("ts", 0) > 0 and "offset" in one)
    at = datetime.fromtimestamp(sample["ts"] / 1000, UTC)
    of_queue = ("offset-at", basic.root, "--topic", sample["topic"], "--queue-id", sample["queueId"], "--timestamp")
    assert {run(*of_queue, text).stdout for text in (sample["ts"], at.isoformat(), at.replace(tzinfo=None).isoformat())} == {
        f"{sample['offset']}\n"}
    key = ("query", basic.root, "--topic", "T", "--key", "k", "--begin")
    assert run(*key, "2026-01-31").code == 0
    wrong = run(*key, "yesterday")
    assert wrong.code == 2 and "give a time like 2026-01-31T12:00:00Z, or milliseconds since 1970" in wrong.stderr
    for seconds in (run(*key, "1700000000"), run(*of_queue, "1700000000")):
        assert seconds.code == 2 and "or milliseconds since 1970" in seconds.stderr
    assert run(*of_queue, "0").code == 0 and "0, or 100000000000 and more" in " ".join(run(*of_queue, "1").stderr.split())
    assert "--begin is after --end" in run(*key, "2026-01-31", "--end", "2026-01-30").stderr
    assert "note: " in run(*key, "0").stderr and "has no topic T: " in run(*key, "0").stderr


def test_get_says_when_there_is_no_such_queue(basic):
    queue = queues(basic)[0]
    for topic, queue_id in ((queue["topic"] + "s", 0), (queue["topic"], 999)):
        ran = run("get", basic.root, "--topic", topic, "--queue-id", queue_id, "--offset", 0)
        assert ran.code == 0 and "NO_MESSAGE_IN_QUEUE" in ran.stdout
        assert f"has no queue {queue_id} of the topic {topic}: `pyengine topics" in ran.stderr
    assert run("get", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", 9999).stderr == ""


def test_tail_without_follow_gives_all_messages_in_order_of_each_queue(basic):
    topic = queues(basic)[0]["topic"]
    ran = run("tail", basic.root, "--topic", topic, "--from", "first", "--no-follow", "--json")
    shown = [json.loads(line) for line in ran.stdout.splitlines()]
    for queue in queues(basic):
        if queue["topic"] == topic:
            mine = [one["physical_offset"] for one in shown if one["queue_id"] == queue["queueId"]]
            assert mine == [entry[0] for entry in queue["entries"]]
    assert len(shown) == sum(queue["max"] for queue in queues(basic) if queue["topic"] == topic)


def test_tail_starts_at_an_offset_and_stops_after_a_number(basic):
    queue = max(queues(basic), key=lambda one: one["max"])
    ran = run("tail", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--from", 2,
              "--max-messages", 3, "--json")
    assert [json.loads(line)["queue_offset"] for line in ran.stdout.splitlines()] == [2, 3, 4]
    ran = run("tail", basic.root, "--topic", queue["topic"], "--no-follow", "--max-messages", 10 ** 30)
    assert (ran.code, ran.stdout) == (0, "")
    ran = run("tail", basic.root, "--topic", queue["topic"], "--no-follow")
    assert (ran.code, ran.stdout) == (0, "")
    assert run("tail", basic.root, "--topic", "Nobody", "--no-follow").code == 1
    assert f"(did you mean {queue['topic']}?)" in run("tail", basic.root, "--topic", queue["topic"] + "s", "--no-follow").stderr
    assert run("tail", basic.root, "--topic", "Nobody", "--from", "middle").code == 2
    for time, count in (("2001-01-01", queue["max"]), ("2099-01-01T00:00:00+01:00", 0)):
        ran = run("tail", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--from", time, "--no-follow", "--json")
        assert (ran.code, ran.stdout.count("\n")) == (0, count)
    older, newer, zero = (run("tail", basic.root, "--topic", queue["topic"], "--from", word, "--no-follow", "--json")
                    for word in ("begin", "first", "0"))  # begin and end are older words for the same
    assert older.stdout == newer.stdout == zero.stdout != ""


def test_tail_waits_and_ctrl_c_ends_it_with_130(basic):
    queue = queues(basic)[0]
    process = subprocess.Popen(
        command_line("tail", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--from", "first",
                     "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        for offset in range(queue["max"]):
            assert json.loads(process.stdout.readline())["queue_offset"] == offset
        assert process.poll() is None, "it must wait for more"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err


def test_status_of_a_stopped_store_comes_from_its_files(basic):
    document = run("status", basic.root, "--json").document
    end = basic.verify["facts"]["maxPhy"]
    assert (document["state"], document["workers"], document["sessions"], document["read_only"]) == ("stopped", [], 0, False)
    assert document["positions"] == {"min": 0, "wrote": end, "committed": end, "flushed": end, "reput_from": end, "confirm": 0}
    assert f"{end:,}" in run("status", basic.root).stdout


def test_status_tells_that_a_store_was_not_stopped_in_order(golden):
    store = golden("abnormal-cqbehind")
    before = picture(store.root)
    document = run("status", store.root, "--json").document
    assert document["state"] == "stopped" and document["unclean"] and "recovers" in document["reason"]
    assert 0 < document["positions"]["reput_from"] <= document["positions"]["wrote"]
    assert changes(before, picture(store.root)) == []


def test_output_survives_a_stdout_that_cannot_carry_it(basic):
    queue = next(one for one in queues(basic) if not one["topic"].isascii())
    for flags in (["--json"], []):
        ran = spawn("get", basic.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", 0, *flags,
                    env=environment(PYTHONIOENCODING="ascii"))
        assert ran.code == 0 and ran.stdout.isascii()
        if flags:
            assert ran.document["messages"][0]["topic"] == queue["topic"]


def test_a_message_document_keeps_every_body_byte():
    message = Message(topic="t", body=b"\xff\x00", queue_id=0, queue_offset=0, physical_offset=0, size_bytes=1)
    assert message_document(message)["body_base64"] == "/wA=" and "body" not in message_document(message)
    assert sha256(message_document(message)) == hashlib.sha256(b"\xff\x00").hexdigest()


@pytest.mark.parametrize("words", [
    ("tail", "--topic", "TOPIC", "--from", "first", "--group", "billing"), ("top", "--interval", 3600),
    *(pytest.param(words, marks=pytest.mark.ci) for words in (
        ("tail", "--topic", "TOPIC", "--from", "first"), ("top", "--json", "--interval", 3600))),
], ids=["tail of a group", "top", "tail", "top as JSON"])
def test_a_command_that_follows_ends_once_its_reader_is_gone(golden, words):
    store = golden("basic")
    words = [queues(store)[0]["topic"] if word == "TOPIC" else word for word in words]
    process = subprocess.Popen(command_line(words[0], store.root, *words[1:]), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=environment())
    try:
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.wait(scaled_timeout_s(60)), process.stderr.read()) == (0, b"")
    finally:
        process.kill()
        process.stderr.close()


def test_tail_with_a_group_continues_where_the_group_stopped(golden):
    store = golden("basic")
    queue = max(queues(store), key=lambda one: one["max"])
    arguments = ("tail", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--group", "billing",
                 "--from", "first", "--no-follow", "--json")

    def offsets_of(*more):
        return [json.loads(line)["queue_offset"] for line in run(*arguments, *more).stdout.splitlines()]

    assert offsets_of("--max-messages", 3) == [0, 1, 2]
    assert offsets_of("--max-messages", 2) == [3, 4]
    assert offsets_of() == list(range(5, queue["max"]))
    assert offsets_of() == []
    kept = json.loads((store.root / "config" / "consumerOffset.json").read_text())
    assert kept["offsetTable"][f"{queue['topic']}@billing"] == {str(queue["queueId"]): queue["max"]}
    other = run("tail", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--group", "audit",
                "--from", "first", "--no-follow", "--json")
    assert len(other.stdout.splitlines()) == queue["max"], "another group starts for itself"


def test_tail_with_a_group_remembers_what_it_printed_when_interrupted(golden):
    store = golden("basic")
    queue = queues(store)[0]
    process = subprocess.Popen(
        command_line("tail", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--from", "first",
                     "--group", "billing", "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        for _ in range(queue["max"]):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    kept = json.loads((store.root / "config" / "consumerOffset.json").read_text())
    # the one being printed when the signal came may come again
    assert kept["offsetTable"][f"{queue['topic']}@billing"][str(queue["queueId"])] in (queue["max"] - 1, queue["max"])


PLAIN = b"a body that was long enough " * 50
COMPRESSED = 0x1


@pytest.fixture
def compressed(builder):
    """A store with a compressed body, one that only says so, and a plain one."""
    builder.put("T", zlib.compress(PLAIN), sys_flag=COMPRESSED, keys="k")
    builder.put("T", b"no stream", sys_flag=COMPRESSED)
    builder.put("T", b"plain")
    return builder.root


@pytest.mark.parametrize("command", [
    ("get", "--topic", "T", "--queue-id", 0, "--offset", 0), ("query", "--topic", "T", "--key", "k"), ("message", 0),
    ("tail", "--topic", "T", "--from", "first", "--max-messages", 1), ("tail", "--topic", "T", "--group", "g", "--max-messages", 1),
], ids=["get", "query", "message", "tail", "tail of a group"])
def test_a_compressed_body_is_shown_as_the_producer_had_it_unless_raw(compressed, command):
    name, *arguments = command
    shown = first_message(run(name, compressed, *arguments, "--json").document)
    assert shown["body"] == PLAIN.decode() and shown["body_bytes"] == len(PLAIN)
    assert shown["compression"] == "zlib" and shown["stored_body_bytes"] == len(zlib.compress(PLAIN))
    assert PLAIN[:40].decode() in run(name, compressed, *arguments, *(["--group", "h"] if "g" in arguments else [])).stdout
    raw = first_message(run(name, compressed, *arguments, *(["--group", "i"] if "g" in arguments else []), "--raw", "--json").document)
    assert base64.b64decode(raw["body_base64"]) == zlib.compress(PLAIN) and raw["body_bytes"] == len(zlib.compress(PLAIN))


def first_message(document: dict) -> dict:
    return document["messages"][0] if "messages" in document else document


def test_a_body_that_cannot_be_decompressed_is_shown_as_stored_with_the_reason(compressed):
    _, broken, plain = run("get", compressed, "--topic", "T", "--queue-id", 0, "--offset", 0, "--json").document["messages"]
    assert broken["body"] == "no stream" and "not a valid zlib stream" in broken["body_error"]
    assert plain["body"] == "plain" and "compression" not in plain and "body_error" not in plain


def test_a_message_is_found_by_the_id_of_its_client(builder):
    unique = "AC11000100002A9F5C7A2D3B00010000"  # as long as an offset id
    builder.put("SCHEDULE_TOPIC_XXXX", b"delayed", properties={"UNIQ_KEY": unique})
    builder.put("orders", b"delivered", properties={"UNIQ_KEY": unique})
    builder.put("orders", b"another", keys=unique)
    ran = run("message", builder.root, unique, "--json")
    assert ran.code == 0 and ran.document["body"] == "delivered" and "1 more message with this UNIQ_KEY" in ran.stderr
    assert run("message", builder.root, unique, "--topic", "SCHEDULE_TOPIC_XXXX", "--json").document["body"] == "delayed"
    assert run("message", builder.root, unique, "--topic", "other").code == 1
    builder.put("orders", b"odd", properties={"UNIQ_KEY": "mine-17"})
    assert run("message", builder.root, "mine-17", "--json").document["body"] == "odd"
