"""topics.json: RocketMQ's shape, whole or not at all, and a bad file that stops no process."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import threading

import pytest

from broker_lock import held_by_a_broker
from pyengine.errors import DiskError, FormatError, StoreBusyError, UsageError
from pyengine.formats.small_file import decode_config, path_stamp, read_small_file
from pyengine.storage import config_table, durable_file
from pyengine.storage.config_table import (
    GROUPS_FORMAT,
    TOPICS_FORMAT,
    SubscriptionGroup,
    SubscriptionGroups,
    TopicConfig,
    TopicConfigs,
)
from pyengine.storage.ofd_lock import SHARED, try_lock

# As fastjson writes it; `attributes` is of a later RocketMQ.
ROCKETMQ = """{
\t"dataVersion":{
\t\t"counter":7,
\t\t"timestamp":1700000000000
\t},
\t"topicConfigTable":{
\t\t"orders":{
\t\t\t"order":true,
\t\t\t"perm":6,
\t\t\t"readQueueNums":4,
\t\t\t"topicFilterType":"SINGLE_TAG",
\t\t\t"topicName":"orders",
\t\t\t"topicSysFlag":0,
\t\t\t"writeQueueNums":4,
\t\t\t"attributes":{"a":"b"}
\t\t},"bare":{"topicName":"bare"}
\t}
}"""


def configs(root, text: str | bytes | None = None, backup: str | bytes | None = None) -> TopicConfigs:
    (root / "config").mkdir()
    for name, content in (("topics.json", text), ("topics.json.bak", backup)):
        if content is not None:
            (root / "config" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return TopicConfigs(root)


def touched(newest_ms: int = 1, **queue_ids: int) -> list[tuple[str, int, int]]:
    """One queue with messages for each topic."""
    return [(topic, queue_id, newest_ms) for topic, queue_id in queue_ids.items()]


def entered(topics: TopicConfigs, queues: list[tuple[str, int, int]]) -> set[str]:
    """What recovery and the checkpointer do with topics that have messages."""
    return topics._enter(queues)


def written(root) -> dict:
    return json.loads((root / "config" / "topics.json").read_text())


def test_a_brokers_file_is_read(tmp_path):
    table = configs(tmp_path, ROCKETMQ).read()
    assert (table.counter, table.timestamp_ms, table.problem) == (7, 1700000000000, "")
    assert table.rows["orders"] == TopicConfig("orders", 4, 4, 6, True)
    assert table.rows["bare"] == TopicConfig("bare", 16, 16, 6, False), "what the file does not say is TopicConfig's default"


BOOLEANS = {'"false"': False, '"FALSE"': False, '"0"': False, '"F"': False, "0": False, "2": False, '"true"': True, '"True"': True,
            '"1"': True, '"Y"': True, "1": True, "1.0": True}


@pytest.mark.parametrize("text, expected", BOOLEANS.items(), ids=[text.strip('"') + "-text" * ('"' in text) for text in BOOLEANS])
def test_a_boolean_of_another_kind_is_read_as_fastjson_reads_it(text, expected):
    group = GROUPS_FORMAT.decode('{"subscriptionGroupTable":{"billing":{"groupName":"billing","consumeEnable":%s}}}' % text)
    topic = TOPICS_FORMAT.decode('{"topicConfigTable":{"orders":{"topicName":"orders","order":%s}}}' % text)
    assert (group.rows["billing"].consume_enable, topic.rows["orders"].order) == (expected, expected)


@pytest.mark.parametrize("text", ['"no"', '"x"', "[]", "{}"])
def test_a_text_that_is_no_boolean_makes_the_file_a_damaged_one(text):
    with pytest.raises(FormatError):
        GROUPS_FORMAT.decode('{"subscriptionGroupTable":{"billing":{"consumeEnable":%s}}}' % text)


@pytest.mark.parametrize("text", ['""', '"null"', '"NULL"', "null"])
def test_an_empty_value_is_an_absent_one(text):
    topic = TOPICS_FORMAT.decode('{"topicConfigTable":{"orders":{"order":%s,"readQueueNums":%s}}}' % (text, text)).rows["orders"]
    group = GROUPS_FORMAT.decode('{"subscriptionGroupTable":{"billing":{"consumeEnable":%s,"retryMaxTimes":%s}}}' % (text, text))
    assert (topic.order, topic.read_queue_nums) == (False, 16)
    assert (group.rows["billing"].consume_enable, group.rows["billing"].retry_max_times) == (True, 16)


def test_the_state_version_of_a_later_broker_stays(tmp_path):
    table = configs(tmp_path, ROCKETMQ.replace('"counter":7', '"counter":7,"stateVersion":3'))
    assert table.read().data_version == {"counter": 7, "stateVersion": 3, "timestamp": 1700000000000}
    table.delete("bare")
    assert written(tmp_path)["dataVersion"] == table.read().data_version and table.read().data_version["stateVersion"] == 3


def test_a_change_keeps_what_others_wrote_and_counts_up(tmp_path):
    made = configs(tmp_path, ROCKETMQ).update("orders", write_queue_nums=8, perm=4)
    assert (made.read_queue_nums, made.write_queue_nums, made.perm_text) == (4, 8, "R--")
    document = written(tmp_path)
    assert list(document) == ["dataVersion", "topicConfigTable"]
    assert document["dataVersion"]["counter"] == 8 and document["dataVersion"]["timestamp"] > 1700000000000
    assert document["topicConfigTable"]["orders"] == {
        "order": True, "perm": 4, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "topicName": "orders",
        "topicSysFlag": 0, "writeQueueNums": 8, "attributes": {"a": "b"}}
    assert (tmp_path / "config" / "topics.json.bak").read_text() == ROCKETMQ


@pytest.mark.parametrize("change", [TopicConfigs, SubscriptionGroups])
def test_fields_of_a_later_rocketmq_beside_the_rows_stay(tmp_path, change):
    name, key = ("topics.json", "topicConfigTable") if change is TopicConfigs else ("subscriptionGroup.json", "subscriptionGroupTable")
    later = {"forbiddenTable": {"g": {"t": 1}}, "dataVersion": {"counter": 7, "timestamp": 1, "epoch": [2]}, key: {}}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / name).write_text(json.dumps(later))
    change(tmp_path).create(TopicConfig("T")) if change is TopicConfigs else change(tmp_path).put(SubscriptionGroup("g"))
    found = json.loads((tmp_path / "config" / name).read_text())
    assert found["forbiddenTable"] == {"g": {"t": 1}} and len(found[key]) == 1
    assert (found["dataVersion"]["counter"], found["dataVersion"]["epoch"]) == (8, [2])


def test_create_update_and_delete(tmp_path):
    topics = configs(tmp_path)
    assert topics.read().rows == {} and topics.read().problem == ""
    topics.create(TopicConfig("a"))
    topics.create(TopicConfig("b", 1, 2, 2, True))
    with pytest.raises(UsageError, match="is there already"):
        topics.create(TopicConfig("a"))
    with pytest.raises(UsageError, match="has no topic c"):
        topics.update("c", perm=6)
    with pytest.raises(UsageError, match="read_queue_nums is 0"):
        topics.update("a", read_queue_nums=0)
    with pytest.raises(UsageError, match="perm is 16"):
        topics.update("a", perm=16)
    topics.delete("a")
    with pytest.raises(UsageError, match="has no topic a"):
        topics.delete("a")
    table = topics.read()
    assert table.rows == {"b": TopicConfig("b", 1, 2, 2, True)} and table.counter == 3
    assert list(table.deleted) == ["a"] and written(tmp_path)["deletedTable"] == table.deleted
    topics.create(TopicConfig("a"))
    assert not topics.read().deleted and "deletedTable" not in written(tmp_path)


def test_the_newest_deletions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(config_table, "DELETED_MAX", 2)
    topics = configs(tmp_path)
    for name in "abc":
        topics.create(TopicConfig(name))
    for name in "bca":
        topics.delete(name)
    assert list(topics.read().deleted) == ["c", "a"]
    deleted_ms = topics.read().deleted["a"]
    assert entered(topics, touched(deleted_ms, a=0)) == {"a"} and not topics.read().rows
    assert entered(topics, touched(deleted_ms, a=0, b=0) + touched(deleted_ms + 1, a=3)) == set()
    assert set(topics.read().rows) == {"a", "b"}


def test_a_deletion_by_a_clock_that_was_ahead_does_not_keep_a_topic_out(tmp_path, monkeypatch):
    topics = configs(tmp_path)
    topics.create(TopicConfig("a"))
    with monkeypatch.context() as patch:
        patch.setattr(config_table.time, "time_ns", lambda: 4_000_000_000_000_000_000)
        topics.delete("a")
    assert entered(topics, touched(1_700_000_000_000, a=0)) == set() and set(topics.read().rows) == {"a"}


@pytest.mark.parametrize("bad", ["", "\0" * 100, '{"topicConfigTable":', '{"topicConfigTable":[]}', "[]", b"\xff\xfe"])
def test_a_bad_file_gives_way_to_its_backup_and_says_so(tmp_path, bad):
    topics = configs(tmp_path, bad, ROCKETMQ)
    table = topics.read()
    assert set(table.rows) == {"orders", "bare"} and "topics.json.bak" in table.problem
    topics.create(TopicConfig("new"))
    assert set(written(tmp_path)["topicConfigTable"]) == {"orders", "bare", "new"} and topics.read().problem == ""
    assert (tmp_path / "config" / "topics.json.bak").read_text() == ROCKETMQ, "the bad file never takes the good one's place"


def test_two_bad_files_are_no_topics_and_stay_until_they_are_repaired_or_removed(tmp_path):
    topics = configs(tmp_path, "{", "}")
    table = topics.read()
    assert table.rows == {} and "nothing of it is used" in table.problem
    with pytest.raises(DiskError, match="repair the file or remove it"):
        topics.create(TopicConfig("new"))
    assert topics.path.read_text() == "{"
    topics.path.unlink()
    topics.path.with_name("topics.json.bak").unlink()
    topics.create(TopicConfig("new"))
    assert set(topics.read().rows) == {"new"}


def test_while_a_broker_has_the_store_the_file_is_its_own(tmp_path):
    topics = configs(tmp_path, ROCKETMQ)
    (tmp_path / "lock").write_bytes(b"lock")
    with held_by_a_broker(tmp_path):
        assert set(topics.read().rows) == {"orders", "bare"}
        with pytest.raises(StoreBusyError):
            topics.create(TopicConfig("new"))
    topics.create(TopicConfig("new"))


def test_changes_of_several_at_once_are_all_kept(tmp_path):
    configs(tmp_path)
    threads = [threading.Thread(target=lambda n=number: TopicConfigs(tmp_path).create(TopicConfig(f"t{n}")))
               for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = TopicConfigs(tmp_path).read()
    assert len(table.rows) == 8 and table.counter == 8


def test_an_entry_is_made_once_and_kept_as_it_is(tmp_path):
    found = configs(tmp_path)
    assert found.ensure(TopicConfig("%RETRY%g", 1, 1)) == TopicConfig("%RETRY%g", 1, 1)
    before = found.path.read_bytes()
    assert found.ensure(TopicConfig("%RETRY%g", 7, 7)).read_queue_nums == 1
    assert found.path.read_bytes() == before


def test_an_entry_that_another_process_made_meanwhile_is_taken(tmp_path, monkeypatch):
    mine, other = configs(tmp_path), TopicConfigs(tmp_path)
    changed = mine._changed

    def late():
        other.create(TopicConfig("T", 3, 3))
        return changed()

    monkeypatch.setattr(mine, "_changed", late)
    assert mine.ensure(TopicConfig("T", 1, 1)).read_queue_nums == 3


def test_a_topic_with_messages_gets_an_entry_that_covers_its_queues(tmp_path):
    found = configs(tmp_path)
    entered(found, touched(orders=0, wide=11) + touched(**{"%RETRY%billing": 0}))
    assert found.read().rows == {
        "orders": TopicConfig("orders", 1, 1, 6), "wide": TopicConfig("wide", 12, 1, 6),
        "%RETRY%billing": TopicConfig("%RETRY%billing", 1, 1, 6)}
    assert written(tmp_path)["topicConfigTable"]["orders"] == {
        "order": False, "perm": 6, "readQueueNums": 1, "topicFilterType": "SINGLE_TAG", "topicName": "orders", "topicSysFlag": 0,
        "writeQueueNums": 1}


def test_an_entry_is_only_raised_where_a_broker_would_not_serve_a_queue(tmp_path):
    found = configs(tmp_path, ROCKETMQ)
    before = (tmp_path / "config" / "topics.json").read_bytes()
    stamp = path_stamp(found.path)
    entered(found, touched(orders=3, bare=15))
    assert path_stamp(found.path) == stamp
    assert (tmp_path / "config" / "topics.json").read_bytes() == before
    entered(found, touched(orders=6))
    assert path_stamp(found.path) != stamp
    assert found.read().rows["orders"] == TopicConfig("orders", 7, 4, 6, True)
    assert written(tmp_path)["topicConfigTable"]["orders"]["attributes"] == {"a": "b"}


def test_light_queues_and_a_brokers_own_topics_get_no_entry(tmp_path):
    found = configs(tmp_path)
    entered(found, touched(**{"%LMQ%1": 0, "SCHEDULE_TOPIC_XXXX": 2, "RMQ_SYS_TRANS_HALF_TOPIC": 0, "rmq_sys_wheel_timer": 0, "TBW102": 0,
                           "BenchmarkTest": 9}))
    assert not found.path.exists() and path_stamp(found.path) == 0


def test_a_file_that_cannot_be_read_is_not_replaced_by_one_of_the_new_topics(tmp_path):
    found = configs(tmp_path, "{")
    with pytest.raises(DiskError, match="it is not changed; repair the file or remove it"):
        entered(found, touched(orders=0))
    assert found.path.read_text() == "{"


def test_a_lock_that_another_process_keeps_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    table = configs(tmp_path, ROCKETMQ)
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0.05)
    lock = tmp_path / "config" / "topics.json.lock"
    lock.touch(0o644)
    with open(lock) as held:  # to read is enough
        assert try_lock(held.fileno(), 0, lock, SHARED)
        with pytest.raises(StoreBusyError, match="another process has held .*topics.json.lock for"):
            table.create(TopicConfig("new"))
    table.create(TopicConfig("new"))
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "another user cannot open it any more"


@pytest.mark.root
def test_a_lock_that_root_makes_is_of_the_user_of_the_folder(tmp_path):
    topics = configs(tmp_path)
    topics.path.parent.mkdir(exist_ok=True)
    os.chown(topics.path.parent, 65534, 65534)
    topics.create(TopicConfig("new"))
    status = (tmp_path / "config" / "topics.json.lock").stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65534, 65534, 0o600)


@pytest.mark.root
def test_another_users_file_with_the_name_of_a_lock_is_not_given_away(tmp_path):
    topics, other = configs(tmp_path), tmp_path / "other"
    topics.path.parent.mkdir(exist_ok=True)
    os.chown(topics.path.parent, 65534, 65534)
    other.touch(0o600)
    os.link(other, tmp_path / "config" / "topics.json.lock")
    with pytest.raises(DiskError, match="is a hard link to a file of the user 0"):
        topics.create(TopicConfig("new"))
    assert other.stat().st_uid == 0


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    topics = configs(tmp_path, ROCKETMQ)
    target = tmp_path / "target"
    target.touch(0o644)
    (tmp_path / "config" / "topics.json.lock").symlink_to(target)
    with pytest.raises(DiskError, match=r"cannot open .*topics.json.lock"):
        topics.create(TopicConfig("new"))
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_what_has_not_changed_is_decoded_once_and_what_others_have_changed_again(tmp_path, monkeypatch):
    table, other = configs(tmp_path, ROCKETMQ), TopicConfigs(tmp_path)
    decoded = []
    monkeypatch.setattr("pyengine.storage.config_table.decode_config", lambda text: decoded.append(1) or decode_config(text))
    table.read().rows.clear()
    table.ensure(TopicConfig("orders"))
    table.ensure(TopicConfig("new"))
    assert len(decoded) == 1 and "orders" in other.read().rows
    other.update("orders", perm=4)
    table.update("new", perm=2)
    assert {name: table.read().rows[name].perm for name in ("orders", "new")} == {"orders": 4, "new": 2}


def refused(patch, number, times):
    """The next `times` reads of a config file are refused by the system with this errno; others work."""
    left = [times]

    def read(path):
        if left[0]:
            left[0] -= 1
            raise OSError(number, "refused", str(path))
        return read_small_file(path)

    patch.setattr("pyengine.storage.durable_file.read_small_file", read)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_file_that_the_system_does_not_let_be_read_is_not_replaced(tmp_path, monkeypatch, number, times):
    """Neither by `.bak`, which lacks the last change, nor by a table with nothing but the new row."""
    table = configs(tmp_path, ROCKETMQ)
    table.create(TopicConfig("last"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "config").glob("topics.json*")}
    groups = SubscriptionGroups(tmp_path)
    groups.put(SubscriptionGroup("kept"))
    for change in (lambda: table.create(TopicConfig("new")), lambda: table.update("orders", perm=4), lambda: table.delete("orders"),
                   lambda: groups.enter(SubscriptionGroup("new")), lambda: groups.delete("kept")):
        with monkeypatch.context() as patch:
            refused(patch, number, times)
            with pytest.raises(DiskError, match="refused"):
                change()
    assert {path.name: path.read_bytes() for path in (tmp_path / "config").glob("topics.json*")} == before
    assert groups.read().rows == {"kept": SubscriptionGroup("kept")}


def test_without_a_descriptor_a_file_is_not_taken_for_a_bad_one(tmp_path, monkeypatch):
    table = configs(tmp_path, ROCKETMQ, "")
    refused(monkeypatch, errno.EMFILE, 1)
    with pytest.raises(DiskError, match="cannot read .*topics.json: refused"):
        table.read()
    assert "orders" in table.read().rows


def test_a_lock_that_the_system_refuses_is_a_disk_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    table = configs(tmp_path, ROCKETMQ)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(DiskError, match=r"cannot lock .*topics.json.lock: No locks available"):
        table.update("orders", perm=4)
