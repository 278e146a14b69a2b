"""The count of producers falls by itself when they are killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from pyengine.ipc import attach_count

PRODUCER = """
import sys
from pyengine.ipc import attach_count
assert attach_count.join(int(sys.argv[1]))
print("joined", flush=True)
if sys.stdin.read(1) == "l":
    attach_count.leave(int(sys.argv[1]))
    print("left", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def semaphore():
    made = attach_count.make()
    assert made != attach_count.NONE
    yield made
    attach_count.remove(made)


def producer(semaphore):
    child = subprocess.Popen([sys.executable, "-c", PRODUCER, str(semaphore)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "joined\n"
    return child


def test_joined_left_ended_and_killed(semaphore):
    assert attach_count.count(semaphore) == 0
    first, second, third = producer(semaphore), producer(semaphore), producer(semaphore)
    assert attach_count.count(semaphore) == 3
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=30)
    assert attach_count.count(semaphore) == 2
    second.stdin.write("l")
    second.stdin.flush()
    assert second.stdout.readline() == "left\n"
    assert attach_count.count(semaphore) == 1
    for child in (first, second, third):
        child.communicate(timeout=30)
    assert attach_count.count(semaphore) == 0, "leaving twice (by hand and by the kernel) counts once"


def test_a_count_that_is_gone_is_none_and_harmless(semaphore):
    attach_count.remove(semaphore)
    assert attach_count.count(semaphore) is None
    assert not attach_count.join(semaphore)
    attach_count.leave(semaphore)
    attach_count.remove(semaphore)
    assert attach_count.count(attach_count.NONE) is None
