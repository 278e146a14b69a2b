"""Mounts that no other process sees, on loop devices that go with their last user (loop_device.py).

Everything is mounted in a namespace of its own, which ends with the last process in it, and a loop device is
detached by the kernel when nothing has it open or mounted: so nothing stays, however a run ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

from faults.loop_device import loop_device
from pyengine.cli.torture import wait_for

Given = ParamSpec("Given")
Result = TypeVar("Result")

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
TIMEOUT_S = 30.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


class MountError(OSError):
    """What mount(2) says of a file system."""


def own_mounts() -> None:
    """From now on this process and its children mount for themselves alone."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def with_own_mounts(function: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs) -> Result:
    """Return the result of `function`, or raise its error; it runs in a forked child with mounts of its own.

    The child ends, in order, when no process waits for it any more: a test's timeout, Ctrl-C, this process's end.
    """
    forking = multiprocessing.get_context("fork")
    answer, its = forking.Pipe(duplex=False)
    child = forking.Process(target=_serve, args=(its, os.getpid(), function, arguments, named))
    child.start()
    its.close()
    try:
        is_error, value = answer.recv()
    except BaseException as error:
        child.terminate()
        _end(child)
        if isinstance(error, EOFError):
            raise RuntimeError(f"the child with its own mounts ended with {child.exitcode}") from None
        raise
    finally:
        answer.close()
    _end(child)
    if is_error:
        raise value
    return value


def _end(child: multiprocessing.process.BaseProcess) -> None:
    child.join(TIMEOUT_S)
    if child.exitcode is None:
        child.kill()
        child.join()


def _serve(line: Connection, parent: int, function: Callable, arguments: tuple, named: Mapping[str, object]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return
    try:
        own_mounts()
        line.send((False, function(*arguments, **named)))
    except KeyboardInterrupt:
        sys.exit(1)
    except BaseException as error:
        told = "".join(traceback.format_exception(error))
        error.add_note(told)
        try:
            line.send((True, error))
        except Exception:  # not every exception can be sent
            line.send((True, RuntimeError(told)))


def _interrupt(*_: object) -> None:
    """The first signal ends a run; another one must not end its clean-up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def mount(descriptor: int, folder: Path, kind: str) -> Iterator[None]:
    """Mount the file system in that file on `folder` for this block; MountError if it cannot be mounted.

    However the block ends: an interrupt within mount(2) is seen after it.
    """
    try:
        with loop_device(descriptor) as device:
            try:
                _call("mount", device.encode(), os.fsencode(folder), kind.encode(), 0, b"")
            except OSError as error:
                raise MountError(*error.args) from None
        yield
    except BaseException:
        detach(folder)
        raise
    unmount(folder)


def unmount(folder: Path) -> None:
    """Waits for its last user; HangError if one stays."""
    try:
        wait_for(f"{folder} is left", lambda: _libc.umount2(os.fsencode(folder), 0) == 0, TIMEOUT_S)
    except BaseException:
        detach(folder)
        raise


def detach(folder: Path) -> None:
    """Unmounts: the path is free at once, the file system goes with its last user."""
    _libc.umount2(os.fsencode(folder), MNT_DETACH)


def mounted_below(folder: Path) -> list[Path]:
    """Return what is mounted in it, the last mounted first."""
    places = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        name = re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split()[4])
        places.append(Path(os.fsdecode(name)))
    return [place for place in reversed(places) if folder.resolve() in place.parents]


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
