"""The table of queues: its count, and the copy to a larger table."""

from __future__ import annotations

import mmap

import pytest

from fix_writer_rig import queue_entries
from pyengine.errors import DiskFullError
from pyengine.native.writer import (
    copy_queue_table,
    format_queue_table,
    get_queue_offset,
    queue_table_bytes,
    set_queue_offset,
    view_queue_table,
)

SLOTS = 64


KEPT: list[mmap.mmap] = []  # the memory of a view has to outlive it


def table(slots: int):
    KEPT.append(mmap.mmap(-1, queue_table_bytes(slots)))
    made = view_queue_table(KEPT[-1])
    format_queue_table(made, slots, 1)
    return made


def full(slots: int):
    """A table whose last slot is taken too, and what is in it."""
    made, offsets = table(slots), {}
    with pytest.raises(DiskFullError):
        for number in range(slots + 1):
            set_queue_offset(made, f"topic{number}", number % 4, 10 + number)
            offsets[f"topic{number}", number % 4] = 10 + number
    return made, offsets


def test_each_queue_is_counted_once_and_a_full_table_says_so():
    made, offsets = full(SLOTS)
    assert made.used == len(offsets) < SLOTS
    set_queue_offset(made, "topic0", 0, 99)
    assert made.used == len(offsets) and get_queue_offset(made, "topic0", 0) == 99


def test_a_larger_table_gets_every_slot():
    made, offsets = full(SLOTS)
    last = made.slot[SLOTS - 1]
    if not last.key_bytes:  # no name hashed to the last slot: move another one there
        full_slot = next(number for number in range(SLOTS) if made.slot[number].key_bytes)
        last[0] = made.slot[full_slot]
        made.slot[full_slot].key_bytes = 0
    larger = table(2 * SLOTS)
    copy_queue_table(larger, made)
    assert {(topic, queue_id): offset for topic, queue_id, offset in queue_entries(larger)} == offsets
    assert larger.used == len(offsets)
