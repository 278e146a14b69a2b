"""How long is spun: as given, measured, or not at all where a spinner takes a CPU from those who carry a put on."""

from __future__ import annotations

import os

import pytest

from pyengine.native import calibrate


@pytest.mark.parametrize("cpus, relayed, writer, producer", [
    (1, False, False, False), (2, False, True, True), (2, True, False, True), (3, True, False, True), (4, True, True, True)])
def test_auto_spins_where_there_are_processors_for_it(monkeypatch, cpus, relayed, writer, producer):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setattr(calibrate, "wake_up_us", lambda: 70.0)
    assert tuple(map(bool, calibrate.spin_us(-1, relayed=relayed))) == (writer, producer)


def test_a_given_spin_is_taken_as_it_is():
    assert calibrate.spin_us(0) == (0, 0)
    assert calibrate.spin_us(80, relayed=True) == (80, 80)
