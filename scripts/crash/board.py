"""A failpoint that processes share (pyengine.native.failpoints): they find its file by PYENGINE_FAILPOINT=path."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from pyengine._native import ffi, lib
from pyengine.errors import UsageError
from pyengine.native.failpoints import FILE_BYTES, arm, use

_MAGIC = b"pyengine failpoint\n"  # the last bytes of the file


class Board:
    """One failpoint in a file, which can be armed again while the processes run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Create the file if it does not exist; UsageError for an existing file with other content, which stays as it is."""
        self.path = Path(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == 0:
                os.pwrite(descriptor, _MAGIC, FILE_BYTES - len(_MAGIC))  # gives it its size too, also while another process does so
            elif status.st_size != FILE_BYTES or os.pread(descriptor, len(_MAGIC), FILE_BYTES - len(_MAGIC)) != _MAGIC:
                raise UsageError(f"{path} is not a file of a failpoint: name one that is not there")
            self._mapping = mmap.mmap(descriptor, FILE_BYTES)
        finally:
            os.close(descriptor)
        self._point = ffi.cast("struct ms_failpoint *", ffi.from_buffer(self._mapping))

    def arm(self, name: str, nth: int = 1, action: str = "kill", process: str = "") -> None:
        """Arm the failpoint: the nth time that a process of that kind reaches the step, it is killed or stopped."""
        self.disarm()
        arm(self._point, name, nth, action, process)

    def disarm(self) -> None:
        """Disarm the failpoint."""
        lib.ms_store_u32(ffi.addressof(self._point, "state"), lib.MS_FAILPOINT_IDLE)

    @property
    def is_armed(self) -> bool:
        """Return whether the failpoint is armed and has struck no process yet."""
        return lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_ARMED

    @property
    def struck_pid(self) -> int:
        """Return the process that was struck since the failpoint was armed, 0 if none was."""
        struck = lib.ms_load_u32(ffi.addressof(self._point, "state")) == lib.MS_FAILPOINT_STRUCK
        return self._point.pid if struck else 0

    def use(self, process: str) -> None:
        """Attach this process to the board, as one of the kind `process`."""
        use(self._point, process, self)
