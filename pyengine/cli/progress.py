"""Progress bars of long work: on stderr, and only when stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


@contextlib.contextmanager
def byte_bar(what: str, total_bytes: int | None) -> Iterator[Callable[[int, int | None], None]]:
    """A bar over bytes; the given function takes (bytes done, new total or None)."""
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from pyengine.cli.output import console

    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                  TransferSpeedColumn(), TimeRemainingColumn(), console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total_bytes)
        yield lambda done, total=None: bars.update(task, completed=done, **({} if total is None else {"total": total}))
