"""What commands print: tables for people and one JSON document for programs on stdout, progress bars on stderr.

Text that comes out of a store is printed with its control characters escaped: a
message body must not steer the reader's terminal.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyengine.errors import ExitCode, FormatError

if TYPE_CHECKING:
    from rich.console import Console

    from pyengine.formats.record import Message

WIDTH_WITHOUT_TERMINAL = 10_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BODY_COLUMN_MOST = 60


class Report(Protocol):
    """What a command that repairs says of its work."""

    @property
    def exit_code(self) -> ExitCode: ...

    @property
    def sentence(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


ReportT = TypeVar("ReportT", bound=Report)


def write_json(document: Any) -> None:
    """One document and a newline; plain ASCII where stdout cannot carry more."""
    sys.stdout.write(json_text(document) + "\n")


def print_report(report: ReportT, as_json: bool, show: Callable[[ReportT], None]) -> ExitCode:
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


def console(stderr: bool = False) -> Console:
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


def shown_body(message: Message, raw: bool = False) -> tuple[bytes, str]:
    """The body that a command shows, decompressed unless `raw`; and why it is the stored one although it is compressed."""
    from pyengine.formats.record import decompress_body

    if not raw:
        try:
            return decompress_body(message.body, message.sys_flag), ""
        except FormatError as error:
            return message.body, str(error)
    return message.body, ""


def message_document(message: Message, raw: bool = False) -> dict[str, Any]:
    """All of a message. `body` is its text; a body that is not UTF-8 is in `body_base64` instead.

    A compressed body is shown decompressed unless `raw`: `compression` names how it is stored, in `stored_body_bytes`;
    where it cannot be, the stored one is shown and `body_error` says why.
    """
    from pyengine.formats.record import compression_of

    body, error = shown_body(message, raw)
    document: dict[str, Any] = {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "physical_offset": message.physical_offset,
        "size_bytes": message.size_bytes,
        "msg_id": message.msg_id,
        "store_timestamp_ms": message.store_timestamp_ms,
        "store_host": message.store_host,
        "born_timestamp_ms": message.born_timestamp_ms,
        "born_host": message.born_host,
        "tags": message.tags,
        "keys": message.keys,
        "properties": message.properties,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "reconsume_times": message.reconsume_times,
        "prepared_transaction_offset": message.prepared_transaction_offset,
        "body_bytes": len(body),
    }
    compression = compression_of(message.sys_flag)
    if compression:
        document |= {"compression": compression, "stored_body_bytes": len(message.body)}
    if error:
        document["body_error"] = error
    try:
        document["body"] = body.decode("utf-8")
    except UnicodeDecodeError:
        document["body_base64"] = base64.b64encode(body).decode("ascii")
    return document


def write_message_table(messages: Sequence[Message], raw: bool = False) -> None:
    """One row a message, bodies cut to a line."""
    bodies = [shown_body(message, raw)[0] for message in messages]
    write_table(
        ("topic", "queue", "offset", "position", "stored", "tags", "keys", "bytes", "body"),
        [(message.topic, message.queue_id, message.queue_offset, message.physical_offset,
          time_text(message.store_timestamp_ms), message.tags, message.keys, len(body),
          body_text(body, BODY_COLUMN_MOST)) for message, body in zip(messages, bodies, strict=True)])


def write_message(message: Message, raw: bool = False) -> None:
    """One message in full, its body last."""
    document = message_document(message, raw)
    properties = document.pop("properties")
    document.pop("body", None)
    document.pop("body_base64", None)
    for name in ("store_timestamp_ms", "born_timestamp_ms"):
        document[name] = f"{document[name]} ({time_text(document[name])})"
    write_facts([*document.items(), *((f"property {name}", value) for name, value in properties.items())])
    print()
    print(body_text(shown_body(message, raw)[0]))


@contextlib.contextmanager
def byte_bar(what: str, total_bytes: int | None) -> Iterator[ShowBytes]:
    """A bar over bytes; the given function takes (bytes done, new total or None)."""
    if not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                  TransferSpeedColumn(), TimeRemainingColumn(), console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total_bytes)

        def show(done_bytes: int, total_bytes: int | None = None) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes)  # None leaves the total as it is

        yield show


class ShowBytes(Protocol):
    """Shows how many bytes are done, of how many if that is known better now."""

    def __call__(self, done_bytes: int, total_bytes: int | None = None) -> None: ...


def _show_nothing(done_bytes: int, total_bytes: int | None = None) -> None:
    pass
