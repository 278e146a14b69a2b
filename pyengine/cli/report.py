"""`pyengine report`: a page that draws rates, sizes, topics, hours and lags of a store."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.cli.report_page import DRAWN, page
from pyengine.cli.spark_session import level_option, master_option, size_options, spark_session
from pyengine.errors import DiskError, UsageError


@click.command()
@store_command
@click.option("--html", "file", type=click.Path(path_type=Path), required=True, help="The file to write; replaced if it is there.")
@click.option("--top", type=click.IntRange(min=1), default=25, show_default=True,
              help="How many topics and groups have a row of their own; the others share one.")
@master_option
@level_option
def report(
    store: Path, settings: dict[str, str], as_json: bool, file: Path, top: int, master: str | None, level: str | None,
) -> None:
    """Draw a store as a page: message rates, sizes, topics, hours of the day, and how far groups lag behind.

    The page is one file that loads nothing else. The log is read once, as by `stats`, with
    Spark on all processors of this host or of a cluster; a running engine is not disturbed.
    Needs Java 17 or later and the extra `spark` (pip install '.[spark]').

    \b
    Examples:
      pyengine report STORE --html report.html
      pyengine report STORE --html report.html --top 100 --json
    """
    from pyengine.cli.report_figures import collect

    root = existing_store(store)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: give a file in a folder that exists")
    options = size_options(root, settings)
    begun_s = time.monotonic()
    with spark_session("pyengine report", master) as spark, byte_bar("counting", None) as show:
        figures = collect(spark, root, options, settings, level=level or "flushed", drawn=DRAWN, progress=show)
    _write(file, page(figures, top))
    seconds = time.monotonic() - begun_s
    total = figures.total
    if as_json:
        output.write_json({"file": str(file), "messages": total.messages, "bytes": total.bytes, "seconds": seconds,
                           "topics": [asdict(topic) for topic in figures.topics],
                           "groups": [asdict(group) for group in figures.groups]})
        return
    print(f"{total.messages:,} messages of {len(figures.topics):,} topics ({output.size_text(total.bytes)}) in {seconds:.1f} s: "
          f"{output.printable(str(file))}")


def _write(file: Path, text: str) -> None:
    """The file that a link leads to, whole or not at all; into a device or a pipe it is written."""
    target = Path(os.path.realpath(file))
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if file.exists() and not file.is_file():
            file.write_text(text, encoding="utf-8")
            return
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise DiskError(f"cannot write {file}: {error.strerror}", errno=error.errno or 0, path=str(file)) from error
