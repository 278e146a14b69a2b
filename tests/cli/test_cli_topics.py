"""`pyengine topics`, with and without a running engine."""

from __future__ import annotations

import re

import pytest

import pyengine
from fix_cli import run
from pyengine.cli.output import size_text
from waiting import eventually


def rows(root) -> dict[str, dict]:
    return {row["topic"]: row for row in run("topics", root, "--json").document["topics"]}


def test_topics_with_messages_and_topics_of_the_file_are_listed(builder):
    builder.put("orders", b"1", queue_id=0)
    builder.put("orders", b"2", queue_id=2)
    assert run("topics", "create", builder.root, "planned", "--queues", "4").stdout == (
        "created planned: 4 queues to read, 4 to write, RW-\n")
    assert run("topics", "create", builder.root, "orders", "--read-queues", "3", "--perm", "r", "--order").code == 0
    found = rows(builder.root)
    assert found["orders"] == {"topic": "orders", "queues": [0, 2], "messages": 2, "configured": True, "read_queue_nums": 3,
                               "write_queue_nums": 8, "perm": 4, "perm_text": "R--", "order": True}
    assert found["planned"]["queues"] == [] and found["planned"]["messages"] == 0
    text = run("topics", builder.root).stdout
    assert "orders" in text and re.search(r"^planned +0 +0 ", text, re.MULTILINE) and "R--" in text
    read = run("tail", builder.root, "--topic", "planned", "--no-follow")
    assert (read.code, read.stdout) == (0, "")
    run("topics", "delete", builder.root, "orders")
    assert rows(builder.root)["orders"] == {"topic": "orders", "queues": [0, 2], "messages": 2, "configured": False}


def test_sizes_are_those_of_the_records_that_the_queues_name(builder):
    small = builder.put("small", b"1").size_bytes
    builder.fill_queue("large", 3, 7)  # a queue that begins with filler
    large = sum(builder.put("large", bytes(100), queue_id=3).size_bytes for _ in range(25))  # in several files
    document = run("topics", builder.root, "--sizes", "--json").document
    assert [(row["topic"], row["messages"], row["bytes"]) for row in document["topics"]] == [("large", 25, large), ("small", 1, small)]
    assert size_text(large) in run("topics", builder.root, "--sizes").stdout
    assert "bytes" not in run("topics", builder.root, "--json").document["topics"][0]


@pytest.mark.parametrize(("arguments", "says"), [
    (("create",), "create needs a topic"),
    (("update", "orders"), "update changes nothing"),
    (("update", "orders", "--perm", "r"), "has no topic orders"),
    (("delete", "orders", "--order"), "takes no options"),
    (("create", "a/b"), "cannot be a folder's name"),
    (("create", "a@b"), "no group could consume it"),
    (("list", "orders"), "list takes no topic"),
    (("delete", "orders", "--sizes"), "--sizes needs the action list"),
    (("create", "x", "--queues", "99999"), "give 1 to 65536"),
])
def test_wrong_arguments_are_named(builder, arguments, says):
    done = run("topics", builder.root, *arguments)
    assert done.code == 2 and says in done.stderr


def test_topics_warns_of_a_bad_file_and_shows_its_backup(builder):
    run("topics", "create", builder.root, "one")
    run("topics", "create", builder.root, "two")
    (builder.root / "config" / "topics.json").write_text("{")
    done = run("topics", builder.root)
    assert done.code == 0 and "one" in done.stdout and "two" not in done.stdout
    assert "warning:" in done.stderr and "topics.json.bak" in done.stderr


def test_beside_a_running_engine_and_a_bad_file_does_not_keep_it_from_starting(make_engine):
    engine = make_engine()
    (engine.root / "config").mkdir(parents=True)
    (engine.root / "config" / "topics.json").write_bytes(bytes(10))
    engine.start()
    assert "topics.json is empty" in engine.log() and "nothing of it is used" in engine.log()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("found", b"x").ok, "no entry is needed"
    assert run("topics", "create", engine.root, "made", "--queues", "2").code == 0
    eventually(lambda: {name: row["configured"] for name, row in rows(engine.root).items()} == {"found": False, "made": True},
               "both topics are listed")
    assert engine.stop()


def test_a_put_to_a_new_topic_makes_its_entry_also_when_all_was_killed_at_once(make_engine):
    engine = make_engine(flush_interval_consume_queue_ms=600_000)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("before", b"x").ok and producer.put("gone", b"x").ok
    run("topics", "create", engine.root, "gone")
    run("topics", "delete", engine.root, "gone")
    engine.kill_all()  # the checkpointer has not had a round since
    engine.start()
    assert rows(engine.root)["before"]["configured"], "the start enters what the crash left out"
    assert not rows(engine.root)["gone"]["configured"], "but not what was deleted after its last put"
    with pyengine.connect(engine.root) as producer:
        assert producer.put("orders", b"x", queue_id=11).ok
    assert engine.stop()
    assert {name: row["read_queue_nums"] for name, row in rows(engine.root).items() if name != "gone"} == {"before": 1, "orders": 12}
    run("topics", "delete", engine.root, "before")
    engine.start()
    assert engine.stop()
    assert not rows(engine.root)["before"]["configured"], "without a put nothing is entered"
