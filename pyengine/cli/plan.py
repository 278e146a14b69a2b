"""`pyengine plan`: computes what a store will need from the rate, size and retention of its messages.

It reads no store. Each figure is an upper bound by a formula that docs/capacity.md explains and tests/cli/test_cli_plan.py
compares with running engines. Only the speed at which this machine reads a log is measured, at each call.
"""

from __future__ import annotations

import math
import mmap
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.output import NumberRange, Reply, answers, parsed, set_option, span_s
from pyengine.engine_config import EngineConfig, delete_hours
from pyengine.errors import UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.record import Message, encode_message, record_size
from pyengine.native import scan
from pyengine.native.dispatch import WINDOW_BYTES
from pyengine.native.session import session_bytes
from pyengine.storage.commit_log import CLEAN_VERIFY_BYTES_MAX, NORMAL_SEGMENTS, SEGMENTS_AHEAD, reserve_ahead_bytes
from pyengine.storage.config import SETTINGS, load_config
from pyengine.storage.message_store import NewStoreSpace

HOUR_S = 3600
BLOCK_BYTES = 4096                 # of the file system
CHECKPOINT_S = 5                   # recovery reads from 3 s before a checkpoint that may be 2 s old
RECOVERY_START_S = 0.5             # processes and locks, before and after the reading
OBJECTS_BYTES = 2 << 20            # control block, statistics, recorder and the other objects in shared memory
QUEUE_SLOT_BYTES = 512             # of a queue in shared memory; the table doubles when it is full
PROCESS_BYTES = 16 << 20           # of a worker's own memory, without what it maps
TLS_CONNECTION_BYTES = 128 << 10   # of the gateway's memory for a client with TLS that reads its answers
PROCESSES = 9                      # supervisor, fork server and the workers of an engine without pool, slaves, gateway and gRPC
DESCRIPTORS = 48                   # of the process that holds most; a producer, a pool buffer and an open queue take one each
MEASURED_BYTES = 32 << 20          # of log, to see how fast it is read


@dataclass(frozen=True, slots=True)
class Load:
    """The expected load: message rate, sizes, keys, queues, producers and consumer lag."""

    rate: float
    body_bytes: int
    topic_bytes: int = 16
    properties_bytes: int = 0
    keys: float = 0
    queues: int = 4
    producers: int = 4
    lag_s: float = 60.0

    @property
    def record_bytes(self) -> int:
        return record_size(self.body_bytes, self.topic_bytes, self.properties_bytes)

    @property
    def bytes_per_s(self) -> float:
        return self.rate * self.record_bytes


def shared_memory_bytes(config: EngineConfig, producers: int, queues: int) -> int:
    """Return the size of an engine's shared memory, most of which are the producers' rings and the pool."""
    return OBJECTS_BYTES + QUEUE_SLOT_BYTES * queues + producers * session_bytes(config.session_ring_bytes) + config.pool_bytes


