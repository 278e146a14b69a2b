"""`pyengine groups`, and `pyengine tail --group` as a member among others."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess

import pytest

import pyengine
from fix_cli import command_line, environment, run
from fix_store_builder import START_MS
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s


@pytest.fixture
def store(builder):
    """Three queues of ten messages; `billing` has read half of the first."""
    for queue_id in range(3):
        for number in range(10):
            builder.put("orders", b"%d" % number, queue_id=queue_id)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 5, 1: 0, 2: 10})
    ConsumerOffsets(builder.root).commit("orders", "audit", {0: 10})
    return builder


def flags(builder) -> list[str]:
    names = builder.geometry.__dataclass_fields__
    return [word for name in names for word in ("--set", f"{name}={getattr(builder.geometry, name)}")]


def groups(builder, *arguments):
    return run("groups", builder.root, *arguments, *flags(builder))


def test_list_names_each_group_and_topic(store):
    ran = groups(store, "--json")
    assert ran.code == 0
    assert ran.document == {"notes": [], "groups": [
        {"group": "audit", "topic": "orders", "members": [], "lag": 20, "in_flight": 0, "lost": 0, "queues": 3},
        {"group": "billing", "topic": "orders", "members": [], "lag": 15, "in_flight": 0, "lost": 0, "queues": 3}]}
    assert "billing" in groups(store).stdout and "audit" not in groups(store, "list", "--group", "billing").stdout


@pytest.mark.parametrize("action", ["list", "lag"])
def test_a_group_or_topic_without_offsets_is_noted(store, action):
    for more, note in ((["--group", "billin"], "note: group billin has committed no offset\n"),
                       (["--group", "billing", "--topic", "x"], "note: group billing has committed no offset on x\n"),
                       (["--topic", "x"], "note: no group has committed an offset on x\n")):
        ran = groups(store, action, *more, "--json")
        assert (ran.code, ran.document["groups"], ran.stderr) == (0, [], note)


@pytest.mark.parametrize("action", ["list", "lag"])
def test_a_store_without_groups_is_noted(builder, action):
    builder.put("orders", b"1")
    assert groups(builder, action).stderr == "note: no group has committed an offset\n"


def test_lag_shows_each_queue(store):
    (billing,) = groups(store, "lag", "--group", "billing", "--json").document["groups"]
    assert [(queue["queue_id"], queue["committed"], queue["max_offset"], queue["lag"]) for queue in billing["queues"]] == [
        (0, 5, 10, 5), (1, 0, 10, 10), (2, 10, 10, 0)]
    assert billing["queues"][0]["waiting_since_ms"] == START_MS + 5000 and billing["queues"][2]["waiting_since_ms"] is None
    (audit,) = groups(store, "lag", "--group", "audit", "--json").document["groups"]
    assert [queue["committed"] for queue in audit["queues"]] == [10, None, None]
    assert "lag 15" in groups(store, "lag").stdout


@pytest.mark.parametrize(("to", "offsets"), [
    ("first", {"0": 0, "1": 0, "2": 0}),
    ("last", {"0": 10, "1": 10, "2": 10}),
    ("7", {"0": 7, "1": 7, "2": 7}),
    ("99", {"0": 10, "1": 10, "2": 10}),
    (f"@{START_MS + 12_000}", {"0": 10, "1": 2, "2": 0}),
    ("2023-11-14T22:13:32Z", {"0": 10, "1": 2, "2": 0}),
    ("2023-11-14T22:13:32", {"0": 10, "1": 2, "2": 0}),
])
def test_reset_moves_the_group(store, to, offsets):
    ran = groups(store, "reset", "--group", "billing", "--topic", "orders", "--to", to, "--json")
    assert ran.code == 0 and ran.document == {"topic": "orders", "group": "billing", "offsets": offsets}
    assert ConsumerOffsets(store.root).read("orders", "billing") == {int(key): value for key, value in offsets.items()}
    assert ConsumerOffsets(store.root).read("orders", "audit") == {0: 10}


def test_reset_of_one_queue_leaves_the_others(store):
    groups(store, "reset", "--group", "billing", "--topic", "orders", "--to", "3", "--queue-id", 1)
    assert ConsumerOffsets(store.root).read("orders", "billing") == {0: 5, 1: 3, 2: 10}


@pytest.mark.parametrize("arguments", [
    ["reset", "--group", "billing", "--topic", "orders"],
    ["reset", "--group", "billing", "--to", "first"],
    ["reset", "--group", "billing", "--topic", "orders", "--to", "yesterday"],
    ["reset", "--group", "billing", "--topic", "nothing", "--to", "first"],
    ["reset", "--group", "billing", "--topic", "orders", "--to", "first", "--queue-id", "9"],
    ["reset", "--group", "a@b", "--topic", "orders", "--to", "first"],
    ["list", "--to", "first"],
    ["lose"],
])
def test_wrong_options_are_a_usage_error(store, arguments):
    before = (store.root / "config" / "consumerOffset.json").read_bytes()
    assert groups(store, *arguments).code == 2
    assert (store.root / "config" / "consumerOffset.json").read_bytes() == before


def test_forget_removes_a_group_without_members(store):
    assert groups(store, "forget", "--group", "audit", "--topic", "orders", "--json").document["forgotten"]
    assert not groups(store, "forget", "--group", "audit", "--topic", "orders", "--json").document["forgotten"]
    assert list(ConsumerOffsets(store.root).groups()) == [("orders", "billing")]


def test_groups_reports_a_damaged_file_and_uses_its_backup(store):
    (store.root / "config" / "consumerOffset.json").write_bytes(b"{")
    ran = groups(store, "--json")
    assert ran.code == 0 and [group["group"] for group in ran.document["groups"]] == ["billing"]
    assert "consumerOffset.json.bak is used" in ran.stderr and len(ran.document["notes"]) == 2


def test_members_and_holders_are_shown_and_a_living_group_is_not_forgotten(store):
    settings = {name: getattr(store.geometry, name) for name in store.geometry.__dataclass_fields__}
    with pyengine.consume(store.root, "orders", group="billing", **settings):
        (state,) = groups(store, "lag", "--group", "billing", "--json").document["groups"]
        assert len(state["members"]) == 1
        assert {queue["holder_pid"] for queue in state["queues"]} == set(state["members"])
        pid = str(os.getpid())  # as kill and ps take it: without separators
        lines = groups(store, "lag", "--group", "billing").stdout.splitlines()
        assert {line.split()[-1] for line in lines if line.lstrip()[:1].isdigit()} == {pid}
        assert groups(store, "forget", "--group", "billing", "--topic", "orders").code == 2


def test_a_group_with_more_members_than_queues_is_noted(store):
    options = {name: getattr(store.geometry, name) for name in store.geometry.__dataclass_fields__}
    with contextlib.ExitStack() as stack, pytest.warns(UserWarning, match="billing has 4 members on orders, which has 3 queues"):
        for _ in range(4):
            stack.enter_context(pyengine.consume(store.root, "orders", group="billing", **options))
        for action in ("list", "lag"):
            note = f"1 of them get no messages: `pyengine topics update {store.root} orders --queues 4` makes more queues"
            ran = groups(store, action, "--json")
            assert note in ran.document["notes"][0] and note in ran.stderr and note in groups(store, action).stderr
    assert groups(store, "--json").document["notes"] == []


def test_tails_of_one_group_share_the_queues(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for queue_id in range(4):
            producer.put_many("orders", [b"%d" % number for number in range(20)], queue_id=queue_id)
        tails = [subprocess.Popen(
            command_line("tail", engine.root, "--topic", "orders", "--group", "billing", "--json"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) for _ in range(2)]
        try:
            pids = {one.pid for one in tails}
            found = pyengine.ConsumerGroups(engine.root)
            eventually(lambda: any(set(state.holders.values()) == pids and len(state.holders) == 4 for state in found.groups()),
                       "both hold queues", timeout_s=90)
            for queue_id in range(4):
                producer.put_many("orders", [b"more"] * 5, queue_id=queue_id)
            eventually(lambda: set(ConsumerOffsets(engine.root).read("orders", "billing").values()) == {25},
                       "all is printed and remembered", timeout_s=90)
        finally:
            for one in tails:
                one.terminate()
            printed = [json.loads(line) for one in tails for line in one.communicate(timeout=scaled_timeout_s(60))[0].splitlines()]
    assert sorted((line["queue_id"], line["queue_offset"]) for line in printed) == [
        (queue_id, offset) for queue_id in range(4) for offset in range(25)]


def test_update_orders_a_group_for_clients_of_rocketmq_5(store):
    configs = SubscriptionGroups(store.root)
    configs.put(SubscriptionGroup("billing", retry_max_times=3, more={"consumeMessageOrderly": False, "other": 1}))
    ran = groups(store, "update", "--group", "billing", "--order", "--json")
    assert (ran.code, ran.document) == (0, {"group": "billing", "ordered": True})
    row = configs.read().rows["billing"]
    assert row.is_ordered and (row.retry_max_times, row.more["other"]) == (3, 1)
    assert groups(store, "update", "--group", "new", "--order").stdout == "new is ordered\n" and configs.read().rows["new"].is_ordered
    assert groups(store, "update", "--group", "billing", "--no-order").stdout == "billing is not ordered\n"
    assert not configs.read().rows["billing"].is_ordered


@pytest.mark.parametrize(("arguments", "why"), [
    (["update", "--order"], "update needs --group"), (["update", "--group", "g"], "--order or --no-order"),
    (["update", "--group", "g", "--topic", "orders", "--order"], "no --topic"), (["lag", "--order"], "--order needs the action update"),
    (["update", "--group", "a/b", "--order"], "holds"), (["update", "--group", "g", "--order", "--to", "first"], "need the action reset")])
def test_an_update_that_is_no_order_is_refused(store, arguments, why):
    ran = groups(store, *arguments)
    assert ran.code == 2 and why in ran.stderr
