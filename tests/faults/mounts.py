"""Mounts that nobody else sees, and loop devices that go with their last user.

Everything is mounted in a namespace of its own, which ends with the last process in it, and a loop device is
detached by the kernel when nothing has it open or mounted: so nothing stays, however a run ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from crash.watch import HangError, wait_for

Given = ParamSpec("Given")
Result = TypeVar("Result")

CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18
MNT_DETACH = 2
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")  # descriptor, block size; flags of its loop_info64; reserved

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def own_mounts() -> None:
    """From now on this process and its children mount for themselves alone."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def with_own_mounts(function: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs) -> Result:
    """What `function` gives, called in a forked child that mounts for itself alone."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max_workers=1, mp_context=forking, initializer=own_mounts) as child:
        return child.submit(function, *arguments, **named).result()


@contextmanager
def loop_device(descriptor: int) -> Iterator[str]:
    """Path of a device over that file; detached with the end of the block or of what is mounted from it, the later one."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        path, device = _attach(control, descriptor)
    finally:
        os.close(control)
    try:
        yield path
    finally:
        os.close(device)


def _attach(control: int, descriptor: int) -> tuple[str, int]:
    while True:
        path = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
        try:
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:  # somebody has just let it go
                continue
            raise
        try:
            fcntl.ioctl(device, LOOP_CONFIGURE, _LOOP_CONFIG.pack(descriptor, 0, LO_FLAGS_AUTOCLEAR))
            return path, device
        except OSError as error:
            os.close(device)
            if error.errno != errno.EBUSY:  # somebody else has just taken it
                raise


def mount(descriptor: int, folder: Path, kind: str) -> AbstractContextManager[None]:
    """Mounts the file system in that file on `folder`, at once and until the end of the block; OSError if it cannot be."""
    with loop_device(descriptor) as device:
        _call("mount", device.encode(), os.fsencode(folder), kind.encode(), 0, b"")
    return _until_unmounted(folder)


@contextmanager
def _until_unmounted(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        detach(folder)
        raise
    unmount(folder)


def unmount(folder: Path) -> None:
    """Waits for its last user; HangError if somebody stays."""
    try:
        wait_for(f"{folder} is left", lambda: _libc.umount2(os.fsencode(folder), 0) == 0)
    except HangError:
        detach(folder)
        raise


def detach(folder: Path) -> None:
    """Unmounts, at once for whoever looks and in truth with its last user."""
    _libc.umount2(os.fsencode(folder), MNT_DETACH)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
