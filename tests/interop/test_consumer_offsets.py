"""Groups' offsets go to and fro between this engine and RocketMQ 4.9.8, and its store opens beside them."""

from __future__ import annotations

import pytest

import pyengine
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]


def test_rocketmq_reads_our_file_and_we_read_the_one_it_writes_over_it(judge, tmp_path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 123, 7: 1 << 40})
    offsets.commit("%RETRY%billing", "billing", {0: 9})
    path = tmp_path / "config" / "consumerOffset.json"
    ours = path.read_bytes()
    told = judge.offsets(path, commit={"orders@billing": {"7": 5}, "orders@audit": {"3": 1}}).result(timeout=scaled_timeout_s(240))
    assert told == {"loaded": True, "offsetTable": {
        "orders@billing": {"0": 123, "7": 1 << 40}, "%RETRY%billing@billing": {"0": 9}}}
    assert path.read_bytes() != ours and path.with_name(path.name + ".bak").read_bytes() == ours
    assert b"0:123" in path.read_bytes(), "RocketMQ's keys have no quotes"
    assert offsets.table().notes == []
    assert offsets.groups() == {("orders", "billing"): {0: 123, 7: 5}, ("orders", "audit"): {3: 1},
                                ("%RETRY%billing", "billing"): {0: 9}}
    offsets.commit("orders", "audit", {3: 2})
    again = judge.offsets(path).result(timeout=scaled_timeout_s(240))
    assert again["offsetTable"]["orders@audit"] == {"3": 2} and again["offsetTable"]["orders@billing"]["7"] == 5


def test_the_real_store_opens_one_that_groups_have_consumed(judge, make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for queue_id in range(2):
            producer.put_many("orders", [b"%d" % number for number in range(50)], queue_id=queue_id, tags="paid")
        with (pyengine.consume(engine.root, "orders", group="billing", from_="first") as first,
              pyengine.consume(engine.root, "orders", group="billing", from_="first") as second):
            got = 0
            while got < 100:
                got += len(first.pull(timeout_s=0.1)) + len(second.pull(timeout_s=0.1))
    assert engine.stop()
    told = judge.verify(engine.root, {
        "mappedFileSizeCommitLog": 1 << 20, "mappedFileSizeConsumeQueue": 6000, "maxHashSlotNum": 1000, "maxIndexNum": 4000,
    }).result(timeout=scaled_timeout_s(240))
    assert told["loadOk"] and told["path"] == "normal"
    assert sum(queue["topic"] == "orders" for queue in told["facts"]["queues"]) == 2 and len(told["messages"]) == 100
    path = engine.root / "config" / "consumerOffset.json"
    assert judge.offsets(path).result(timeout=scaled_timeout_s(240))["offsetTable"] == {"orders@billing": {"0": 50, "1": 50}}
