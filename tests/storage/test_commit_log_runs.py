"""Runs: every whole record once, and every damage between them, however the passes are cut."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import astuple
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import flip
from pyengine.errors import CorruptionError
from pyengine.formats.constants import SYS_FLAG_TRANSACTION_MASK
from pyengine.formats.consume_queue import NOT_QUEUED
from pyengine.formats.paths import segment_name
from pyengine.formats.record import MAGIC_AT, SYS_FLAG_AT, CaseLabel, encode_blank, total_size
from pyengine.native.dispatch import touched_queues
from pyengine.native.scan import sync
from pyengine.storage.commit_log import Log, LogDamage, LogRun, SegmentBytes, next_record, refuse_damage, runs_of
from pyengine.storage.mapped_file import MappedFile
from record_bytes import classify, encode_record

BASE = 1 << 40


def records(dice: random.Random, base: int, count: int) -> bytes:
    data = bytearray()
    for number in range(count):
        data += encode_record(topic="T", body=dice.randbytes(dice.choice([0, 1, 20, 300])), properties="KEYS\x01k",
                              physical_offset=base + len(data), store_timestamp_ms=1_700_000_000_000 + number)
    return bytes(data)


def segment(seed: int) -> bytes:
    dice = random.Random(seed)
    return records(dice, BASE, 40) + dice.choice([b"", encode_blank(200) + bytes(192), bytes(300)])


def one_by_one(data: bytes, base: int, end: int, *, check_offset: bool = True) -> list[tuple[int, int, str]]:
    """What runs_of() yields, record by record: (start, end, "" for records or else the reason of the damage)."""
    found, at = [], base
    while at < end:
        label = classify(data, at - base, len(data) - (at - base), at if check_offset else None, check_crc=False)
        if label is CaseLabel.MESSAGE:
            found.append((at, at + total_size(data, at - base), ""))
        elif label in (CaseLabel.BLANK, CaseLabel.RANGE_END):
            break
        else:
            following = sync(data, base, at + 1, end, limit=base + len(data)) if at + 1 < end else None
            found.append((at, end if following is None else following, str(label)))
        at = found[-1][1]
    return found


def joined(pieces: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The pieces, neighbouring records as one; damage stays apart."""
    found: list[tuple[int, int, str]] = []
    for reason, group in groupby(pieces, key=lambda piece: piece[2]):
        parts = list(group)
        found += parts if reason else [(parts[0][0], parts[-1][1], "")]
    return found


def walked(pieces: Iterable[LogRun | LogDamage]) -> list[tuple[int, int, str]]:
    found = []
    for piece in pieces:
        if isinstance(piece, LogDamage):
            found.append(astuple(piece))
        elif piece.walk(check_crc=False).messages:
            found.append((piece.start, piece.reached, ""))
    return joined(found)


def damaged(seed: int, changes: list[tuple[int, int]]) -> bytes:
    data = bytearray(segment(seed))
    for at, value in changes:
        data[at % len(data)] = value
    return bytes(data)


CHANGES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 255)), max_size=4)


@given(st.integers(0, 8), CHANGES, st.none() | st.integers(1, 3000), st.integers(0, 400))
def test_runs_and_damage_are_those_of_a_look_at_each_record(seed, changes, slice_bytes, left_out):
    data = damaged(seed, changes)
    end = BASE + len(data) - left_out
    expected = joined(one_by_one(data, BASE, end))
    assert walked(runs_of(SegmentBytes(data, BASE), BASE, end, BASE + len(data), next_record, slice_bytes)) == expected
    first = next((number for number, piece in enumerate(expected) if piece[2]), len(expected))
    until = expected[: first + 1]
    if first < len(expected):
        until[-1] = (until[-1][0], end, until[-1][2])  # nobody has looked for the next record
    assert walked(runs_of(SegmentBytes(data, BASE), BASE, end, BASE + len(data), None, slice_bytes)) == until


@given(st.integers(0, 8), CHANGES, st.none() | st.integers(1, 3000))
def test_a_pass_that_may_read_no_further_than_its_run_gets_the_same_records(seed, changes, slice_bytes):
    """touched_queues() has no limit beyond the range, so that a record across the end of a slice is tried again, and checks no offset."""
    data, counts = damaged(seed, changes), []
    end = BASE + len(data)
    for piece in runs_of(SegmentBytes(data, BASE), BASE, end, end, next_record, slice_bytes):
        if isinstance(piece, LogRun):
            touched = touched_queues(data, BASE, piece.start, piece.end)
            piece.stopped(touched.reached, touched.reason)
            counts += [queue.count for queue in touched.queues]
    flags = [data[start - BASE + SYS_FLAG_AT + 3] for start, _, reason in one_by_one(data, BASE, end, check_offset=False) if not reason]
    assert sum(counts) == sum(flag & SYS_FLAG_TRANSACTION_MASK not in NOT_QUEUED for flag in flags)


def test_damage_may_be_refused():
    data = bytearray(segment(1))
    data[4] = 0
    with pytest.raises(CorruptionError, match=f"the log is damaged at {BASE}: foreign"):
        walked(runs_of(SegmentBytes(bytes(data), BASE), BASE, BASE + len(data), BASE + len(data), refuse_damage))


SEGMENT_BYTES = 4096


def log_in(folder: Path) -> tuple[Log, list[list[int]]]:
    """A log of three full segments; and where the records of each begin, and the last one ends."""
    segments, places = [], []
    for number in range(3):
        base = number * SEGMENT_BYTES
        content, begins = b"", [base]
        while len(content) < 3500:
            content += encode_record(topic="T", body=bytes(150), physical_offset=base + len(content))
            begins.append(base + len(content))
        path = folder / segment_name(base)
        path.write_bytes((content + encode_blank(SEGMENT_BYTES - len(content))).ljust(SEGMENT_BYTES, b"\0"))
        segments.append(MappedFile(path, base))
        places.append(begins)
    return Log(segments, SEGMENT_BYTES, None), places


@pytest.mark.parametrize("slice_bytes", [None, 100, 5000])
def test_a_log_goes_on_in_the_next_segment_after_a_blank_and_after_damage(tmp_path, slice_bytes):
    log, (one, two, three) = log_in(tmp_path)
    flip(log.segments[1].path, MAGIC_AT)
    pieces = [(one[0], one[-1], ""), (two[0], two[1], "foreign"), (two[1], two[-1], ""), (three[0], three[-1], "")]
    assert walked(log.runs(0, 3 * SEGMENT_BYTES, next_record, slice_bytes)) == joined(pieces)
    assert walked(log.runs(0, 3 * SEGMENT_BYTES, None, slice_bytes)) == [pieces[0], (two[0], three[0], "foreign")]
    assert walked(log.runs(two[1], three[1], next_record, slice_bytes)) == joined([pieces[2], (three[0], three[1], "")])
