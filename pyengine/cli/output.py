"""Shared by the commands: printing, and the arguments STORE, --set, --json, --spark with their checks.

Tables for people and one JSON document for programs go to stdout, progress bars to stderr. Text from a store is printed
with its control characters escaped, so that a message body cannot control the reader's terminal.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import re
import select
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

import click

from pyengine.arguments import INT32_MAX, TIME_MS_MIN, local_path, moment_ms
from pyengine.engine_config import keywords
from pyengine.errors import ConfigError, EngineError, ExitCode, FormatError, UsageError, require_extra
from pyengine.results import ReadLevel
from pyengine.settings import UNITS
from pyengine.storage.config import FIXED_NAMES, LOG_PATHS, SET, STORE_SIGNS, checked_set, existing_store, load_config, setting_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console
    from rich.table import Table

    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.recovery.report import Findings

WIDTH_WITHOUT_TERMINAL = 10_000
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BODY_COLUMN_MOST = 60
_MESSAGE_FIELDS = ("topic", "queue_id", "queue_offset", "physical_offset", "size_bytes", "msg_id", "store_timestamp_ms", "store_host",
                   "born_timestamp_ms", "born_host", "tags", "keys", "properties", "flag", "sys_flag", "reconsume_times",
                   "prepared_transaction_offset")

Place = Literal["first", "last"] | int | datetime


def discard(stream: TextIO) -> None:
    """Redirect stdout or stderr to nowhere after a write to it failed, since the interpreter flushes it at exit."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)


@contextlib.contextmanager
def to_its_end() -> Iterator[None]:
    """Keep the command's exit code if the reader of stdout goes before the end of an answer, as `head` does.

    EngineError if stdout does not take the answer for another reason, such as a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        if error.filename is not None:  # of a file of the store
            raise
        discard(sys.stdout)
        raise EngineError(why_unwritten(error)) from error


def pause(seconds: float = 0) -> None:
    """Wait; BrokenPipeError as soon as the reader of stdout is gone, which a command that prints nothing would not notice."""
    pipe = select.poll()
    with contextlib.suppress(io.UnsupportedOperation):  # of a caller that has replaced it
        pipe.register(sys.stdout.fileno(), 0)
    if pipe.poll(min(seconds * 1000, INT32_MAX)):
        raise BrokenPipeError


def why_unwritten(error: OSError) -> str:
    """Return the sentence for an answer that stdout does not take."""
    return f"the answer cannot be written to stdout: {error.strerror}"


def write_json(document: Any) -> None:
    """Print one document and a newline, in ASCII if stdout is not UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    sys.stdout.write(json.dumps(document, ensure_ascii=not is_utf8, default=_plain) + "\n")


@dataclass(frozen=True, slots=True)
class Reply:
    """A command's answer: the document for programs, `show` for people, the exit code, and an error that stderr has too."""

    document: Any
    show: str | Callable[[], None]
    code: ExitCode = ExitCode.OK
    error: str = ""

    @classmethod
    def of(cls, report: Findings, facts: str, *, repairs: bool = True, more: dict[str, Any] | None = None, **tables: str) -> Reply:
        """Return the answer of a command that checks or repairs, as `write_document` shows it; a refusal to repair is an error.

        `more`: fields that only a person is shown.
        """
        document = report.to_dict()
        refusal = report.sentence if repairs and report.exit_code is ExitCode.CORRUPTION else ""

        def show() -> None:
            if not refusal:
                print(report.sentence)
            write_document(document | (more or {}), facts, **tables)

        return cls(document, show, report.exit_code, refusal)

    def print(self, as_json: bool) -> ExitCode:
        """Print it, and return the exit code."""
        with to_its_end():
            if as_json:
                write_json(self.document)
            elif callable(self.show):
                self.show()
            elif self.show:
                print(self.show)
        if self.error:
            print(f"error: {self.error}", file=sys.stderr)
        return self.code


def note(text: str, file: TextIO | None = None) -> None:
    """Tell the user something beside the answer, on stderr, or as a part of it."""
    print(f"note: {printable(text)}", file=file or sys.stderr)


def _plain(value: object) -> object:
    """Convert what json cannot encode: bytes to hex, enums to names, paths and the rest to text."""
    import enum

    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    return str(value)


def console(stderr: bool = False) -> Console:
    """Return a rich console for tables: as wide as the terminal, or very wide without one."""
    from rich.console import Console

    class OwnConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process, with 1
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_WITHOUT_TERMINAL
    return OwnConsole(file=stream, width=width, markup=False, highlight=False, emoji=False)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, right: Collection[str] = ()) -> None:
    """Print a table after a line that is its title; align columns of numbers to the right, with separators of thousands."""
    if title:
        print(printable(title))
    console().print(table_of(columns, rows, right))


def write_tables(*tables: tuple[Sequence[str], Sequence[Sequence[object]]]) -> None:
    """Print each table that has rows, after an empty line."""
    for columns, rows in tables:
        if rows:
            print()
            write_table(columns, rows)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[str] = ()) -> Table:
    """Return the table; the columns `right` are aligned as numbers are."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    numeric = [bool(cells) and all(isinstance(row[at], (int, float)) and not isinstance(row[at], bool) for row in cells)
               for at in range(len(columns))]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, is_number in zip(columns, numeric, strict=True):
        table.add_column(name, justify="right" if is_number or name in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(value if isinstance(value, Text) else _cell(value) for value in row))
    return table


def write_facts(facts: Iterable[tuple[str, object]], title: str | None = None) -> None:
    """Print names and values, one pair on a line."""
    pairs = [(name, _cell(value)) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    if title:
        print(title)
    for name, value in pairs:
        print(f"{name:<{width}}  {value}")


def write_document(document: Mapping[str, Any], facts: str, **tables: str) -> None:
    """Print facts of a document by their names, then lists as `write_lists` does, its advice, and its notes.

    A fact whose name ends in ? is left out if it is 0 or empty; a size whose name ends in #, here or in a table, is exact.
    """
    shown = [name.rstrip("?") for name in facts.split() if not name.endswith("?") or document[name.rstrip("#?")]]
    write_facts((_heading(name), _by_name(name, document[name.rstrip("#")])) for name in shown)
    write_lists(document, **tables)
    advice = document.get("advice", ())
    if advice:
        print()
    for number, step in enumerate(advice, 1):
        print(f"to do{f' ({number})' if len(advice) > 1 else ''}: {printable(step)}")
    for text in document.get("notes", ()):
        note(text, sys.stdout)


def write_lists(document: Mapping[str, Any], **tables: str) -> None:
    """Print a table of each of these lists that is not empty, `columns: title`, after an empty line."""
    for name, text in tables.items():
        columns, _, title = text.partition(": ")
        if document[name]:
            print()
            write_rows(document[name], columns, title or _heading(name))


def write_rows(rows: Iterable[Any], columns: str, title: str | None = None) -> None:
    """Print documents as a table with these fields as columns; what is no document, as the items of a dict, has its cells in this order."""
    names = columns.split()
    cells = [[row.get(name.rstrip("#")) for name in names] if isinstance(row, dict) else row if isinstance(row, (list, tuple)) else [row]
             for row in (sorted(rows.items()) if isinstance(rows, dict) else rows)]
    right = [_heading(name) for at, name in enumerate(names) if all(isinstance(row[at], (int, float, type(None))) for row in cells)]
    write_table([_heading(name) for name in names], [list(map(_by_name, names, row)) for row in cells], title, right)


def _is_time(name: str) -> bool:
    return name.endswith("_ms") and not name.endswith("_age_ms")


def _heading(name: str) -> str:
    return (name.removesuffix("_ms") if _is_time(name) else name.rstrip("#")).replace("_", " ")


def _by_name(name: str, value: Any) -> object:
    """Return a field of a document for a person, as its name says: a size, a time, a process; the length of a list."""
    if isinstance(value, (list, tuple)):
        return len(value)
    if value is not None and name.endswith("bytes"):
        return size_text(value)
    if _is_time(name):
        return time_text(value)
    if isinstance(value, float):
        return number_text(value)
    return str(value) if name == "pid" else value


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
    """Return `text` with unprintable characters escaped, so that it cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def body_text(body: bytes, most: int | None = None) -> str:
    """Return a body as printable text, with bytes escaped if it is not UTF-8; cut after `most` characters."""
    text = printable(body.decode("utf-8", errors="backslashreplace"))
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def number_text(value: float | None) -> str:
    """Return a number with three significant figures: 12,345, 3.8, 0.00712; 0 below 0.0005; - for None."""
    if value is None:
        return "-"
    if abs(value) < 0.0005:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size_text(size_bytes: float) -> str:
    """Return a size in binary units: 1536 -> 1.5 KiB."""
    step = 0
    while abs(size_bytes) >= 1024 and step < len(_UNITS) - 1:
        size_bytes /= 1024
        step += 1
    return f"{size_bytes:,.1f} {_UNITS[step]}" if step else f"{size_bytes:,.0f} B"


def time_text(timestamp_ms: int | None) -> str:
    """Return milliseconds as a time in UTC, or - for None."""
    if not timestamp_ms or timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03d}Z"


def shown_body(message: Message, raw: bool = False) -> tuple[bytes, str]:
    """Return the body to show, decompressed unless `raw`, and the error if it could not be decompressed."""
    if not raw:
        try:
            return message.content, ""
        except FormatError as error:
            return message.body, str(error)
    return message.body, ""


def message_document(message: Message, raw: bool = False) -> dict[str, Any]:
    """Return a message as a document. `body` is its text; a body that is not UTF-8 is in `body_base64` instead.

    A compressed body is decompressed unless `raw`: `compression` names the algorithm, `stored_body_bytes` the stored size. If
    that fails, the document has the stored body and `body_error` says why.
    """
    from pyengine.formats.record import compression_of

    body, error = shown_body(message, raw)
    document: dict[str, Any] = {name: getattr(message, name) for name in _MESSAGE_FIELDS} | {"body_bytes": len(body)}
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
    """Print one row for each message, with bodies cut to a line."""
    bodies = [shown_body(message, raw)[0] for message in messages]
    write_table(
        ("topic", "queue", "offset", "position", "stored", "tags", "keys", "bytes", "body"),
        [(message.topic, message.queue_id, message.queue_offset, message.physical_offset,
          time_text(message.store_timestamp_ms), message.tags, message.keys, len(body),
          body_text(body, BODY_COLUMN_MOST)) for message, body in zip(messages, bodies, strict=True)])


def write_message(message: Message, raw: bool = False) -> None:
    """Print one message in full, its body last."""
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
    """Show a progress bar over bytes; the yielded function takes (bytes done, new total or None)."""
    if not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes=None: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
                  TransferSpeedColumn(), TimeRemainingColumn(), console=console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total_bytes)

        def show(done_bytes: int, total_bytes: int | None = None) -> None:
            bars.update(task, completed=done_bytes, total=total_bytes)  # None: the total stays

        yield show


class ShowBytes(Protocol):
    """Shows how many bytes are done, and a new total if given."""

    def __call__(self, done_bytes: int, total_bytes: int | None = None) -> None: ...


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
level_option = click.option(
    "--level", type=click.Choice([level.value for level in ReadLevel]), default=None,
    help="How far to read. Default: flushed in sync mode, else committed.")
sql_option = click.option(
    "--sql", default=None, help="Only messages whose properties meet this SQL92 condition: \"price > 5 AND region = 'eu'\".")
topic_option = click.option("--topic", required=True, help="The topic.")
queue_id_option = click.option("--queue-id", type=click.IntRange(min=0), required=True, help="The queue's number.")
raw_option = click.option("--raw", is_flag=True, help="Bodies as stored, not decompressed.")
master_option = click.option(
    "--master", default=None, metavar="URL",
    help="Spark's master: local[N], or a cluster that sees the same paths. Default: this host's processors.")
spark_option = click.option(
    "--spark", "on_spark", is_flag=True, help="Read in Spark's workers; --master implies it.")
spark_level_option = click.option(
    "--level", "readLevel", type=click.Choice([level.value for level in ReadLevel]), default="flushed",
    help="How far to read. Default: flushed.")


class NumberRange(click.FloatRange):
    """A number in a range and of at most `most`, so that any time fits; click accepts nan and inf in a range."""

    def __init__(self, min: float, max: float | None = None, *, min_open: bool = False, most: float = 1e6) -> None:
        super().__init__(min, max, min_open=min_open)
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not number <= self._most:
            self.fail(f"{value}: give a number of at most {self._most:,.0f}", param, ctx)
        return number


def moment(value: str) -> datetime:
    """Parse a time in ISO 8601 (UTC without a zone), or @ and ms since 1970; ValueError for anything else, also for seconds."""
    if value.startswith("@"):
        try:
            return datetime.fromtimestamp(moment_ms(int(value[1:]), "it") / 1000, UTC)
        except (OverflowError, OSError, UsageError) as error:
            raise ValueError(str(error)) from error
    time = datetime.fromisoformat(value)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _time_ms(text: str) -> int:
    return moment_ms(int(text) if re.fullmatch(r"\d+", text) else moment(text), "it")


def _place(text: str) -> Place:
    if text in ("first", "begin"):
        return "first"
    if text in ("last", "end"):
        return "last"
    return int(text) if text.isascii() and text.isdecimal() else moment(text)


def parsed(parse: Callable[[str], Any], wanted: str) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return the callback of an option whose text `parse` reads; what it refuses, as a value, is not `wanted`."""
    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except (ValueError, OverflowError, UsageError):
            raise click.BadParameter(f"{value}: give {wanted}", ctx, param) from None

    return read


def time_option(*names: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option whose value is a time in ms since 1970: as such a number, or in ISO 8601 (UTC if it names no zone)."""
    return click.option(*names, metavar="TIME", **options, callback=parsed(
        _time_ms, f"a time like 2026-01-31T12:00:00Z, or milliseconds since 1970: 0, or {TIME_MS_MIN} and more, for less would be seconds"))


def place_option(*names: str, help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option whose value is a place in each queue: first, last, an offset, or a time with a time zone."""
    return click.option(*names, default=None, metavar="first|last|OFFSET|TIME", help=help, callback=parsed(
        _place, "first, last, an offset, a time like 2026-01-31T12:00:00Z, or @ and milliseconds since 1970"))


def span_s(text: str) -> float:
    """Parse a duration into seconds: 90s, 10m, 72h, 7d; ValueError for anything else."""
    span = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)([smhd])", text)
    if span is None:
        raise ValueError(text)
    return float(span[1]) * UNITS["ms"][span[2]] / 1000


def _settings(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    try:
        return checked_set(pairs)
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


class GivenPath(click.Path):
    """A path that is not empty: `pyengine start "$STORE"` with an empty STORE must not mean the current directory. A Path is no URI."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and (not value or self.type is Path):
            local_path(value, "" if param is None else (param.metavar or param.human_readable_name).strip("[]"))
        return super().convert(value, param, ctx)

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None = None) -> str | None:
        """Return what follows the sentence that the argument is missing."""
        return f"Give it, or set {STORE_VARIABLE}." if isinstance(param, StoreArgument) else None


class StoreArgument(click.Argument):
    """STORE, after the action if the command has one; PYENGINE_STORE where the command line has none.

    The number of words says whether STORE is among them. Where other words may be left out, what holds a store is STORE, or a URI.
    For one version an action after STORE is taken too; only a terminal gets a note, so that a program reads what it read before.
    """

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        super().add_to_parser(parser, ctx)
        parse_args = parser.parse_args

        def parse_and_arrange(args: list[str]) -> tuple[dict[str, Any], list[str], list[click.Parameter]]:
            values, more, order = parse_args(args)
            arguments = [param for param in ctx.command.params if isinstance(param, click.Argument)]
            given: list[str] = []
            for argument in arguments:
                value = values.pop(argument.name, None)
                given += value if isinstance(value, (tuple, list)) else [value] if isinstance(value, str) else []
            words = self._arranged([*given, *more], arguments, ctx.info_name)
            for argument in arguments:
                if argument.nargs == -1:
                    values[argument.name], words = tuple(words), []
                elif words and (word := words.pop(0)) is not None:
                    values[argument.name] = word
            return values, words, order

        parser.parse_args = parse_and_arrange

    def _arranged(self, given: list[str], arguments: list[click.Argument], command: str | None) -> list[Any]:
        """Return the words in the order of `arguments`, with STORE from the environment where it is missing, None for no action."""
        action = next((argument for argument in arguments if isinstance(argument.type, click.Choice)), None)
        words: list[Any] = list(given)
        chosen = None
        if action is not None:
            choices = action.type.choices  # type: ignore[attr-defined]
            if words and words[0] in choices:
                chosen = words.pop(0)
            elif len(words) > 1:
                chosen = words.pop(1 if words[1] in choices or os.path.isdir(words[0]) else 0)
                if chosen in choices and sys.stderr.isatty():
                    note(f"the action comes first, `pyengine {command} {chosen} STORE`: the next version takes no other order")
        at = [argument for argument in arguments if argument is not action].index(self)
        others = [argument for argument in arguments if argument not in (self, action)]
        if all(argument.nargs == 1 and argument.required for argument in others):
            is_given = len(words) > len(others)
        else:
            is_given = any("://" in word or os.path.lexists(os.path.join(word, sign)) for word in words[at:at + 1] for sign in STORE_SIGNS)
        if not is_given and STORE_VARIABLE in os.environ:
            words.insert(at, os.environ[STORE_VARIABLE])
        if action is not None:
            words.insert(arguments.index(action), chosen)
        return words


STORE_VARIABLE = "PYENGINE_STORE"
store_argument = click.argument("store", cls=StoreArgument, type=GivenPath(path_type=Path), metavar="STORE")
store_or_uri_argument = click.argument("store", cls=StoreArgument, type=GivenPath(), metavar="STORE")
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=_settings,
    help="A setting for this run, by pyengine's or RocketMQ's name; may be repeated.")


def answers(function: Callable[..., Reply]) -> Callable[..., ExitCode]:
    """Add --json to a command that returns a Reply, and print that."""
    @functools.wraps(function)
    def command(*, as_json: bool, **arguments: Any) -> ExitCode:
        return function(**arguments).print(as_json)

    return json_option(command)


def store_command(function: Callable[..., Reply]) -> Callable[..., ExitCode]:
    """Add STORE and --set to a command, as `store` and `settings`, and print its answer, as --json says."""
    return store_argument(set_option(answers(function)))


@contextlib.contextmanager
def reading(root: Path, settings: dict[str, str]) -> Iterator[LiveStoreReader]:
    """Open the store at `root` for reading: live if its engine runs, otherwise as it is on disk."""
    from pyengine.ipc.live_reader import open_store
    from pyengine.storage.later_format import queues_are_elsewhere

    with open_store(existing_store(root), **keywords(settings)) as reader:
        if queues_are_elsewhere(root):
            note(f"the consume queues of {root} are in RocksDB, which only RocketMQ 5 reads: what is read through queues is not found "
                 "here")
        yield reader


@contextlib.contextmanager
def spark_session(app: str, master: str | None = None) -> Iterator[SparkSession]:
    """Run a Spark session inside the block; UsageError if Spark or something that it needs is missing."""
    require_extra("pyspark", "pyarrow", "pandas")
    from pyengine.spark.spark_session import borrowed_session

    with borrowed_session(app, {} if master is None else {"spark.master": master}) as spark:
        yield spark


def spark_source(store: str, settings: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return what a job reads, a path of a store or a URI, and as options the sizes of the store's files and the log's folders."""
    from pyengine.spark.options import read_options, scheme_of

    if scheme_of(store) in ("", "file"):
        root = existing_store(Path(read_options({"path": store}).path if scheme_of(store) else store))
        return str(root), size_options(root, settings)
    return store, {name: value for key, value in settings.items() if (name := setting_name(key, SET)) in (*FIXED_NAMES, *LOG_PATHS)}


def size_options(root: Path, settings: dict[str, str]) -> dict[str, str]:
    """Return the sizes of the store's files, and folders of the log for this run, as options of a job."""
    config = load_config(root, settings)
    names = [*FIXED_NAMES, *(name for name in LOG_PATHS if config.origins.get(name) == SET)]
    return {name: str(getattr(config, name)) for name in names}
