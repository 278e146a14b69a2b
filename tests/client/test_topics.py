"""`pyengine.Topics`: a store's topics, with and without an engine."""

from __future__ import annotations

import pytest

import pyengine
from pyengine.errors import ConfigError, NotAStoreError, StoreBusyError, UsageError
from pyengine.storage import config_table
from pyengine.storage.read_level import StoreUse
from waiting import eventually


def states(root, **options) -> dict[str, pyengine.TopicState]:
    return {each.topic: each for each in pyengine.Topics(root).list(**options)}


def entry(root, topic: str) -> pyengine.TopicConfig | None:
    return next((each.config for each in pyengine.Topics(root).list() if each.topic == topic), None)


def test_topics_with_messages_and_topics_with_an_entry_are_listed(builder):
    sizes = [builder.put("orders", b"1", queue_id=queue_id).size_bytes for queue_id in (0, 2)]
    made = pyengine.Topics(builder.root).create("planned", queues=4)
    assert (made.read_queue_nums, made.write_queue_nums, made.perm_text, made.order) == (4, 4, "RW-", False)
    assert states(builder.root) == {
        "orders": pyengine.TopicState("orders", (0, 2), 2, None), "planned": pyengine.TopicState("planned", (), 0, made)}
    assert {name: state.size_bytes for name, state in states(builder.root, sizes=True).items()} == {"orders": sum(sizes), "planned": 0}


def test_a_change_names_what_it_changes(builder):
    topics = pyengine.Topics(builder.root)
    assert topics.create("orders") == pyengine.TopicConfig("orders", 8, 8)
    assert topics.update("orders", write_queue_nums=2, perm="r", order=True) == pyengine.TopicConfig("orders", 8, 2, 4, True)
    assert topics.update("orders", queues=3, read_queue_nums=5, perm=6) == pyengine.TopicConfig("orders", 5, 3, 6, True)
    assert topics.create("orders", queues=9, exist_ok=True) == states(builder.root)["orders"].config
    assert topics.create("other", queues=9, exist_ok=True).write_queue_nums == 9


@pytest.mark.parametrize(("call", "says"), [
    (lambda topics: topics.create("there"), "is there already"), (lambda topics: topics.create("a@b"), "no group could consume"),
    (lambda topics: topics.create("a/b"), "folder's name"), (lambda topics: topics.create(""), "is empty"),
    (lambda topics: topics.create("x", queues=0), "give 1 to"), (lambda topics: topics.create("x", perm="rx"), "perm is 'rx': give rw"),
    (lambda topics: topics.update("there"), "update changes nothing"), (lambda topics: topics.update("gone", perm="r"), "no topic gone"),
    (lambda topics: topics.delete("gone"), "no topic gone"),
])
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(builder, call, says):
    topics = pyengine.Topics(builder.root)
    topics.create("there")
    before = topics.list()
    with pytest.raises(UsageError, match=says):
        call(topics)
    for wrong in ({"queues": "4"}, {"order": 1}, {"perm": 4.0}):
        with pytest.raises(TypeError):
            topics.create("x", **wrong)
    assert topics.list() == before


def test_a_deleted_topic_keeps_its_messages_and_comes_back_with_the_next_one(undelayed, names):
    topics = pyengine.Topics(undelayed.path)
    with undelayed.connect() as producer:
        producer.put(names[0], b"before")
        eventually(lambda: entry(undelayed.path, names[0]), "its entry is made")
        topics.delete(names[0])
        assert states(undelayed.path)[names[0]] == pyengine.TopicState(names[0], (0,), 1, None)
        with pyengine.consume(undelayed.path, names[0]) as consumer:
            assert [message.body for message in consumer.pull()] == [b"before"]
        producer.put(names[0], b"after")
    eventually(lambda: entry(undelayed.path, names[0]), "its entry is made again")


def test_a_store_that_is_not_there_or_a_brokers_is_an_error(tmp_path, builder, monkeypatch):
    with pytest.raises(NotAStoreError):
        pyengine.Topics(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="queues"):
        pyengine.Topics(builder.root, queues=4)
    monkeypatch.setattr(config_table, "store_use", lambda root: StoreUse.OTHER)
    with pytest.raises(StoreBusyError):
        pyengine.Topics(builder.root).create("orders")
