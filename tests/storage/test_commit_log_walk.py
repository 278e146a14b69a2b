"""A walk with two processors has the outcome of a walk with one, for any bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyengine.formats.record import encode_blank
from pyengine.native.scan import walk
from pyengine.storage import commit_log as walk_ahead
from pyengine.storage.commit_log import SegmentBytes, walk_pieces
from pyengine.storage.durable_writes import start_writeback
from record_bytes import encode_record

BASE = 1 << 40


def log(seed: int, records: int = 60) -> bytes:
    dice = random.Random(seed)
    data = bytearray()
    for number in range(records):
        data += encode_record(topic="T", body=dice.randbytes(dice.choice([0, 1, 20, 300])), properties="KEYS\x01k",
                              physical_offset=BASE + len(data), store_timestamp_ms=1_700_000_000_000 + number)
    return bytes(data + encode_blank(200) + bytes(192))


def joined(data: bytes, pieces: list[tuple[int, bool]], processors: int, **checks):
    results = list(walk_pieces(SegmentBytes(data, BASE), BASE, pieces, limit=BASE + len(data), processors=processors, **checks))
    return (results[-1].end_offset, results[-1].reason, sum(result.records for result in results),
            sum(result.messages for result in results),
            [-1, *(result.last_store_timestamp_ms for result in results if result.messages)][-1])


def pieces_of(data: bytes, step: int) -> list[tuple[int, bool]]:
    return [(min(BASE + at + step, BASE + len(data)), False) for at in range(0, len(data), step)]


@given(st.integers(0, 5), st.integers(40, 3000),
       st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=3), st.booleans())
def test_the_outcome_is_that_of_one_walk(seed, step, changes, check_crc):
    data = bytearray(log(seed))
    for at, value in changes:
        data[at % len(data)] = value
    whole = walk(data, BASE, BASE, BASE + len(data), check_crc=check_crc)
    expected = (whole.end_offset, whole.reason, whole.records, whole.messages, whole.last_store_timestamp_ms)
    for processors in (1, 2):
        assert joined(data, pieces_of(data, step), processors, check_crc=check_crc, check_offset=True) == expected


def test_a_body_that_looks_like_a_record_at_the_boundary_is_not_taken_for_one():
    boundary = BASE + 1000
    inner_at = boundary + 10
    inner = encode_record(topic="T", body=b"inner", physical_offset=inner_at, store_timestamp_ms=1)
    head = len(encode_record(topic="T", body=b"", physical_offset=BASE, store_timestamp_ms=1)) - len("T") - 3
    outer = encode_record(topic="T", body=bytes(inner_at - BASE - head) + inner + inner.replace(
        inner_at.to_bytes(8, "big"), (inner_at + len(inner)).to_bytes(8, "big")),
        physical_offset=BASE, store_timestamp_ms=1)
    assert outer.index(inner) == inner_at - BASE
    following = encode_record(topic="T", body=b"next", physical_offset=BASE + len(outer), store_timestamp_ms=2)
    data = outer + following + bytes(400)
    assert walk_ahead.sync(data, BASE, boundary, BASE + len(data)) == inner_at, "the guess is deceived"
    ahead = [(boundary, False), (BASE + len(data), False)]
    assert joined(data, ahead, 2, check_crc=True, check_offset=True)[:4] == (
        BASE + len(outer + following), "zeroes", 2, 2)


def test_pieces_are_walked_ahead_where_a_record_is_found(monkeypatch):
    data = log(1)
    guesses, real = [], walk_ahead.sync
    monkeypatch.setattr(walk_ahead, "sync", lambda *args, **kwargs: guesses.append(real(*args, **kwargs)) or guesses[-1])
    joined(data, pieces_of(data, 1000), 2, check_crc=True, check_offset=True)
    assert any(guess is not None for guess in guesses)
    guesses.clear()
    joined(data, pieces_of(data, 1000), 1, check_crc=True, check_offset=True)
    assert guesses == []


def test_without_a_thread_to_be_had_it_is_the_plain_walk(monkeypatch, tmp_path):
    """A limit on processes keeps no store from being recovered."""
    data = log(1)
    pieces = pieces_of(data, 1000)
    plain = joined(data, pieces, 1, check_crc=True, check_offset=True)

    def refuse(thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    assert joined(data, pieces, 2, check_crc=True, check_offset=True) == plain
    with start_writeback([tmp_path]):
        pass


def test_a_walk_given_up_leaves_nothing_that_reads_on():
    data = memoryview(bytearray(log(2)))
    results = walk_pieces(SegmentBytes(data, BASE), BASE, pieces_of(data, 700), limit=BASE + len(data), processors=2)
    next(results)
    results.close()
    data.release()  # BufferError if a thread still held it


@pytest.mark.parametrize("strict_from", [0, 3])
def test_each_piece_is_judged_by_its_own_rule(strict_from):
    spoiled = encode_record(topic="T", body=b"x", properties="KEYS\x01a\x00b", physical_offset=BASE, store_timestamp_ms=1)
    data = spoiled + encode_record(topic="T", body=b"y", physical_offset=BASE + len(spoiled), store_timestamp_ms=1)
    pieces = [(BASE + len(spoiled), strict_from == 0), (BASE + len(data), True)]
    reason = joined(data, pieces, 2, check_crc=True, check_offset=True)[1]
    assert reason == ("bad_text" if strict_from == 0 else "range_end")
