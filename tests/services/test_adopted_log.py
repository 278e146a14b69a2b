"""The log from before the engine is read newest first; damage there ends the work and is reported."""

from __future__ import annotations

import os

import pytest

from pyengine.errors import DiskError, FlushError
from pyengine.services import flush_consume_queue
from pyengine.services.flush_consume_queue import AdoptedLog
from pyengine.storage.message_store import MessageStore
from reported import Reported

BODY_AT = 88


def adopt(store, verified_from: int | None = None, min_offset: int = 0):
    reported = Reported()
    log = AdoptedLog(MessageStore(store.root), store.end if verified_from is None else verified_from,
                     lambda: min_offset, reported)
    return log, reported


class Clock:
    """What the work takes for the time, which passes only where the test says so."""

    ns = 10**12


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(flush_consume_queue, "monotonic_ns", lambda: Clock.ns)


def make_due(log: AdoptedLog) -> None:
    Clock.ns += round(log.pause_s() * 1e9)


def read_all(log: AdoptedLog) -> list[int]:
    """Each `verified_from` in turn, until the work is over."""
    seen = [log.verified_from]
    while log.pause_s() <= 1:
        make_due(log)
        log.work()
        if log.verified_from != seen[-1]:
            seen.append(log.verified_from)
    return seen


def test_segments_are_read_the_newest_first_until_all_is_covered(build_store):
    store = build_store(40, ours=False, spare=False)
    log, reported = adopt(store)
    starts = sorted((int(path.name) for path in (store.root / "commitlog").iterdir()), reverse=True)
    assert len(starts) > 2
    assert read_all(log) == [store.end, *starts]
    assert log.blocked.text == "" and len(reported) == 1 and "all of it" in reported[0]


def test_slices_come_to_the_same(build_store, monkeypatch):
    store = build_store(40, ours=False, spare=False)
    monkeypatch.setattr(flush_consume_queue, "SLICE_BYTES", 100)
    log, _ = adopt(store)
    assert read_all(log)[-1] == 0


@pytest.mark.parametrize("number", [0, 15, 38])
def test_damage_is_reported_and_the_log_above_its_segment_stays_covered(build_store, number):
    store = build_store(40, ours=False, spare=False)
    record = store.records[number]
    store.flip(record.start + BODY_AT)
    log, reported = adopt(store)
    read_all(log)
    segment_end = record.start - record.start % store.size_bytes + store.size_bytes
    assert log.verified_from == min(segment_end, store.end)
    assert f"damaged at {record.start}" in log.blocked.text and reported == [log.blocked.text]


def test_a_record_that_names_another_offset_is_damage_here_as_everywhere_in_our_stores(build_store):
    store = build_store(10, ours=False, spare=False)
    store.flip(store.records[3].start + 35)
    log, _ = adopt(store)
    read_all(log)
    assert "offset_mismatch" in log.blocked.text


def test_a_segment_that_the_cleaner_takes_meanwhile_is_no_damage(build_store):
    store = build_store(40, ours=False, spare=False)
    first = min(int(path.name) for path in (store.root / "commitlog").iterdir())
    store.segment(first).unlink()
    log, _ = adopt(store, min_offset=first + store.size_bytes)
    assert read_all(log)[-1] == 0 and log.blocked.text == ""


def test_a_vanished_segment_is_reported(build_store):
    store = build_store(40, ours=False, spare=False)
    store.segment(0).unlink()
    log, _ = adopt(store)
    read_all(log)
    assert "is missing" in log.blocked.text and log.verified_from == store.size_bytes


def test_each_segment_is_synced_before_it_is_read(build_store, monkeypatch):
    store = build_store(40, ours=False, spare=False)
    order: list[str] = []
    real_walk = flush_consume_queue.walk
    monkeypatch.setattr(flush_consume_queue, "fdatasync", lambda descriptor, path: order.append(os.path.basename(path)))
    monkeypatch.setattr(flush_consume_queue, "walk", lambda *given, **named: (order.append("read"), real_walk(*given, **named))[1])
    read_all(adopt(store)[0])
    assert order[::2] == sorted((path.name for path in (store.root / "commitlog").iterdir()), reverse=True)
    assert set(order[1::2]) == {"read"}


def test_a_failed_sync_ends_it_and_goes_to_the_caller(build_store, monkeypatch):
    store = build_store(40, ours=False, spare=False)

    def fail(descriptor, path):
        raise FlushError("no", errno=5, path=path)

    monkeypatch.setattr(flush_consume_queue, "fdatasync", fail)
    log, _ = adopt(store)
    with pytest.raises(FlushError):
        log.work()
    assert log.verified_from == store.end and log.pause_s() == float("inf")


def test_a_file_that_cannot_be_read_now_is_tried_again(build_store, monkeypatch):
    store = build_store(40, ours=False, spare=False)
    real = flush_consume_queue.mapped

    def fail(path):
        raise DiskError("no descriptor")

    monkeypatch.setattr(flush_consume_queue, "mapped", fail)
    log, reported = adopt(store)
    log.work()
    assert "no descriptor" in log.blocked.text and 0 < log.pause_s() <= 1
    monkeypatch.setattr(flush_consume_queue, "mapped", real)
    make_due(log)
    assert read_all(log)[-1] == 0 and log.blocked.text == ""


def test_there_is_nothing_to_read_where_the_log_begins_at_its_end(build_store):
    store = build_store(10, ours=False, spare=False)
    log, reported = adopt(store, verified_from=store.size_bytes, min_offset=store.size_bytes)
    assert (log.verified_from, log.pause_s(), reported) == (0, float("inf"), [])
