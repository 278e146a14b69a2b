"""Offsets of consumer groups: RocketMQ's file, kept right under several writers and damage."""

from __future__ import annotations

import json
import threading

import pytest

from broker_lock import held_by_a_broker
from pyengine.errors import StoreBusyError, UsageError
from pyengine.storage.consumer_offset import ConsumerOffsets

# As 4.9.8 writes it: integer keys without quotes, tabs.
BY_ROCKETMQ = '{\n\t"offsetTable":{"orders@billing":{0:123,1:45\n\t\t},"%RETRY%billing@billing":{0:7\n\t\t}\n\t}\n}'


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config").mkdir()
    return tmp_path / "config" / "consumerOffset.json"


def test_what_rocketmq_wrote_is_read_and_kept(tmp_path, path):
    path.write_text(BY_ROCKETMQ)
    offsets = ConsumerOffsets(tmp_path)
    assert offsets.read("orders", "billing") == {0: 123, 1: 45}
    assert offsets.read("orders", "nobody") == {}
    offsets.commit("orders", "billing", {1: 46, 2: 1})
    assert offsets.read("orders", "billing") == {0: 123, 1: 46, 2: 1}
    assert offsets.groups()[("%RETRY%billing", "billing")] == {0: 7}
    assert json.loads(path.read_text())["offsetTable"]["orders@billing"] == {"0": 123, "1": 46, "2": 1}
    assert path.with_name(path.name + ".bak").read_text() == BY_ROCKETMQ


@pytest.mark.parametrize("damage", ["", "{", '{"offsetTable":3}', "[]", "null", "\x00" * 40])
def test_a_damaged_file_falls_back_to_the_one_before(tmp_path, path, damage):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 1})
    offsets.commit("orders", "billing", {0: 2})
    path.write_text(damage)
    assert offsets.read("orders", "billing") == {0: 1}


def test_a_store_without_the_file_has_no_offsets(tmp_path):
    assert ConsumerOffsets(tmp_path).read("orders", "billing") == {}


def test_no_commit_of_another_is_lost(tmp_path):
    def commit(queue_id: int) -> None:
        for offset in range(1, 11):
            ConsumerOffsets(tmp_path).commit("orders", "billing", {queue_id: offset})

    threads = [threading.Thread(target=commit, args=(queue_id,)) for queue_id in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ConsumerOffsets(tmp_path).read("orders", "billing") == dict.fromkeys(range(4), 10)


def test_a_commit_is_refused_while_another_program_owns_the_store(tmp_path, path):
    path.write_text(BY_ROCKETMQ)
    (tmp_path / "lock").write_text("lock")
    with held_by_a_broker(tmp_path):
        with pytest.raises(StoreBusyError):
            ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 124})
        assert path.read_text() == BY_ROCKETMQ
    ConsumerOffsets(tmp_path).commit("orders", "billing", {0: 124})


@pytest.mark.parametrize(("topic", "group"), [("", "g"), ("t", ""), ("a@b", "g"), ("t", "g@h")])
def test_names_that_the_file_cannot_carry_are_refused(tmp_path, topic, group):
    with pytest.raises(UsageError):
        ConsumerOffsets(tmp_path).commit(topic, group, {0: 1})
