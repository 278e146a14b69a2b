"""What a reader counts of its own gets: found, missed, transferred."""

from __future__ import annotations

import itertools
import threading
import tracemalloc

import pytest

from pyengine.formats.record import decode_record
from pyengine.results import GetResult, GetStatus
from pyengine.storage.message_getter import GetFigures, GetStatistics, parse_condition
from record_bytes import encode_record


def found(messages: int) -> GetResult:
    record = encode_record(topic="T", body=b"x" * 9, queue_id=0, physical_offset=0, queue_offset=0, store_timestamp_ms=1,
                           born_timestamp_ms=1)
    return GetResult(GetStatus.FOUND, [decode_record(record, 0)] * messages)


def test_a_get_is_found_or_missed_and_its_messages_are_counted():
    statistics = GetStatistics()
    assert statistics.figures == GetFigures()
    statistics.count(found(3), 2_000_000)
    statistics.count(GetResult(GetStatus.OFFSET_OVERFLOW_ONE), 5_000_000)
    statistics.count(GetResult(GetStatus.NO_MESSAGE_IN_QUEUE), 1_000_000)
    size_bytes = found(1).messages[0].size_bytes
    assert statistics.figures == GetFigures(1, 2, 3, 3 * size_bytes, 5.0)


def test_threads_that_share_a_reader_lose_no_count():
    statistics = GetStatistics()

    def count_many():
        for _ in range(2000):
            statistics.count(GetResult(GetStatus.NO_MESSAGE_IN_QUEUE), 1)

    threads = [threading.Thread(target=count_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statistics.figures.missed == 8000


@pytest.mark.ci
def test_conditions_that_are_remembered_take_few_megabytes():
    """Clients choose them, and the longest ones take 2 MB each."""
    tracemalloc.start()
    try:
        for comparisons, number in [*itertools.product((2000,), range(20)), *itertools.product((280,), range(64))]:
            assert parse_condition(" OR ".join(["a=1"] * comparisons) + f" OR a={number}") is not None
        assert tracemalloc.get_traced_memory()[0] < 45 << 20
    finally:
        tracemalloc.stop()
