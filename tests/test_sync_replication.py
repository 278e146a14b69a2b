"""What a put to a SYNC_MASTER waits for and says: `confirm` is moved here by the test in the replicator's place."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fix_golden import usual
from fix_parts import MODES
from pyengine.client.outgoing import BatchMessage
from pyengine.native import control as native
from pyengine.results import PutManyResult, PutStatus
from waiting import eventually

MASTER = {"role": native.SYNC_MASTER, "replicates": 1, "slave_timeout_ms": 20_000, "session_ring_bytes_default": 1 << 20}


class Confirmer:
    """A slave that confirms what is committed, `behind` bytes of it not."""

    def __init__(self, parts) -> None:
        self.parts, self.running = parts, True
        native.store(parts.control.replicator, "slaves_connected", 1)
        self.thread = threading.Thread(target=self.confirm)
        self.thread.start()

    def confirm(self) -> None:
        control, memory = self.parts.control, self.parts.owner.memory
        latch = memory.latch(native.REPLICATOR)
        while self.running:
            latch.arm()
            committed = native.load_position(control.committed)
            if committed > native.load_position(control.confirm):
                native.publish_confirm(control, committed)
            else:
                latch.wait(0.2)

    def close(self) -> None:
        self.running = False
        self.thread.join()


@pytest.fixture
def confirmed(make_parts):
    made = []

    def make(**identity):
        parts = make_parts(**{**MASTER, **identity})
        made.append(Confirmer(parts))
        return parts

    yield make
    for confirmer in made:
        confirmer.close()


def where(result) -> int:
    return result.first_physical_offset if isinstance(result, PutManyResult) else result.physical_offset


def every_put(producer):
    yield producer.put("T", b"1")
    yield producer.put("T", b"2")  # a topic that was put to before goes another way
    yield producer.put("T", b"3", keys="k", timeout_s=20)
    yield producer.put_many("T", [b"4", b"5"])
    yield producer.put_batch("T", [BatchMessage(b"6"), BatchMessage(b"7")])
    yield producer.put_async("T", b"8").result(30)
    yield producer.put("T", bytes(900_000))  # larger than half the ring


@pytest.mark.parametrize("disk", usual(MODES, ["sync"], pytest.mark.ci))
def test_a_put_is_ok_once_slaves_have_it(confirmed, disk):
    parts = confirmed(**MODES[disk], segment_bytes=1 << 20)
    with parts.producer() as producer:
        for result in every_put(producer):
            assert result.status is PutStatus.PUT_OK
            assert native.load_position(parts.control.confirm) > where(result) >= 0


def test_without_a_slave_the_message_is_stored_and_the_status_says_that_no_slave_has_it(make_parts):
    parts = make_parts(**MASTER, segment_bytes=1 << 20)
    with parts.producer() as producer:
        for result in every_put(producer):
            assert result.status is PutStatus.SLAVE_NOT_AVAILABLE and not result.indeterminate
            assert where(result) >= 0 and "not replicated: 0 of 1 required slaves connected" in result.reason
        assert producer.put("T", b"x", wait=False).status is PutStatus.PUT_OK


def test_a_slave_that_does_not_confirm_costs_the_deadline_and_no_more(make_parts):
    parts = make_parts(**{**MASTER, "slave_timeout_ms": 30})
    native.store(parts.control.replicator, "slaves_connected", 1)
    with parts.producer() as producer:
        for result in (producer.put("T", b"1"), producer.put("T", b"2"), producer.put_async("T", b"3").result(30)):
            assert result.status is PutStatus.FLUSH_SLAVE_TIMEOUT
            assert where(result) >= 0 and "slave_timeout_ms" in result.reason


def test_a_slave_has_its_own_time_however_little_the_disk_has(make_parts):
    parts = make_parts(**MASTER, mode=native.MODE_SYNC, sync_flush_timeout_ms=5)  # less than one native call waits
    native.store(parts.control.replicator, "slaves_connected", 1)
    with parts.producer() as producer, ThreadPoolExecutor() as pool:
        assert producer.put("T", b"first", wait=False).physical_offset == 0  # the next answer comes at once
        waiting = pool.submit(producer.put, "T", b"x")
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        native.publish_confirm(parts.control, native.load_position(parts.control.committed))
        assert waiting.result(30).status in (PutStatus.PUT_OK, PutStatus.FLUSH_DISK_TIMEOUT)


def test_many_waiting_puts_share_one_deadline(make_parts):
    parts = make_parts(**{**MASTER, "slave_timeout_ms": 300})
    native.store(parts.control.replicator, "slaves_connected", 1)
    with parts.producer() as producer:
        futures = [producer.put_async("T", b"%d" % number) for number in range(200)]
        # One after the other they would take a minute.
        assert {future.result(30).status for future in futures} == {PutStatus.FLUSH_SLAVE_TIMEOUT}


def test_a_slave_that_lags_far_is_not_waited_for(make_parts):
    parts = make_parts(**MASTER, ha_slave_fallbehind_max_bytes=500)
    native.store(parts.control.replicator, "slaves_connected", 1)
    with parts.producer() as producer:
        result = producer.put("T", bytes(600))
    assert result.status is PutStatus.SLAVE_NOT_AVAILABLE and "ha_slave_fallbehind_max_bytes" in result.reason


def test_as_many_slaves_as_were_asked_for_must_be_there(make_parts):
    parts = make_parts(**MASTER, min_in_sync_replicas=2)
    native.store(parts.control.replicator, "slaves_connected", 1)
    with parts.producer() as producer:
        result = producer.put("T", b"x")
    assert result.status is PutStatus.SLAVE_NOT_AVAILABLE and "1 of 2 required slaves" in result.reason


def test_an_async_master_waits_for_no_slave(make_parts):
    parts = make_parts(**{**MASTER, "role": native.ASYNC_MASTER}, segment_bytes=1 << 20)
    with parts.producer() as producer:
        assert {result.status for result in every_put(producer)} == {PutStatus.PUT_OK}


def test_the_slaves_outcome_replaces_the_disk_s_as_in_rocketmq(make_parts):
    parts = make_parts(**{**MASTER, "slave_timeout_ms": 30}, mode=native.MODE_SYNC, sync_flush_timeout_ms=30)
    native.store(parts.control.replicator, "slaves_connected", 1)
    parts.kill(native.FLUSHER)
    with parts.producer() as producer:
        assert producer.put("T", b"x").status is PutStatus.FLUSH_SLAVE_TIMEOUT
        native.store(parts.control.replicator, "slaves_connected", 0)
        assert producer.put("T", b"x").status is PutStatus.SLAVE_NOT_AVAILABLE
    with parts.producer() as producer:
        native.publish_confirm(parts.control, 1 << 40)
        assert producer.put("T", b"x").status is PutStatus.FLUSH_DISK_TIMEOUT


def test_a_frozen_store_says_so_before_it_speaks_of_slaves(make_parts):
    parts = make_parts(**{**MASTER, "slave_timeout_ms": 30, "sync_flush_timeout_ms": 120_000}, mode=native.MODE_SYNC)
    native.store(parts.control.replicator, "slaves_connected", 1)
    parts.kill(native.FLUSHER)
    with parts.producer() as producer:
        future = producer.put_async("T", b"x")
        eventually(lambda: native.load_position(parts.control.wrote) > 0, "it is stored, and waits for the flusher")
        native.freeze(parts.control, native.FLUSHER, 5, "the flusher could not make it durable (Input/output error)")
        result = future.result(30)
    assert result.status in (PutStatus.FLUSH_DISK_TIMEOUT, PutStatus.SERVICE_NOT_AVAILABLE)
    assert "Input/output error" in result.reason or "read-only" in result.reason
