"""What commands print on stdout: tables for people, one JSON document for programs.

Text that comes out of a store is printed with its control characters escaped: a
message body must not steer the terminal of whoever reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from pyengine.errors import ExitCode

WIDTH_WITHOUT_TERMINAL = 10_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def write_json(document: Any) -> None:
    """One document and a newline; plain ASCII where stdout cannot carry more."""
    sys.stdout.write(json_text(document) + "\n")


def print_report(report: Any, as_json: bool, show: Callable[[Any], None]) -> ExitCode:
    """The report of a command that repairs, for programs or people; what it refused on stderr too. Its exit code."""
    if as_json:
        write_json(report.to_dict())
    else:
        show(report)
    if report.exit_code is ExitCode.CORRUPTION:
        print(f"error: {report.sentence}", file=sys.stderr)
    return report.exit_code


def json_text(document: Any) -> str:
    """The document on one line."""
    return json.dumps(document, ensure_ascii=not _stdout_is_utf8(), default=_plain)


def _stdout_is_utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def _plain(value: object) -> object:
    """What json does not know: bytes as hex, enums by name, paths and the rest as text."""
    import enum

    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return str(value)


def console(stderr: bool = False):
    """A rich console for tables: as wide as the terminal, or wide enough when there is none."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None) -> None:
    """A table; a column whose every cell is a number is set to the right, with thousands marked."""
    from rich import box
    from rich.table import Table

    cells = [list(row) for row in rows]
    numeric = [bool(cells) and all(_is_number(row[at]) for row in cells) for at in range(len(columns))]
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False)
    for name, right in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(_cell(value) for value in row))
    console().print(table)


def write_facts(facts: Iterable[tuple[str, object]], title: str | None = None) -> None:
    """Names and values, one pair to a line."""
    pairs = [(name, _cell(value)) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    if title:
        print(title)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    return printable(str(value))


def printable(text: str) -> str:
    """`text` with control and other unprintable characters escaped, so that it cannot steer a terminal."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def body_text(body: bytes, most: int | None = None) -> str:
    """A body for the eye: its text if it is UTF-8, else with bytes escaped; cut after `most` characters."""
    text = printable(body.decode("utf-8", errors="backslashreplace"))
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def number_text(value: float | None) -> str:
    """Three figures that matter: 12,345, 3.8, 0.00712; 0 below 0.0005; - for none."""
    if value is None:
        return "-"
    if abs(value) < 0.0005:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size_text(size_bytes: float) -> str:
    """1536 -> 1.5 KiB."""
    step = 0
    while abs(size_bytes) >= 1024 and step < len(_UNITS) - 1:
        size_bytes /= 1024
        step += 1
    return f"{size_bytes:,.1f} {_UNITS[step]}" if step else f"{size_bytes:,.0f} B"


def time_text(timestamp_ms: int | None) -> str:
    """Milliseconds as UTC, or - where there is no time."""
    if not timestamp_ms or timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03d}Z"
