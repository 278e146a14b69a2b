"""`pyengine dlq`: dead letters listed, shown, and put back."""

from __future__ import annotations

import pytest

import pyengine
from fix_cli import run
from fix_engine import SMALL
from waiting import eventually


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """An engine on whose store `billing` has three dead letters of `orders`."""
    with pyengine.Engine(tmp_path_factory.mktemp("dlq") / "store", **SMALL) as engine:
        with engine.connect() as producer:
            producer.put_many("orders", [b"a", b"b", b"c"], tags="paid", keys="k")
        with pyengine.consume(engine.path, "orders", group="billing", from_="first", auto_commit=False) as consumer:
            found = []
            eventually(lambda: found.extend(consumer.pull(3, timeout_s=0.1)) or len(found) == 3, "three messages")
            for message in found:
                consumer.retry(message, delay_level=-1)
        letters = pyengine.DeadLetters(engine.path)
        eventually(lambda: len(letters.messages("billing")) == 3, "three dead letters")
        yield engine.path


def waiting(store):
    (row,) = run("dlq", store, "--json").document["groups"]
    return row["waiting"]


def test_list_has_a_line_for_each_group(store):
    (row,) = run("dlq", "list", store, "--json").document["groups"]
    assert (row["group"], row["messages"], row["first_offset"], row["end_offset"]) == ("billing", 3, 0, 3)
    assert "billing" in run("dlq", store).stdout and "billing" not in run("dlq", store, "--group", "other").stdout


def test_show_has_the_messages_under_their_first_topic(store):
    document = run("dlq", "show", store, "--group", "billing", "--offset", "1", "--json").document
    assert [(one["topic"], one["queue_offset"], one["body"], one["reconsume_times"], one["tags"]) for one in document["messages"]] == [
        ("orders", 1, "b", 1, "paid"), ("orders", 2, "c", 1, "paid")]
    assert len(run("dlq", "show", store, "--group", "billing", "--max-messages", "1", "--json").document["messages"]) == 1
    assert "orders" in run("dlq", "show", store, "--group", "billing").stdout
    nobody = run("dlq", "show", store, "--group", "nobody", "--json")
    assert nobody.document["messages"] == [] and nobody.stderr == "note: group nobody has no dead letters\n"


def test_requeue_puts_some_or_all_back(store):
    before = waiting(store)
    assert run("dlq", "requeue", store, "--group", "billing", "--offset", "1", "--json").document == {"group": "billing", "requeued": 1}
    assert waiting(store) == before == 3
    assert run("dlq", "requeue", store, "--group", "billing").stdout == "3 put back for billing\n"
    assert waiting(store) == 0
    with pyengine.consume(store, "orders", group="billing") as consumer:
        found = []
        eventually(lambda: found.extend(consumer.pull(4, timeout_s=0.1)) or len(found) == 4, "what was put back")
    assert [one.body for one in found] == [b"b", b"a", b"b", b"c"]


@pytest.mark.parametrize(("arguments", "says"), [
    (("show",), "show needs --group"),
    (("requeue",), "requeue needs --group"),
    (("list", "--offset", "1"), "--offset needs the action show or requeue"),
    (("show", "--group", "billing", "--offset", "1", "--offset", "2"), "show takes one --offset"),
    (("requeue", "--group", "billing", "--offset", "99"), "no dead letter at offset 99"),
    (("requeue", "--group", "g" * 121), "give it 1 to 120"),
], ids=["show", "requeue", "list-offset", "two-offsets", "no-letter", "long-group"])
def test_a_wrong_command_says_what_to_change(store, arguments, says):
    ran = run("dlq", store, *arguments)
    assert ran.code == 2 and says in ran.stderr
