"""`pyengine recover`, `rebuild`, `salvage` and `quarantine`: what makes a store whole again.

    recover      make a store whole again; rebuild: its queues and index; salvage: a new store of what is valid
    quarantine   what recovery put into STORE/quarantine, what messages are in it, and putting them back
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import (
    GivenPath,
    byte_bar,
    existing_store,
    master_option,
    owning,
    raw_option,
    reading,
    spark_option,
    spark_session,
    store_command,
)
from pyengine.errors import EngineError, ExitCode, StoreBusyError, UsageError, command
from pyengine.formats.constants import SYS_FLAG_TRANSACTION_MASK
from pyengine.storage.config import keep_sizes, load_config

if TYPE_CHECKING:
    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import Producer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.config import EngineConfig
    from pyengine.storage.recovery.quarantine import QuarantineEntry
    from pyengine.storage.recovery.rebuild import RebuildReport
    from pyengine.storage.recovery.report import CutQueue, Progress, RecoveryReport
    from pyengine.storage.salvage.salvage import SalvageReport


@click.command()
@store_command
@click.option("--accept-loss", is_flag=True,
              help="Go on although bytes that were durable are damaged: what follows the damage is given up.")
@click.option("--dry-run", is_flag=True, help="Say what would be cut, kept and put into quarantine; change nothing.")
def recover(store: Path, settings: dict[str, str], as_json: bool, accept_loss: bool, dry_run: bool) -> int:
    """Recover a store: find its end, cut what is torn, bring queues and index up to it.

    What `start` does first, alone. It ends as RocketMQ's own recovery would, and
    whatever is removed goes to STORE/quarantine before. Bytes that are only in the
    buffers of a dead engine are drained. Damage below what was durable is never cut:
    the store is refused and nothing changed, unless --accept-loss says so. Interrupted,
    it can be run again.

    --dry-run reads what the run would read and says what it would do, with the exit code that it would have.
    It reports what leaves the log, queues and index. Offsets of groups it does not look at, and queues that
    lack entries in their middle show only when the run makes them again.

    Exit codes: 0 recovered, 4 something went to quarantine, 3 refused, 5 in use.

    \b
    Examples:
      pyengine recover STORE --dry-run
      pyengine recover STORE
      pyengine recover STORE --accept-loss --json
    """
    existing_store(store)
    config = load_config(store, settings)
    with byte_bar("recover", None) as show:
        carry_out = preview_alone if dry_run else recover_alone
        report = carry_out(store, config, progress=show, accept_loss=accept_loss)
    return output.print_report(report, as_json, _print_recovery)


def recover_alone(
    root: Path, config: EngineConfig, *, progress: Progress | None = None, accept_loss: bool = False
) -> RecoveryReport:
    """Recover a store that no process has open, drain what a dead engine left in memory, and leave the store stopped.

    StoreBusyError while any process has it open.
    """
    from pyengine.ipc.crashed_engine_memory import left_memory
    from pyengine.storage.engine_id import raise_epoch, renew_copied_id
    from pyengine.storage.message_store import MessageStore
    from pyengine.storage.recovery.recover import recover as recover_store
    from pyengine.storage.recovery.report import RecoveryOptions, RecoveryState

    with owning(root):
        renew_copied_id(root)
        with left_memory(root) as left:
            left.require_dead()
            report = recover_store(MessageStore(root, config.geometry), progress=progress, accept_loss=accept_loss,
                                   shared=left.shared, options=RecoveryOptions.of(config))
            if report.state is RecoveryState.RECOVERED and left.discard():
                raise_epoch(root)
    return report


def preview_alone(
    root: Path, config: EngineConfig, *, progress: Progress | None = None, accept_loss: bool = False
) -> RecoveryReport:
    """What recover_alone would do; changes nothing, not even the file `lock`. StoreBusyError while any process has the store open."""
    from pyengine.ipc.crashed_engine_memory import left_memory
    from pyengine.storage.message_store import MessageStore
    from pyengine.storage.recovery.recover import preview
    from pyengine.storage.recovery.report import RecoveryOptions

    _require_unused(root)
    with left_memory(root) as left:
        left.require_dead(retire=False)
        report = preview(MessageStore(root, config.geometry), progress=progress, accept_loss=accept_loss, shared=left.shared,
                         options=RecoveryOptions.of(config))
    _require_unused(root)  # what was read while a process started it is worth nothing
    return report


def _require_unused(root: Path) -> None:
    from pyengine.ipc.store_lock import living_kinds, look

    holder = look(root)
    if holder.kind != "none" or living_kinds(root):
        who = holder.who if holder.kind == "foreign" else "an engine, or a command that owns it"
        raise StoreBusyError(f"{root} is in use by {who}: stop it first; while it runs nothing is to be recovered")


def _print_recovery(report: RecoveryReport) -> None:
    """What a recovery did, for people."""
    if report.exit_code is not ExitCode.CORRUPTION:
        print(report.sentence)
    output.write_facts([
        ("path", report.path.value), ("end", report.end_offset), ("read from", report.scan_from),
        ("records read", report.records), ("bytes kept", report.kept_bytes), ("bytes cut", report.cut_bytes),
        ("bytes drained", report.drained_bytes), ("bytes dispatched", report.dispatched_bytes),
        ("queue entries removed", report.queue_entries_removed), ("index files removed", report.index_files_removed),
        ("shared memory", report.shared_state), ("seconds", report.seconds), ("GB/s", report.gigabytes_per_second)])
    if report.quarantined:
        print()
        output.write_table(("quarantined", "from offset", "bytes", "why"), [
            (str(piece.path), piece.physical_offset, piece.size_bytes, piece.reason) for piece in report.quarantined])
    losses = [*(("segment", name, "deleted: nothing in it is of the log") for name in report.removed_files),
              *(("queue", f"{cut.topic} {cut.queue_id}", _queue_loss(cut)) for cut in report.cut_queues),
              *(("index file", name, f"deleted: {label}") for name, label in report.deleted_index_files)]
    if losses:
        print()
        output.write_table(("cut", "which", "what"), losses)
    for note in report.notes:
        print(f"note: {output.printable(note)}")


def _queue_loss(cut: CutQueue) -> str:
    done = [f"{cut.entries:,} entries of messages beyond the log's end"] if cut.entries else []
    done += [f"{cut.deleted_files} file{'' if cut.deleted_files == 1 else 's'} deleted"] if cut.deleted_files else []
    done += ["the rest of its last file cleared"] if cut.cleared else []
    return ", ".join(done)


@click.command()
@store_command
@click.option("--topic", default=None, help="Only this topic's queues, and not the index unless --index says so.")
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="Only this queue of the topic.")
@click.option("--queues", is_flag=True, help="Queues, and not the index unless --index is given too.")
@click.option("--index", is_flag=True, help="The index, and no queue unless --queues or --topic is given too.")
@spark_option
@master_option
def rebuild(
    store: Path, settings: dict[str, str], as_json: bool, topic: str | None, queue_id: int | None, queues: bool, index: bool,
    on_spark: bool, master: str | None,
) -> int:
    """Make queues and index again from the commit log alone.

    All of them, or those that the options name. A queue that is lost or wrong comes back as it was,
    light queues and extension included; the files that were there are moved to STORE/quarantine. The log itself
    is not changed, but for what `recover` would do to a store that was not stopped in order. The
    store must not be running. Interrupted, it can be run again; so does the next start.

    A queue of which the log holds no message any more is left as it is.

    --spark makes all queues and the index in Spark's workers, the same bytes (docs/spark.md); a
    store of some GiB on one host is sooner done without.

    Exit codes: 0 made again, 3 refused (damage below what was durable; nothing was changed),
    4 and part of the log went to quarantine, 5 in use.

    \b
    Examples:
      pyengine rebuild STORE
      pyengine rebuild STORE --topic orders --queue-id 0
      pyengine rebuild STORE --index --json
    """
    existing_store(store)
    if on_spark or master is not None:
        if topic is not None or queues or index:
            raise UsageError("--spark makes all queues and the index: leave out --topic, --queue-id, --queues and --index")
        config = load_config(store, settings)
        with spark_session("pyengine rebuild", master) as spark, byte_bar("rebuild", None) as show:
            from pyengine.spark.store_rebuild import rebuild as rebuild_in_workers

            report = rebuild_in_workers(spark, store, config=config, progress=show)
        return output.print_report(report, as_json, _print_rebuild)
    from pyengine.ipc.crashed_engine_memory import rebuild_alone
    from pyengine.storage.recovery.rebuild import Selection

    selection = Selection(queues=queues or topic is not None or not index, index=index or not (queues or topic is not None),
                          topic=topic, queue_id=queue_id)
    config = load_config(store, settings)
    with byte_bar("rebuild", None) as show:
        report = rebuild_alone(store, config, selection, progress=show)
    return output.print_report(report, as_json, _print_rebuild)


def _print_rebuild(report: RebuildReport) -> None:
    """What was made again, for people."""
    if report.exit_code is not ExitCode.CORRUPTION:
        print(report.sentence)
    output.write_facts([("queues", len(report.queues)), ("index", report.index), ("log end", report.end_offset),
                        ("bytes dispatched", report.log_bytes), ("seconds", report.seconds)])
    for topic, queue_id in report.kept:
        print(f"kept: queue {queue_id} of {output.printable(topic)}, of which the log holds no message any more")
    for note in report.notes:
        print(f"note: {output.printable(note)}")


@click.command()
@store_command
@click.argument("dest", type=GivenPath(path_type=Path), metavar="DEST")
@click.option("--quarantine/--no-quarantine", "with_quarantine", default=True, show_default=True,
              help="Take the messages in STORE/quarantine too, after those of the log.")
def salvage(store: Path, settings: dict[str, str], as_json: bool, dest: Path, with_quarantine: bool) -> int:
    """Make a new store at DEST from every whole record of a damaged one.

    The damaged store is not changed, and may be of a RocketMQ broker that will not start
    any more. Records keep their order and get new positions; queues, index and checkpoint
    are made anew. Whole messages that an earlier recovery put into STORE/quarantine follow the
    log's, under new queue offsets, unless `quarantine restore` has put them back. DEST must be
    absent or an empty folder. Where the store has no config/watermark (one of RocketMQ has none), it cannot be known whether messages
    are missing after the last one that was found, and the report says so.

    Exit codes: 0 nothing is known to be missing, 4 something had to be left out.

    \b
    Examples:
      pyengine salvage STORE DEST
      pyengine salvage STORE DEST --set mappedFileSizeCommitLog=1GiB --json
    """
    from pyengine.storage.recovery.report import RecoveryOptions
    from pyengine.storage.salvage.salvage import salvage as salvage_store

    existing_store(store)
    config = load_config(store, settings)
    options = RecoveryOptions.of(config)
    with byte_bar("salvage", None) as show:
        report = salvage_store(store, dest, config.geometry, options=options, progress=show,
                               with_quarantine=with_quarantine)
    keep_sizes(dest, replace(config, store_path_commit_log="", read_only_commit_log_store_paths=""))  # its log is its own
    output.print_answer(report.to_dict(), as_json, lambda: _print_salvage(report, dest))
    return report.exit_code


def _print_salvage(report: SalvageReport, dest: Path) -> None:
    """What came over and what did not, for people."""
    print(f"{report.records:,} records, {output.size_text(report.kept_bytes)}, are in {dest}")
    if report.quarantined:
        print(f"{report.quarantined:,} of them come from quarantine and follow the others")
    if report.skipped:
        output.write_table(("left out from", "to", "bytes", "why"), [
            (piece.start, piece.end, piece.end - piece.start, piece.reason) for piece in report.skipped])
    for start in report.missing_segments:
        print(f"the segment at {start:,} is missing")
    if report.moved_queues:
        output.write_table(("topic", "queue", "newest offsets moved up by"), [
            (topic, queue_id, by) for (topic, queue_id), by in sorted(report.moved_queues.items())])
    for note in report.notes:
        print(f"note: {output.printable(note)}")


UNDER_WAY_MAX = 256  # puts that are not answered yet
SETTLE_WAIT_S = 60.0  # until what a killed restore had submitted is executed
FLUSH_WAIT_S = 30.0   # until what was put is durable
FLUSH_STEP_S = 0.02


@click.command()
@store_command
@click.argument("action", type=click.Choice(["list", "show", "restore"]), default="list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--max-messages", type=click.IntRange(min=0), default=32, show_default=True, help="Show at most so many messages.")
@raw_option
def quarantine(
    store: Path, settings: dict[str, str], as_json: bool, action: str, names: tuple[str, ...], max_messages: int, raw: bool,
) -> int:
    """List what recovery moved aside; show the messages in a piece, or put them into the store again.

    A piece NAME is a part of the log that recovery cut (commitlog-..., pool-...), or what was made
    from the log and replaced (queue-..., derived-..., rebuild-...), which `rebuild` makes again.
    `restore` needs a running engine: it puts every whole message of a piece as a new message at the end of its
    queue, with the properties, flags and times of its producer, and notes that in the piece.
    Interrupted, it can be run again: a message comes once. Prepared and rolled back records of
    transactions are left out. Delete the piece by hand when it is no longer wanted.

    \b
    Examples:
      pyengine quarantine STORE
      pyengine quarantine STORE show commitlog-00000000000000047869-512
      pyengine quarantine STORE restore commitlog-00000000000000047869-512
    """
    from pyengine.storage.recovery.quarantine import list_quarantine

    existing_store(store)
    entries = {entry.name: entry for entry in list_quarantine(store)}
    if action == "list":
        if names:
            raise UsageError("list takes no NAME: give show or restore before it")
        _list(list(entries.values()), as_json)
        return ExitCode.OK
    if not names:
        raise UsageError(f"{action} what? name a piece: {command('quarantine', store, action, 'NAME')}")
    for name in names:
        if name not in entries:
            raise UsageError(f"{store}/quarantine holds no {name}: {command('quarantine', store)} lists what it holds")
    if action == "show":
        return _show([entries[name] for name in names], max_messages, raw, as_json)
    restored = restore(store, [entries[name] for name in names], settings)
    if as_json:
        output.write_json({"restored": restored})
    else:
        for name, count in restored.items():
            print(f"{count:,} message{'' if count == 1 else 's'} of {name} put into the store again")
    return ExitCode.OK


def _document(entry: QuarantineEntry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _list(entries: list[QuarantineEntry], as_json: bool) -> None:
    if as_json:
        output.write_json({"pieces": [_document(entry) for entry in entries]})
    elif not entries:
        print("nothing is in quarantine")
    else:
        output.write_table(("piece", "from offset", "bytes", "since", "restored", "why"), [
            (entry.name, entry.physical_offset, entry.size_bytes, entry.at, entry.restored, entry.problem or entry.reason)
            for entry in entries])


def _show(entries: list[QuarantineEntry], max_messages: int, raw: bool, as_json: bool) -> int:
    """What each piece is and the messages in it; FAILED if copied bytes are no longer those that recovery copied."""
    from pyengine.storage.recovery.quarantine import changed_content
    from pyengine.storage.salvage.log import messages_in

    code, documents = ExitCode.OK, []
    for entry in entries:
        problem = entry.problem
        if changed_content(entry):
            problem = "its bytes are not those that recovery copied: the SHA-256 of its note differs"
        code = ExitCode.FAILED if problem else code
        found, count = [], 0
        for message in messages_in(entry):
            count += 1
            if count <= max_messages:
                found.append(message)
        if as_json:
            documents.append(_document(entry) | {"problem": problem, "message_count": count, "messages": [
                output.message_document(one, raw) for one in found]})
            continue
        output.write_facts([("piece", entry.name), ("from", entry.origin), ("from offset", entry.physical_offset),
                            ("bytes", entry.size_bytes), ("since", entry.at), ("why", entry.reason), ("restored", entry.restored),
                            ("whole messages", count), *([("problem", problem)] if problem else [])])
        if found:
            print()
            output.write_message_table(found, raw)
    if as_json:
        output.write_json({"pieces": documents})
    return code


# ---- restore ---------------------------------------------------------------------


def restore(store: Path, entries: list[QuarantineEntry], settings: dict[str, str]) -> dict[str, int]:
    """Put the messages of these pieces into the running store; how many of each piece are there now.

    UsageError for a piece that holds none or is restored already, StoreBusyError while another restore runs, EngineError
    where a put failed or is not durable within FLUSH_WAIT_S: the next restore goes on there.
    """
    from pyengine import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S

    for entry in entries:
        if not entry.holds_messages:
            raise UsageError(f"{entry.name} holds nothing of the log: `pyengine rebuild` makes queues and index again")
        if entry.restored is not None:
            raise UsageError(f"{entry.name} is restored already: {entry.restored:,} messages")
        if entry.problem:
            raise UsageError(f"{entry.name} cannot be restored: {entry.problem}")
    with (_one_at_a_time(entries[0].path.parent), reading(store, settings) as reader,
          connect(store, ring_bytes=None, timeout_s=CONNECT_TIMEOUT_S, **settings) as producer):
        return {entry.name: _restore(entry, reader, producer) for entry in entries}


def _restore(entry: QuarantineEntry, reader: LiveStoreReader, producer: Producer) -> int:
    from pyengine.ipc.live_reader import settled_end
    from pyengine.storage.recovery.quarantine import note_restore
    from pyengine.storage.salvage.log import identity_of, is_put_again, messages_in

    there: Counter[tuple[object, ...]] = Counter()
    wanted = 0  # the end of all messages of the piece that are in the log
    if entry.restoring_from is None:  # after a power cut the log goes on below what is only written
        note_restore(entry, restoring_from=reader.max_physical_offset("flushed"))
    else:  # a restore was interrupted
        wanted = settled_end(reader.root, SETTLE_WAIT_S)
        there.update(identity_of(message) for message in _messages_from(reader, entry.restoring_from))
    count = 0
    under_way: deque[PutFuture] = deque()
    for message in messages_in(entry):
        if not is_put_again(message):
            continue
        count += 1
        if there[identity_of(message)]:
            there[identity_of(message)] -= 1
            continue
        under_way.append(_put(producer, message))
        if len(under_way) == UNDER_WAY_MAX:
            wanted = max(wanted, _stored_end(under_way.popleft(), entry))
    for future in under_way:
        wanted = max(wanted, _stored_end(future, entry))
    _wait_until_flushed(reader, wanted, entry)
    note_restore(entry, restored=count)
    return count


def _wait_until_flushed(reader: LiveStoreReader, wanted: int, entry: QuarantineEntry) -> None:
    deadline_s = time.monotonic() + FLUSH_WAIT_S
    while (flushed := reader.max_physical_offset("flushed")) < wanted:
        if not reader.is_live or time.monotonic() >= deadline_s:
            raise EngineError(f"{entry.name} is put, but not flushed yet: the log is durable up to {flushed:,}, and its messages end at "
                              f"{wanted:,}; run the command again, it puts nothing twice")
        time.sleep(FLUSH_STEP_S)


def _put(producer: Producer, message: Message) -> PutFuture:
    from pyengine.client.outgoing import RawMessage
    from pyengine.storage.salvage.log import properties_of_producer

    return producer.put_raw_async(RawMessage(
        message.topic, message.body, message.queue_id, properties_of_producer(message), message.flag,
        message.sys_flag & ~SYS_FLAG_TRANSACTION_MASK, message.born_timestamp_ms, message.born_host,
        reconsume_times=message.reconsume_times))


def _stored_end(future: PutFuture, entry: QuarantineEntry) -> int:
    """Where the message ends in the log; EngineError unless it is there."""
    result = future.result()
    if not result.stored:
        raise EngineError(f"{entry.name} is restored in part: a put was answered with {result.status.name}, {result.reason}; "
                          "run the command again, it goes on where this one ended")
    end: int = result.physical_offset + result.size_bytes
    return end


def _messages_from(reader: LiveStoreReader, offset: int) -> Iterator[Message]:
    """The log's messages from this offset on, as far as it is written now."""
    end, size_bytes = reader.max_physical_offset("written"), reader.commit_log.size_bytes
    offset = max(offset, reader.min_physical_offset)
    while offset < end:
        message = reader.message_at(offset, "written")
        if message is not None:
            yield message
        offset = offset + message.size_bytes if message is not None else (offset // size_bytes + 1) * size_bytes


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusyError(f"another `quarantine restore` works in {folder}: wait for it") from error
        yield
    finally:
        os.close(descriptor)
