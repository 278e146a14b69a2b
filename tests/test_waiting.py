"""Deadlines grow with the load of the machine, in one place."""

from __future__ import annotations

import os

import pytest

from waiting import SLOWDOWN_MAX, eventually, scaled_timeout_s


@pytest.mark.parametrize("load, factor", [(0.1, 1), (2, 1), (9, 4.5), (1000, SLOWDOWN_MAX)])
def test_a_deadline_is_as_many_times_longer_as_processes_wait_for_a_processor(monkeypatch, load, factor):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert scaled_timeout_s(10) == 10 * factor
    with pytest.raises(AssertionError, match=f"within {0.01 * factor:g} s"):
        eventually(lambda: False, "nothing", 0.01)


@pytest.mark.timeout(7)
def test_a_test_has_as_much_more_time(request):
    assert request.node.get_closest_marker("timeout").args[0] >= 7
