"""What this process is to the kernel: its command line, whose orphans it adopts, whose end ends it (csrc/process.cdef.h)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from pyengine._native import lib


def show_command(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Show these as this process's command line and environment in /proc, as if it had been started with them.

    OSError where the kernel does not let a process do that; then nothing has changed.
    """
    shown = _row(words)
    surrounding = _row(f"{name}={value}" for name, value in environment.items())
    _check(lib.ms_process_show_command(shown, len(shown), surrounding, len(surrounding)))


def adopt_orphans() -> None:
    """Become the parent of each descendant whose parent ends. OSError where that is refused."""
    _check(lib.ms_process_adopt_orphans())


def end_with_parent() -> None:
    """Be killed when the thread that forked this process ends. OSError where that is refused."""
    _check(lib.ms_process_end_with_parent())


def _row(texts: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(text) + b"\0" for text in texts)


def _check(code: int) -> None:
    if code:
        raise OSError(-code, os.strerror(-code))
