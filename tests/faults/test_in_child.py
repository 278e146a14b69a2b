"""Whatever a check does, its caller gets a sentence or None."""

from __future__ import annotations

import ctypes
import os
import threading

from crash.in_child import in_child


def test_a_good_check_says_nothing_and_a_bad_one_its_sentence():
    assert in_child(lambda: None)() is None
    assert in_child(lambda word: f"bad {word}")("news") == "bad news"


def test_an_exception_a_crash_and_a_hang_become_sentences():
    assert "ValueError" in in_child(lambda: str(int("x")))()
    assert in_child(lambda: ctypes.string_at(0))() == "ended by signal 11"
    assert in_child(lambda: str(threading.Event().wait()), patience_s=0.2)() == "no answer within 0.2 s"


def test_nothing_stays_from_one_call_to_the_next():
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        in_child(lambda: "x" * 100_000)()
    assert set(os.listdir("/proc/self/fd")) == before
