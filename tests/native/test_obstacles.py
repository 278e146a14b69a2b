"""What a worker says is in its way: whole, or what a dead one left of it."""

from __future__ import annotations

import pytest

from pyengine._native import ffi
from pyengine.errors import EngineUnavailableError
from pyengine.native import control as native
from pyengine.native import obstacles


def test_each_worker_has_a_line_of_its_own():
    block = obstacles.private()
    obstacles.say(block, native.WRITER, "no room")
    obstacles.say(block, native.FLUSHER, "f" * 2000)
    assert obstacles.read(block, native.WRITER) == "no room"
    assert obstacles.read(block, native.FLUSHER) == "f" * (obstacles.TEXT_BYTES - 1)
    assert obstacles.read(block, native.REPUTTER) == ""
    obstacles.say(block, native.WRITER, "")
    assert obstacles.read(block, native.WRITER) == ""


def test_a_text_is_cut_between_characters():
    block = obstacles.private()
    obstacles.say(block, native.WRITER, "\u4e2d" * 400)
    assert obstacles.read(block, native.WRITER) == "\u4e2d" * ((obstacles.TEXT_BYTES - 1) // 3)


def test_who_died_while_writing_is_read_all_the_same_and_followed_by_a_successor():
    block = obstacles.private()
    obstacles.say(block, native.WRITER, "half of")
    block.worker[native.WRITER].changes += 1
    assert obstacles.read(block, native.WRITER) == "half of"
    obstacles.say(block, native.WRITER, "whole")
    assert obstacles.read(block, native.WRITER) == "whole" and block.worker[native.WRITER].changes % 2 == 0


def test_what_is_not_ours_is_refused_and_a_scribble_is_read_without_harm():
    block = obstacles.private()
    for at in range(ffi.sizeof(block.worker)):
        ffi.cast("uint8_t *", block.worker)[at] = 0xFF
    assert len(obstacles.read(block, native.WRITER)) == obstacles.TEXT_BYTES - 1
    with pytest.raises(EngineUnavailableError, match="too short"):
        obstacles.check(block, obstacles.OBSTACLES_BYTES - 1)
    block.layout_version += 1
    with pytest.raises(EngineUnavailableError, match="another layout"):
        obstacles.check(block, obstacles.OBSTACLES_BYTES)
    block.magic = 0
    with pytest.raises(EngineUnavailableError, match="not ours"):
        obstacles.check(block, obstacles.OBSTACLES_BYTES)
