"""Whatever a check does, its caller gets a sentence or None."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import threading
from contextlib import closing

from in_child import InChild, Unjudged


def crash() -> None:
    faulthandler.disable()  # or a passing run would contain its report
    ctypes.string_at(0)


def test_a_good_check_says_nothing_and_a_bad_one_its_sentence():
    assert InChild(lambda: None)() is None
    bad = InChild(lambda word: f"bad {word}")("news")
    assert bad == "bad news" and not isinstance(bad, Unjudged)


def test_an_exception_a_crash_and_a_hang_become_sentences_that_are_no_judgement():
    told = [InChild(lambda: str(int("x")))(), InChild(crash)(),
            InChild(lambda: str(threading.Event().wait()), timeout_s=0.2)()]
    assert "ValueError" in told[0] and told[1:] == ["ended by signal 11", "no answer within 0.2 s"]
    assert all(isinstance(sentence, Unjudged) for sentence in told)


def test_one_child_serves_so_many_calls_and_a_crash_ends_only_its_own():
    with closing(InChild(lambda word: os.kill(os.getpid(), 9) if word == "dies" else str(os.getpid()), calls=3)) as check:
        first, second = check("first"), check("second")
        assert first == second != str(os.getpid())
        assert check("dies") == "ended by signal 9"
        third = [check("next") for _ in range(4)]
    assert third[0] == third[1] == third[2] != third[3] and first not in third


def test_calls_in_a_child_leave_no_open_file_descriptors():
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        InChild(lambda: "x" * 100_000)()
    assert set(os.listdir("/proc/self/fd")) == before
