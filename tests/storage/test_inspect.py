"""`inspect` against what the real RocketMQ 4.9.8 reads from the same files."""

from __future__ import annotations

import json

import pytest

from fix_golden import CLEAN, HALTED, SIZE_SETTINGS, compare_inspect
from pyengine.errors import ConfigError, StoreRefusedError
from pyengine.storage.inspect import inspect


@pytest.mark.parametrize("name", CLEAN)
def test_cleanly_stopped_stores_read_as_rocketmq_reads_them(golden, name):
    store = golden(name)
    assert compare_inspect(inspect(store.root), store.verify) == []


READABLE_HALTED = [name for name in HALTED if name != "abnormal-shortfile"]


@pytest.mark.parametrize("name", READABLE_HALTED)
def test_a_halted_store_shows_the_log_that_recovery_would_keep(golden, name):
    store = golden(name)
    document = inspect(store.root)
    assert compare_inspect(document, store.verify, ignore=["queues", "messages", "queries", "byTime"]) == []
    assert document["before"]["abort"] is True


def test_a_halted_stores_queues_are_shown_as_they_are(golden):
    """abnormal-cqbehind: the last entries of each queue are lost until a recovery writes them again."""
    store = golden("abnormal-cqbehind")
    shown = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in inspect(store.root)["facts"]["queues"]}
    shorter = 0
    for queue in store.verify["facts"]["queues"]:
        entries = shown.get((queue["topic"], queue["queueId"]), [])
        assert entries == queue["entries"][: len(entries)]
        shorter += len(entries) < len(queue["entries"])
    assert shorter > 0


def test_entries_beyond_the_log_are_not_shown(golden):
    """abnormal-cqahead: queues hold entries of messages that the log has lost."""
    store = golden("abnormal-cqahead")
    document = inspect(store.root)
    assert compare_inspect(document, store.verify, ignore=["queries", "byTime"]) == []


def test_a_segment_of_wrong_length_is_refused_as_rocketmq_refuses_it(golden):
    store = golden("abnormal-shortfile")
    assert store.verify["loadOk"] is False
    with pytest.raises(StoreRefusedError, match="50837"):
        inspect(store.root)


@pytest.mark.parametrize("name", ["basic", "abnormal-torn", "cleaned"])
def test_inspect_changes_nothing(golden, name):
    root = golden(name).root

    def state() -> list[tuple]:
        return [
            (path, path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
            for path in sorted(root.rglob("*"))
        ]

    before = state()
    inspect(root)
    assert state() == before


@pytest.mark.parametrize("name", ["roll", "cqext", "empty"])
def test_the_document_is_json(golden, name):
    document = inspect(golden(name).root)
    assert json.loads(json.dumps(document)) == document


def test_settings_that_the_files_cannot_tell_are_taken(golden):
    store = golden("empty")
    made_with = store.manifest["config"]
    shown = inspect(store.root, {key: value for key, value in made_with.items() if key in SIZE_SETTINGS})["config"]
    assert shown["maxIndexNum"] == made_with["maxIndexNum"]
    with pytest.raises(ConfigError):
        inspect(golden("basic").root, {"mappedFileSizeCommitLog": "16384"})


def test_damage_below_the_end_is_marked(builder):
    messages = [builder.put("T", b"x" * 50) for _ in range(160)]
    builder.write_log(b"\0", at=messages[3].physical_offset + 4)
    records = inspect(builder.root)["records"]
    assert [record["phy"] for record in records] == [message.physical_offset for message in messages[:4]]
    assert records[3] == {"phy": messages[3].physical_offset, "unreadable": True}


def test_filler_is_shown_as_rocketmq_shows_it(builder):
    """Where the log starts at 0, RocketMQ counts filler as entries and reads over them."""
    builder.fill_queue("T", 0, 13)
    builder.put("T", b"x")
    document = inspect(builder.root)
    queue = document["facts"]["queues"][0]
    assert (queue["min"], queue["max"]) == (10, 14)
    assert queue["entries"][:3] == [[0, 0x7FFFFFFF, 0]] * 3
    assert [message["queueOffset"] for message in document["messages"]] == [13]
    assert [sample["offset"] for sample in document["byTime"] if "offset" in sample] == [0] * 4  # RocketMQ cannot read the time of filler


def test_an_ipv6_host_is_printed_like_java(builder):
    builder.put("T", b"x", born_host="[2001:db8::1]:5", store_host="[::ffff:1.2.3.4]:6")
    record = inspect(builder.root)["records"][0]
    assert (record["bornHost"], record["storeHost"]) == ("[2001:db8:0:0:0:0:0:1]:5", "[1.2.3.4]:6")
