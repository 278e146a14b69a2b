"""Records of RocketMQ's transactions that put_raw puts: their queue entries and keys. `producer.transaction`: test_half_messages.py."""

from __future__ import annotations

import pyengine
from pyengine.results import ReadLevel
from waiting import eventually

PREPARED, COMMIT, ROLLBACK = 4, 8, 12


def test_only_a_commit_has_a_queue_entry_and_a_rollback_has_no_key(undelayed):
    keys = "KEYS\x01k\x02TRAN_MSG\x01true"
    with pyengine.connect(undelayed.path) as producer:
        plain = producer.put("orders", b"plain", queue_id=2)
        prepared = producer.put_raw(pyengine.RawMessage("orders", b"x", queue_id=2, properties_text=keys, sys_flag=PREPARED))
        commit, rollback = (
            producer.put_raw(pyengine.RawMessage("orders", b"x", queue_id=2, properties_text="KEYS\x01k", sys_flag=kind,
                                                 prepared_transaction_offset=prepared.physical_offset))
            for kind in (COMMIT, ROLLBACK))
    assert [one.queue_offset for one in (plain, prepared, commit, rollback)] == [0, 0, 1, 0]
    with pyengine.open_store(undelayed.path) as store:
        eventually(lambda: store.dispatched_offset(ReadLevel.COMMITTED) > rollback.physical_offset, "dispatched")
        messages = store.get_message("orders", 2, 0, level="committed").messages
        assert [(one.body, one.sys_flag, one.prepared_transaction_offset) for one in messages] == [
            (b"plain", 0, 0), (b"x", COMMIT, prepared.physical_offset)]
        assert [one.sys_flag for one in store.query_message("orders", "k", level="committed")] == [PREPARED, COMMIT]
