"""A stream of work is told from single pieces; a fake clock gives the times."""

from __future__ import annotations

import pytest

from pyengine._native import ffi
from pyengine.services import service
from pyengine.services.service import CLOSE_NS, STREAM_ROUNDS, StreamDetector


@pytest.fixture
def scheduled(monkeypatch):
    said = []
    monkeypatch.setattr(service.waiting, "schedule_interactive", lambda: said.append("prompt"))
    monkeypatch.setattr(service.waiting, "schedule_batch", lambda: said.append("behind"))
    return said


def _pieces(detector: StreamDetector, count: int, apart_ns: int, start_ns: int = 1_000_000_000) -> None:
    for number in range(count):
        detector.worked(start_ns + number * apart_ns)


def test_single_pieces_are_no_stream_however_many(scheduled):
    detector = StreamDetector(1000, 1000)
    _pieces(detector, 10 * STREAM_ROUNDS, CLOSE_NS)
    assert not detector.busy and scheduled == ["prompt"]


def test_pieces_close_together_are_a_stream_after_some_rounds(scheduled):
    detector = StreamDetector(1000, 1000)
    _pieces(detector, STREAM_ROUNDS, CLOSE_NS - 1)
    assert not detector.busy
    _pieces(detector, STREAM_ROUNDS + 1, CLOSE_NS - 1)
    assert detector.busy and scheduled == ["prompt", "behind"]


def test_a_pause_ends_the_stream_and_the_next_one_has_to_show_itself_again(scheduled):
    position = ffi.new("struct ms_position *", {"value": 7})
    detector = StreamDetector(1000, 1000)
    _pieces(detector, STREAM_ROUNDS + 1, 1)
    assert detector.wait_for_next(position[0], 6)
    assert not detector.wait_for_next(position[0], 7)
    assert not detector.busy and scheduled == ["prompt", "behind", "prompt"]
    assert not detector.wait_for_next(position[0], 6), "calm: the latch is armed instead"
    _pieces(detector, STREAM_ROUNDS, 1, start_ns=2_000_000_000)
    assert not detector.busy


def test_who_is_behind_does_not_gather(scheduled, monkeypatch):
    naps = []
    monkeypatch.setattr(service.waiting, "sleep", naps.append)
    position = ffi.new("struct ms_position *", {"value": 7})
    detector = StreamDetector(5, 1000)
    _pieces(detector, STREAM_ROUNDS + 1, 1)
    assert detector.wait_for_next(position[0], 6, has_backlog=True) and naps == []
    assert detector.wait_for_next(position[0], 6) and naps == [5]
