"""A stream of work is told from single pieces; the times are given."""

from __future__ import annotations

import os
import time

import pytest

from pyengine._native import ffi, lib

CLOSE_NS: int = lib.MS_STREAM_CLOSE_NS
ROUNDS: int = lib.MS_STREAM_ROUNDS


@pytest.fixture(autouse=True)
def scheduled_as_before():
    yield
    stream(1, 1)  # outside a stream again, as this process was


def stream(gather_ns: int, quiet_ns: int):
    begun = ffi.new("struct ms_stream *")
    lib.ms_stream_begin(begun, gather_ns, quiet_ns)
    return begun


def is_behind() -> bool:
    """Whether this process is scheduled so that it interrupts no other."""
    return os.sched_getscheduler(0) == os.SCHED_BATCH


def pieces(begun, count: int, apart_ns: int, start_ns: int = 1_000_000_000) -> None:
    for number in range(count):
        lib.ms_stream_worked(begun, start_ns + number * apart_ns)


def test_single_pieces_are_no_stream_however_many():
    begun = stream(1000, 1000)
    pieces(begun, 10 * ROUNDS, CLOSE_NS)
    assert not begun.is_busy and not is_behind()


def test_pieces_close_together_are_a_stream_after_some_rounds():
    begun = stream(1000, 1000)
    pieces(begun, ROUNDS, CLOSE_NS - 1)
    assert not begun.is_busy and not is_behind()
    pieces(begun, ROUNDS + 1, CLOSE_NS - 1)
    assert begun.is_busy and is_behind()


def test_a_pause_ends_the_stream_and_the_next_one_has_to_show_itself_again():
    position = ffi.new("struct ms_position *", {"value": 7})
    begun = stream(1000, 1000)
    pieces(begun, ROUNDS + 1, 1)
    assert lib.ms_stream_wait(begun, position, 6, 0)
    assert begun.is_busy and is_behind()
    assert not lib.ms_stream_wait(begun, position, 7, 0)
    assert not begun.is_busy and not is_behind()
    assert not lib.ms_stream_wait(begun, position, 6, 0), "no stream: the latch is armed instead"
    pieces(begun, ROUNDS, 1, start_ns=2_000_000_000)
    assert not begun.is_busy


def test_work_is_gathered_unless_there_is_a_backlog():
    position = ffi.new("struct ms_position *", {"value": 7})
    gathers = stream(1_000_000, 1000)
    pieces(gathers, ROUNDS + 1, 1)
    began_ns = time.monotonic_ns()
    assert lib.ms_stream_wait(gathers, position, 6, 0)
    assert time.monotonic_ns() - began_ns >= 1_000_000, "a sleep is never shorter"
    never = stream(3_600_000_000_000, 1000)
    pieces(never, ROUNDS + 1, 1)
    assert lib.ms_stream_wait(never, position, 6, 1), "without the hour's sleep"
