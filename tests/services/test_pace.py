"""A stream of work is told from single pieces; a fake clock gives the times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pyengine._native import ffi
from pyengine.services import pace
from pyengine.services.pace import CLOSE_NS, STREAM_ROUNDS, Pace


@pytest.fixture
def scheduled(monkeypatch):
    said = []
    monkeypatch.setattr(pace, "cpu", SimpleNamespace(be_prompt=lambda: said.append("prompt"),
                                                     step_behind=lambda: said.append("behind")))
    return said


def _pieces(paces: Pace, count: int, apart_ns: int, start_ns: int = 1_000_000_000) -> None:
    for number in range(count):
        paces.worked(start_ns + number * apart_ns)


def test_single_pieces_are_no_stream_however_many(scheduled):
    paces = Pace(1000, 1000)
    _pieces(paces, 10 * STREAM_ROUNDS, CLOSE_NS)
    assert not paces.busy and scheduled == ["prompt"]


def test_pieces_close_together_are_a_stream_after_some_rounds(scheduled):
    paces = Pace(1000, 1000)
    _pieces(paces, STREAM_ROUNDS, CLOSE_NS - 1)
    assert not paces.busy
    _pieces(paces, STREAM_ROUNDS + 1, CLOSE_NS - 1)
    assert paces.busy and scheduled == ["prompt", "behind"]


def test_a_pause_ends_the_stream_and_the_next_one_has_to_show_itself_again(scheduled):
    position = ffi.new("struct ms_position *", {"value": 7})
    paces = Pace(1000, 1000)
    _pieces(paces, STREAM_ROUNDS + 1, 1)
    assert paces.next_is_there(position[0], 6)
    assert not paces.next_is_there(position[0], 7)
    assert not paces.busy and scheduled == ["prompt", "behind", "prompt"]
    assert not paces.next_is_there(position[0], 6), "calm: the latch is armed instead"
    _pieces(paces, STREAM_ROUNDS, 1, start_ns=2_000_000_000)
    assert not paces.busy


def test_who_is_behind_does_not_gather(scheduled, monkeypatch):
    naps = []
    monkeypatch.setattr(pace.nap, "once", naps.append)
    position = ffi.new("struct ms_position *", {"value": 7})
    paces = Pace(5, 1000)
    _pieces(paces, STREAM_ROUNDS + 1, 1)
    assert paces.next_is_there(position[0], 6, behind=True) and naps == []
    assert paces.next_is_there(position[0], 6) and naps == [5]
