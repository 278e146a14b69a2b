"""Loop devices that go with their last user. The standard library alone: tests/needs.py asks whether there are any."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

LOOP_MAJOR = 7
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
_LOOP_CONFIG = struct.Struct("=II52xI176x64x")  # descriptor, block size; flags of its loop_info64; reserved


@contextmanager
def loop_device(descriptor: int) -> Iterator[str]:
    """Path of a device over that file; detached with the end of the block or of what is mounted from it, the later one.

    OSError where there is none to be had, with Linux before 5.8 too.
    """
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        device = _attach(control, descriptor)
    with device:
        yield device.name


def attached_files() -> list[str]:
    """Names of the files that loop devices have now, of all processes."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # it has just been released
            found.append(path.read_text().strip())
    return found


def _attach(control: BinaryIO, descriptor: int) -> BinaryIO:
    while True:
        number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
        path = f"/dev/loop{number}"
        try:
            device = open(path, "rb+", buffering=0)
        except FileNotFoundError:  # nothing makes the nodes of new devices, as in containers
            with contextlib.suppress(FileExistsError):
                os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(LOOP_MAJOR, number))
            continue
        except OSError as error:
            if error.errno == errno.ENXIO:  # it has just been released
                continue
            raise
        try:
            fcntl.ioctl(device, LOOP_CONFIGURE, _LOOP_CONFIG.pack(descriptor, 0, LO_FLAGS_AUTOCLEAR))
            return device
        except BaseException as error:
            device.close()
            if not isinstance(error, OSError) or error.errno != errno.EBUSY:  # that: another process has just taken it
                raise
