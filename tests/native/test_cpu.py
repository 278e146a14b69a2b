"""Writer and flusher on one CPU: csrc/cpu, with masks of this thread alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from pyengine._native import ffi, lib

SECOND_NS = 1_000_000_000


@pytest.fixture
def allowed() -> Iterator[set[int]]:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two CPUs")
    yield before
    os.sched_setaffinity(0, before)


def new_affinity():
    affinity = ffi.new("struct ms_affinity *")
    lib.ms_affinity_begin(affinity)
    return affinity


def test_a_home_that_was_not_begun_binds_nothing(allowed):
    affinity = ffi.new("struct ms_affinity *")
    lib.ms_affinity_note(affinity, min(allowed), SECOND_NS)
    lib.ms_affinity_follow(affinity, max(allowed))
    assert os.sched_getaffinity(0) == allowed


def test_the_writer_stays_for_a_second_and_then_lets_the_scheduler_choose(allowed):
    affinity, now_ns = new_affinity(), 5 * SECOND_NS
    lib.ms_affinity_note(affinity, min(allowed), now_ns)
    assert os.sched_getaffinity(0) == {min(allowed)}
    lib.ms_affinity_note(affinity, min(allowed), now_ns + lib.MS_AFFINITY_NS - 1)
    assert os.sched_getaffinity(0) == {min(allowed)}
    lib.ms_affinity_note(affinity, min(allowed), now_ns + lib.MS_AFFINITY_NS)
    assert os.sched_getaffinity(0) == allowed
    lib.ms_affinity_note(affinity, max(allowed), now_ns + lib.MS_AFFINITY_NS + 1)
    assert os.sched_getaffinity(0) == {max(allowed)}


def test_the_flusher_is_where_the_writer_is(allowed):
    affinity = new_affinity()
    for cpu in (min(allowed), max(allowed), min(allowed)):
        lib.ms_affinity_follow(affinity, cpu)
        assert os.sched_getaffinity(0) == {cpu}


@pytest.mark.parametrize("cpu", [-1, 1 << 30])
def test_a_cpu_that_there_is_not_binds_nothing(allowed, cpu):
    lib.ms_affinity_follow(new_affinity(), cpu)
    assert os.sched_getaffinity(0) == allowed


def in_thread(work: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def test_a_mask_of_one_cpu_that_someone_else_has_set_is_kept(allowed):
    def work() -> None:
        os.sched_setaffinity(0, {max(allowed)})
        affinity = new_affinity()
        lib.ms_affinity_follow(affinity, min(allowed))
        assert os.sched_getaffinity(0) == {max(allowed)}
        lib.ms_affinity_note(affinity, max(allowed), SECOND_NS)
        lib.ms_affinity_note(affinity, max(allowed), 9 * SECOND_NS)
        assert os.sched_getaffinity(0) == {max(allowed)}

    in_thread(work)


def test_a_mask_that_was_changed_meanwhile_is_not_put_back(allowed):
    def work() -> None:
        affinity = new_affinity()
        lib.ms_affinity_note(affinity, min(allowed), SECOND_NS)
        os.sched_setaffinity(0, {max(allowed)})
        lib.ms_affinity_note(affinity, max(allowed), 9 * SECOND_NS)
        assert os.sched_getaffinity(0) == {max(allowed)}

    in_thread(work)
