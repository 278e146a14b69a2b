"""What a worker says is in its way: whole, or what a dead one left of it."""

from __future__ import annotations

import pytest

from pyengine._native import ffi
from pyengine.errors import EngineUnavailableError
from pyengine.native import blocked_reasons
from pyengine.native import control as native


def test_each_worker_has_a_line_of_its_own():
    block = blocked_reasons.private()
    blocked_reasons.write(block, native.WRITER, "no room")
    blocked_reasons.write(block, native.FLUSHER, "f" * 2000)
    assert blocked_reasons.read(block, native.WRITER) == "no room"
    assert blocked_reasons.read(block, native.FLUSHER) == "f" * (blocked_reasons.TEXT_BYTES - 1)
    assert blocked_reasons.read(block, native.REPUTTER) == ""
    blocked_reasons.write(block, native.WRITER, "")
    assert blocked_reasons.read(block, native.WRITER) == ""


def test_a_text_is_cut_between_characters():
    block = blocked_reasons.private()
    blocked_reasons.write(block, native.WRITER, "\u4e2d" * 400)
    assert blocked_reasons.read(block, native.WRITER) == "\u4e2d" * ((blocked_reasons.TEXT_BYTES - 1) // 3)


def test_who_died_while_writing_is_read_all_the_same_and_followed_by_a_successor():
    block = blocked_reasons.private()
    blocked_reasons.write(block, native.WRITER, "half of")
    block.worker[native.WRITER].changes += 1
    assert blocked_reasons.read(block, native.WRITER) == "half of"
    blocked_reasons.write(block, native.WRITER, "whole")
    assert blocked_reasons.read(block, native.WRITER) == "whole" and block.worker[native.WRITER].changes % 2 == 0


def test_what_is_not_ours_is_refused_and_a_scribble_is_read_without_harm():
    block = blocked_reasons.private()
    for at in range(ffi.sizeof(block.worker)):
        ffi.cast("uint8_t *", block.worker)[at] = 0xFF
    assert len(blocked_reasons.read(block, native.WRITER)) == blocked_reasons.TEXT_BYTES - 1
    with pytest.raises(EngineUnavailableError, match="too short"):
        blocked_reasons.check(block, blocked_reasons.BLOCKED_REASONS_BYTES - 1)
    block.layout_version += 1
    with pytest.raises(EngineUnavailableError, match="another layout"):
        blocked_reasons.check(block, blocked_reasons.BLOCKED_REASONS_BYTES)
    block.magic = 0
    with pytest.raises(EngineUnavailableError, match="wrong magic"):
        blocked_reasons.check(block, blocked_reasons.BLOCKED_REASONS_BYTES)