def make_plan(load: Load, config: EngineConfig, read_bytes_per_s: float) -> dict[str, Any]:
    """Compute upper bounds of what a store with these settings needs under that load; recovery reads the log with `read_bytes_per_s`."""
    segment = config.mapped_file_size_commit_log_bytes
    per_day = load.bytes_per_s * 24 * HOUR_S
    kept_s = config.file_reserved_time_hours * HOUR_S + longest_wait_s(config)
    live = load.bytes_per_s * kept_s
    if config.log_retention_bytes and config.log_retention_bytes < live:
        live = float(config.log_retention_bytes)
        kept_s = live / load.bytes_per_s
    first = NewStoreSpace.of(config)
    # The log is at most a segment larger than what is live: whole segments are deleted.
    ahead = SEGMENTS_AHEAD * segment if live >= segment else max(first.log_bytes, reserve_ahead_bytes(segment, math.ceil(live) + segment))
    log = (math.ceil(live / segment) + 1) * segment + ahead
    messages = math.ceil(live / load.record_bytes)
    entries_more = config.mapped_file_size_consume_queue_bytes + WINDOW_BYTES
    queue = messages * CQ_ENTRY_BYTES + load.queues * entries_more
    index = 0
    if config.message_index_enable and load.keys:
        index = (math.ceil(messages * load.keys / config.max_index_num) + 1) * (
            -(-config.geometry.index_layout.size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    disk = log + queue + index
    length = disk - ahead + SEGMENTS_AHEAD * segment + load.queues * config.mapped_file_size_consume_queue_bytes
    # Recovery leaves a log that the next start can read, so it reads as many segments as that one will, too.
    read_by_start = min(NORMAL_SEGMENTS, max(1, CLEAN_VERIFY_BYTES_MAX // segment)) * segment
    reread = min(log, max(segment + math.ceil(load.bytes_per_s * CHECKPOINT_S), read_by_start))
    pool_buffers = config.transient_store_pool_size if config.pool_enabled else 0
    connections, connections_bytes = (config.gateway_connections_max, config.gateway_memory_max_bytes) if config.gateway_enable else (0, 0)
    if config.gateway_tls_mode != "disabled":
        connections_bytes += connections * TLS_CONNECTION_BYTES
    processes = PROCESSES + config.pool_enabled + config.replicates + config.gateway_enable + config.grpc_enable
    return {
        "record_bytes": load.record_bytes,
        "log_bytes_per_day": math.ceil(per_day),
        "kept_s": kept_s,            # the age of the oldest message
        "messages": messages,
        "log_bytes": log,
        "queue_bytes": queue,
        "index_bytes": index,
        "first_bytes": first.log_bytes + load.queues * first.per_queue_bytes + (first.index_bytes if index else 0),  # a new store's disk
        "disk_bytes": disk,          # what it takes later
        "length_bytes": length,      # of its files together, which are not full
        "file_system_bytes": math.ceil(disk / (config.disk_max_used_space_ratio / 100)),  # so that messages are deleted by age alone
        "shared_memory_bytes": shared_memory_bytes(config, load.producers, load.queues),
        "process_bytes": processes * PROCESS_BYTES + connections_bytes,
        "page_cache_bytes": math.ceil(load.bytes_per_s * load.lag_s) + first.log_bytes,
        "descriptors": DESCRIPTORS + load.queues + max(load.producers + pool_buffers, connections),
        "recovery_read_bytes": reread,
        "recovery_read_bytes_per_s": int(read_bytes_per_s),
        "recovery_s": RECOVERY_START_S + reread / read_bytes_per_s}


def longest_wait_s(config: EngineConfig) -> float:
    """Return the longest time between two hours of delete_when."""
    hours = sorted(delete_hours(config.delete_when))
    return max((later - hour) % 24 or 24 for hour, later in zip(hours, [*hours[1:], hours[0]], strict=True)) * HOUR_S


def measure_reading(body_bytes: int) -> float:
    """Measure how many bytes a second this machine reads as recovery does: from a cached file, newly mapped, with CRC checks,
    in one thread."""
    record = encode_message(Message("plan", bytes(body_bytes), 0, 0, 0, 0))
    count = max(1, MEASURED_BYTES // len(record))
    with tempfile.TemporaryFile() as file:
        file.write(record * count)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
            began_s = time.perf_counter()
            found = scan.walk(log, 0, 0, len(log), check_offset=False)
            took_s = time.perf_counter() - began_s
    assert found.messages == count
    return count * len(record) / took_s


_size = parsed(SETTINGS["log_retention_bytes"].value_of, "a size, as 1000, 1KiB or 64MiB")
_span = parsed(span_s, "a span, as 90s, 10m, 72h or 7d")


@click.command()
@click.option("--rate", type=NumberRange(min=0, min_open=True, most=1e9), required=True, metavar="N", help="Mean messages a second.")
@click.option("--size", "body_bytes", required=True, callback=_size, metavar="BYTES", help="Size of a body as stored.")
@click.option("--retention", default=None, callback=_span, metavar="SPAN",
              help="Retention, as 72h or 7d. Default: file_reserved_time_hours.")
@click.option("--queues", type=click.IntRange(min=1), default=4, show_default=True, help="Queues of all topics together.")
@click.option("--keys", type=NumberRange(min=0), default=0.0, show_default=True, help="Index keys of a message.")
@click.option("--properties", "properties_bytes", default="0", show_default=True, callback=_size, metavar="BYTES",
              help="Bytes of a message's properties.")
@click.option("--topic-bytes", type=click.IntRange(1, 127), default=16, show_default=True, help="Length of a topic's name.")
@click.option("--producers", type=click.IntRange(min=1), default=4, show_default=True, help="Producers at the same time.")
@click.option("--lag", "lag_s", default="60s", show_default=True, callback=_span, metavar="SPAN",
              help="Lag up to which consumers read from memory.")
@set_option
@answers
def plan(retention: float | None, settings: dict[str, str], **expected: Any) -> Reply:
    """Compute the disk and memory of a new store. Also open files and recovery time: upper bounds (docs/capacity.md).

    \b
    Examples:
      pyengine plan --rate 200 --size 10KiB --keys 1 --properties 80 --queues 64
    """
    if retention is not None:
        settings = settings | {"file_reserved_time_hours": str(math.ceil(retention / HOUR_S))}
    config = load_config(None, settings)
    load = Load(**expected)
    if load.body_bytes > config.max_message_size_bytes:
        raise UsageError(f"--size {load.body_bytes:,} is more than max_message_size_bytes ({config.max_message_size_bytes:,})")
    made = make_plan(load, config, measure_reading(load.body_bytes))
    return Reply(made, lambda: write_plan(made, load, config))


def write_plan(made: dict[str, Any], load: Load, config: EngineConfig) -> None:
    """Print a sentence, and a table with the parts of each figure."""
    size = output.size_text
    click.echo(f"At {load.rate:,g} messages/s of {made['record_bytes']:,} bytes each (with head, topic and properties) the log grows by "
               f"{size(made['log_bytes_per_day'])} a day; a message is kept for up to {made['kept_s'] / HOUR_S:,.0f} h.\n")
    segment = size(config.mapped_file_size_commit_log_bytes)
    output.write_table(("what", "at most", "made of"), [
        ("log", size(made["log_bytes"]), f"{made['messages']:,} messages, in segments of {segment}; one more, and space ahead"),
        ("queues", size(made["queue_bytes"]), f"{CQ_ENTRY_BYTES} bytes a message; a file more for each of {load.queues:,} queues"),
        ("index", size(made["index_bytes"]), f"files of {size(config.geometry.index_layout.size_bytes)} for {config.max_index_num:,} keys"),
        ("disk", size(made["disk_bytes"]), "the three together"),
        ("disk at first", size(made["first_bytes"]), "of a new store, with its first messages"),
        ("file lengths", size(made["length_bytes"]), "of all files, which get blocks as they fill"),
        ("file system", size(made["file_system_bytes"]), f"so that it is never fuller than {config.disk_max_used_space_ratio} % "
                                                      "(disk_max_used_space_ratio)"),
        ("shared memory", size(made["shared_memory_bytes"]), f"{load.producers} rings of {size(config.session_ring_bytes)}"
                                                          f"{', the pool' if config.pool_enabled else ''}, the engine's objects"),
        ("processes", size(made["process_bytes"]), "their own memory"),
        ("page cache", size(made["page_cache_bytes"]), f"wanted for consumers that lag {load.lag_s:,.0f} s, and what is reserved ahead"),
        ("open files", f"{made['descriptors']:,}", "`ulimit -n`, LimitNOFILE; more queues than that are opened in turns"),
        ("recovery", f"{made['recovery_s']:.1f} s", f"after a kill: {size(made['recovery_read_bytes'])} read again, at "
                                                 f"{size(made['recovery_read_bytes_per_s'])}/s from memory"),
    ])
