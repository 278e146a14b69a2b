"""How long to spin, from how long waking up takes on this machine (csrc/calibrate.cdef.h)."""

from __future__ import annotations

import os

from pyengine._native import lib

ROUNDS = 60
PERCENT = 90
SPIN_US_MIN = 60
SPIN_US_MAX = 150


def wake_up_us(rounds: int = ROUNDS, percent: int = PERCENT) -> float:
    """Time that `percent` of the wake-ups of a sleeper stay below, in us. OSError if it cannot be measured."""
    answer = lib.ms_calibrate_wake_ns(rounds, percent)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer / 1000


def spin_us(setting: int) -> tuple[int, int]:
    """(writer's, producers') spin for the setting: as given, or measured for -1 (auto).

    Auto: longer than a wake-up takes, since a shorter spin is the worst choice of all;
    0 where there is one CPU, where a spinner only keeps its partner from running.
    """
    if setting >= 0:
        return setting, setting
    if len(os.sched_getaffinity(0)) < 2:
        return 0, 0
    try:
        wake_us = wake_up_us()
    except OSError:
        wake_us = SPIN_US_MIN
    producer = round(min(SPIN_US_MAX, max(SPIN_US_MIN, 1.2 * wake_us)))
    return round(min(SPIN_US_MAX, 1.25 * producer)), producer
