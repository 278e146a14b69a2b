"""A fault inside a guarded session is survived and told; any other fault is what it always was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from waiting import scaled_timeout_s

PREAMBLE = """
import mmap, os, signal, sys, tempfile
from pyengine._native import ffi
from pyengine.native import session

def object_of(pages):
    file = tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.posix_fallocate(file.fileno(), 0, pages * mmap.PAGESIZE)
    memory = mmap.mmap(file.fileno(), pages * mmap.PAGESIZE)
    memory[:] = b"x" * len(memory)
    return file, memory, ffi.from_buffer("uint8_t[]", memory, require_writable=True)

session.install_guard()
session.install_guard()
file, memory, pointer = object_of(4)
session.guard(7, pointer, len(memory))
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, timeout=scaled_timeout_s(60))


@pytest.mark.parametrize("touch", ["pointer[2 * mmap.PAGESIZE] == 0", "not pointer.__setitem__(3 * mmap.PAGESIZE + 5, 1)"])
def test_the_session_is_all_zeros_of_our_own_and_marked(touch):
    done = run(f"""
os.ftruncate(file.fileno(), mmap.PAGESIZE)
assert pointer[0] == ord("x") and not session.is_broken(7)
assert {touch}
assert session.is_broken(7) and not session.is_broken(6)
assert pointer[0] == 0, "the remaining part is not read either"
pointer[1] = 9
assert os.pread(file.fileno(), 2, 0) == b"xx", "and nothing of ours goes back"
session.guard(7, pointer, len(memory))
assert not session.is_broken(7)
""")
    assert done.returncode == 0, done.stderr


def test_two_sessions_break_one_by_one():
    done = run("""
file2, memory2, pointer2 = object_of(2)
session.guard(8, pointer2, len(memory2))
os.ftruncate(file.fileno(), 0)
os.ftruncate(file2.fileno(), 0)
assert pointer2[mmap.PAGESIZE] == 0
assert session.is_broken(8) and not session.is_broken(7)
assert pointer[0] == 0 and session.is_broken(7)
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", [
    pytest.param("other, memory2, pointer2 = object_of(1); os.ftruncate(other.fileno(), 0); pointer2[0]", id="other memory"),
    pytest.param("session.unguard(7); os.ftruncate(file.fileno(), 0); pointer[0]", id="no longer guarded"),
    pytest.param("os.kill(os.getpid(), signal.SIGBUS); signal.sigtimedwait([], 30)", id="sent"),
])
def test_any_other_bus_error_ends_the_process(fault):
    assert run(fault + "\nos._exit(3)\n").returncode == -signal.SIGBUS


def test_an_earlier_handler_of_bus_errors_is_still_called():
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c",
         PREAMBLE + "session.unguard(7); os.ftruncate(file.fileno(), 0); pointer[0]"],
        capture_output=True, text=True, timeout=scaled_timeout_s(60), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr
