"""The arguments that commands share: STORE, --set, --json, --spark, and the checks that go with them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.errors import ConfigError, NotAStoreError, StoreBusyError, UsageError, require_extra
from pyengine.results import ReadLevel
from pyengine.storage.config import FIXED_NAMES, SET, SETTINGS, load_config, parse_set, setting_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pyengine.ipc.live_reader import LiveStoreReader

# What tells a store from any other directory: one of these is there.
STORE_SIGNS = ("commitlog", "consumequeue", "checkpoint", "config/engine.toml", "config/engine-id")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of tables.")
level_option = click.option(
    "--level", type=click.Choice([level.value for level in ReadLevel]), default=None,
    help="How far to read; flushed for a store in sync mode, else committed, if not given.")
sql_option = click.option(
    "--sql", default=None, help="Only messages whose properties meet this SQL92 condition: \"price > 5 AND region = 'eu'\".")
topic_option = click.option("--topic", required=True, help="The topic.")
queue_id_option = click.option("--queue-id", type=click.IntRange(min=0), required=True, help="The queue's number.")
raw_option = click.option("--raw", is_flag=True, help="Bodies as they are stored: compressed where the producer compressed them.")
master_option = click.option(
    "--master", default=None, metavar="URL",
    help="Spark's master: local[N], or a cluster's that sees the store's files under the same path. "
         "All processors of this host if not given.")
spark_option = click.option(
    "--spark", "on_spark", is_flag=True, help="Let Spark's workers do the reading; --master alone means it too.")
spark_level_option = click.option(
    "--level", type=click.Choice([level.value for level in ReadLevel]), default=None,
    help="How far to read; flushed if not given.")


def moment(value: str) -> datetime:
    """A time in ISO 8601, of UTC if it names no zone, or @ and ms since 1970; ValueError for anything else."""
    if value.startswith("@"):
        try:
            return datetime.fromtimestamp(int(value[1:]) / 1000, UTC)
        except (OverflowError, OSError) as error:
            raise ValueError(str(error)) from error
    time = datetime.fromisoformat(value)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def span_s(text: str) -> float:
    """The seconds of a span: 90s, 10m, 72h, 7d; ValueError for anything else."""
    span = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if span is None:
        raise ValueError(text)
    return float(span[1]) * _UNITS_S[span[2]]


def _settings(ctx: click.Context, param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    try:
        settings = parse_set(pairs)
        for key, value in settings.items():
            SETTINGS[setting_name(key, SET)].read(value, SET)
        return settings
    except ConfigError as error:
        raise click.BadParameter(str(error), ctx, param) from error


class _StorePath(click.Path):
    """A path, but never the empty one: `pyengine start "$STORE"` with nothing in STORE must not mean here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            raise UsageError("STORE is empty: give the store's root directory (. for this one)")
        return super().convert(value, param, ctx)


store_argument = click.argument("store", type=_StorePath(path_type=Path), metavar="STORE")
store_or_uri_argument = click.argument("store", type=_StorePath(), metavar="STORE")
set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=_settings,
    help="A setting for this run, by its own or RocketMQ's name; may be repeated.")


def store_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """STORE, --set and --json, as `store`, `settings` and `as_json`."""
    return store_argument(set_option(json_option(function)))


@contextlib.contextmanager
def reading(root: Path, settings: dict[str, str]) -> Iterator[LiveStoreReader]:
    """The store at `root`, open for reading: as it is on disk, or live if its engine runs."""
    from pyengine.ipc.live_reader import open_store
    from pyengine.storage.later_format import queues_are_elsewhere

    with open_store(existing_store(root), **settings) as reader:
        if queues_are_elsewhere(root):
            click.echo(f"note: the consume queues of {root} are in RocksDB, which only RocketMQ 5 reads: what is read through queues "
                       "is not found here", err=True)
        yield reader


def existing_store(root: Path) -> Path:
    """`root` if it holds a store; NotAStoreError says what is there instead. Opens and changes nothing."""
    if not root.exists():
        raise NotAStoreError(f"{root} does not exist")
    if not root.is_dir():
        raise NotAStoreError(f"{root} is a file; STORE is the store's root directory")
    if not any((root / sign).exists() for sign in STORE_SIGNS):
        hint = ""
        if root.name in ("commitlog", "consumequeue", "index", "config"):
            hint = f"; did you mean {root.parent}?"
        raise NotAStoreError(f"{root} holds no store: there is no commitlog folder in it{hint}")
    return root


@contextlib.contextmanager
def owning(root: Path) -> Iterator[None]:
    """The store at `root`, owned by this process for the block. StoreBusyError while any process has it open."""
    from pyengine.ipc.store_lock import Ownership, StoreLock

    with StoreLock(root, create=True) as lock:
        if lock.own() is Ownership.ADOPTED:
            raise StoreBusyError(f"{root} still has living workers, though no supervisor: `pyengine start {root}` takes them over, "
                                 f"`pyengine stop {root}` ends them")
        yield


@contextlib.contextmanager
def spark_session(app: str, master: str | None = None) -> Iterator[SparkSession]:
    """A session that ends with the block. UsageError without Spark and what it needs."""
    require_extra("pyspark", "pyarrow", "pandas")
    from pyengine.spark.spark_session import borrowed_session

    with borrowed_session(app, {} if master is None else {"spark.master": master}) as spark:
        yield spark


def spark_source(store: str, settings: dict[str, str]) -> tuple[str, dict[str, str]]:
    """What a job reads: a path that holds a store, or a URI; and the sizes that the store's files depend on, as options."""
    from pyengine.spark.options import local_path, scheme_of

    if scheme_of(store) in ("", "file"):
        root = existing_store(Path(local_path(store) if scheme_of(store) else store))
        return str(root), size_options(root, settings)
    return store, {name: value for key, value in settings.items() if (name := setting_name(key, SET)) in FIXED_NAMES}


def size_options(root: Path, settings: dict[str, str]) -> dict[str, str]:
    """The sizes that the store's files depend on, as options of a job."""
    config = load_config(root, settings)
    return {name: str(getattr(config, name)) for name in FIXED_NAMES}
