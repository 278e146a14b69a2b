"""The blocked reasons of workers: complete ones, and what a dead worker has left."""

from __future__ import annotations

import pytest

from pyengine._native import ffi
from pyengine.errors import EngineUnavailableError
from pyengine.native import control as native


def test_each_worker_has_a_line_of_its_own():
    block = native.private_blocked_reasons()
    native.write_blocked_reason(block, native.WRITER, "no room")
    native.write_blocked_reason(block, native.FLUSHER, "f" * 2000)
    assert native.read_blocked_reason(block, native.WRITER) == "no room"
    assert native.read_blocked_reason(block, native.FLUSHER) == "f" * (native.BLOCKED_REASON_BYTES - 1)
    assert native.read_blocked_reason(block, native.REPUTTER) == ""
    native.write_blocked_reason(block, native.WRITER, "")
    assert native.read_blocked_reason(block, native.WRITER) == ""


def test_a_text_is_cut_between_characters():
    block = native.private_blocked_reasons()
    native.write_blocked_reason(block, native.WRITER, "\u4e2d" * 400)
    assert native.read_blocked_reason(block, native.WRITER) == "\u4e2d" * ((native.BLOCKED_REASON_BYTES - 1) // 3)


def test_the_reason_of_a_worker_that_died_while_writing_can_be_read_and_replaced():
    block = native.private_blocked_reasons()
    native.write_blocked_reason(block, native.WRITER, "half of")
    block.worker[native.WRITER].changes += 1
    assert native.read_blocked_reason(block, native.WRITER) == "half of"
    native.write_blocked_reason(block, native.WRITER, "whole")
    assert native.read_blocked_reason(block, native.WRITER) == "whole" and block.worker[native.WRITER].changes % 2 == 0


def test_another_object_is_refused_and_overwritten_bytes_are_read_safely():
    block = native.private_blocked_reasons()
    native.publish_blocked_reasons(block)
    native.check_blocked_reasons(block, native.BLOCKED_REASONS_BYTES)
    for at in range(ffi.sizeof(block.worker)):
        ffi.cast("uint8_t *", block.worker)[at] = 0xFF
    assert len(native.read_blocked_reason(block, native.WRITER)) == native.BLOCKED_REASON_BYTES - 1
    with pytest.raises(EngineUnavailableError, match="too short"):
        native.check_blocked_reasons(block, native.BLOCKED_REASONS_BYTES - 1)
    block.layout_version += 1
    with pytest.raises(EngineUnavailableError, match="another layout"):
        native.check_blocked_reasons(block, native.BLOCKED_REASONS_BYTES)
    block.magic = 0
    with pytest.raises(EngineUnavailableError, match="wrong magic"):
        native.check_blocked_reasons(block, native.BLOCKED_REASONS_BYTES)
