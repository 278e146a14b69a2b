"""Another process that owns a store as RocketMQ does: an exclusive POSIX record lock on byte 0 of `lock`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held_by_a_broker(root: Path) -> Iterator[int]:
    """The store's `lock`, which must exist, is held inside the block; the pid of the holder."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(root / "lock")], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"locked\n"
        yield child.pid
    finally:
        child.communicate()
