"""`pyengine check`, `diff`, `recover`, `rebuild`, `salvage` and `quarantine`: check and repair a store.

    check        check a whole store
    diff         compare two stores
    recover      recover a store after a crash
    rebuild      rebuild queues and index from the log
    salvage      make a new store of the valid records of a damaged one
    quarantine   list and show what recovery moved to STORE/quarantine, and put its messages back
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import (
    GivenPath,
    byte_bar,
    master_option,
    raw_option,
    reading,
    spark_option,
    spark_session,
    store_command,
)
from pyengine.errors import EngineError, ExitCode, StoreBusyError, UsageError, command
from pyengine.formats.constants import SCHEDULE_TOPIC, SYS_FLAG_TRANSACTION_MASK, TRANSACTION_HALF_TOPIC
from pyengine.storage.config import existing_store, load_config

if TYPE_CHECKING:
    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import Producer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.results import PutResult
    from pyengine.storage.check.diff import DiffReport
    from pyengine.storage.check.report import CheckReport
    from pyengine.storage.recovery.quarantine import QuarantineEntry
    from pyengine.storage.recovery.rebuild import RebuildReport
    from pyengine.storage.recovery.report import CutQueue, RecoveryReport
    from pyengine.storage.salvage.salvage import SalvageReport


@click.command()
@store_command
@click.option("--acked", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, metavar="FILE",
              help="Acknowledged messages that the store must have, as JSON lines: topic, queue_id, queue_offset, "
                   "physical_offset (or null), body_sha256; `ingest --acked` writes such a file.")
@spark_option
@master_option
def check(store: Path, settings: dict[str, str], as_json: bool, acked: Path | None, on_spark: bool, master: str | None) -> int:
    """Check a whole store, and change nothing. The command reads log chain, CRCs, queues, index, config and
    checkpoint.

    While an engine runs, the command checks all dispatched data except the newest index file, which is
    being written; on a degraded engine everything; beside a RocketMQ broker what its checkpoint calls
    flushed and is older than 3 s. Each finding has a grade and a remedy: a notice needs no action;
    repairable data is still complete in the log; a loss is a message that is missing, damaged or
    unreachable in this copy. An error (exit code 3) breaks a promise of the store; a warning is
    what recovery repairs, or what RocketMQ leaves that way; an info needs no action.

    --spark gives the same result and reads in Spark's workers, on several processors or hosts
    (docs/spark.md). For a store of some GiB on one host the command is faster without it.

    \b
    Examples:
      pyengine check STORE
      pyengine check STORE --acked acks.jsonl --json
      pyengine check STORE --spark --master 'local[4]'
    """
    existing_store(store)
    config = load_config(store, settings)
    if on_spark or master is not None:
        with spark_session("pyengine check", master) as spark, byte_bar("check", None) as show:
            from pyengine.spark.store_verify import verify

            report = verify(spark, store, config=config, acked=acked, progress=show)
    else:
        from pyengine.ipc.live_reader import check_now

        with byte_bar("check", None) as show:
            report = check_now(store, config, acked, show)
    output.print_answer(report.to_dict(), as_json, lambda: _print_report(report))
    return report.exit_code


def _print_report(report: CheckReport) -> None:
    """Print the findings, worst first, and what was checked."""
    if report.findings:
        output.write_table(("severity", "grade", "file", "offset", "what"), [
            (finding.severity.value, finding.grade.label, finding.file, finding.offset, finding.text)
            for finding in report.findings])
        print()
        for number, step in enumerate(report.advice, 1):
            print(f"to do{f' ({number})' if len(report.advice) > 1 else ''}: {output.printable(step)}")
    if report.left_out:
        print(f"{report.left_out:,} findings of the same kinds are not shown")
    print(report.sentence)
    output.write_facts([
        ("grade", report.grade.label), ("log", f"{report.min_offset:,} to {report.end_offset:,}"), ("messages", report.messages),
        ("queues", f"{report.queues:,} with {report.queue_entries:,} entries"),
        ("index", f"{report.index_files:,} files with {report.index_keys:,} keys"),
        *([("acknowledged", f"{report.acked:,} looked for, {report.acked_missing:,} missing")] if report.acked else []),
        ("read", f"{output.size_text(report.bytes)} in {report.seconds:.2f} s")])


@click.command()
@store_command
@click.argument("other", type=GivenPath(path_type=Path), metavar="OTHER")
def diff(store: Path, settings: dict[str, str], as_json: bool, other: Path) -> int:
    """Compare a store with its slave or its copy. The command changes nothing.

    The command compares the logs record by record, over the range that both have, and the ends of
    the queues. A copy whose log ends earlier, or begins later after deletions, is reported as such
    and does not count as different. The report has the first offset that differs, records that only
    one store has, fields of records that differ, queues with different ends, and counts by topic.
    Engines may run on both stores: the command ignores later messages.

    Exit codes: 0 equal in the range that both have, 3 different, 1 no part of the log is in both.

    \b
    Examples:
      pyengine diff STORE OTHER
      pyengine diff STORE OTHER --json
    """
    existing_store(store)
    existing_store(other)
    from pyengine.ipc.live_reader import diff_now

    with byte_bar("diff", None) as show:
        report = diff_now(store, other, settings=settings, progress=show)
    output.print_answer(report.to_dict(), as_json, lambda: _print_diff(report))
    return report.exit_code


def _print_diff(report: DiffReport) -> None:
    """Print the differences, then counts by topic."""
    document = report.to_dict()
    if report.found.differences:
        output.write_table(("offset", "topic", "queue", "number", "what"), [
            (one.physical_offset, one.topic, one.queue_id, one.queue_offset, _difference_text(one.kind, one.fields, one.bad_crc))
            for one in report.found.differences], title="records")
    if document["left_out"]:
        print(f"{document['left_out']:,} more records that differ are not shown")
    if report.queues:
        output.write_table(("topic", "queue", "end in STORE", "end in OTHER"), [
            (one.topic, one.queue_id, one.store, one.other) for one in report.queues], title="queues")
    if report.found.topics:
        output.write_table(("topic", "messages in STORE", "in OTHER", "differ", "only in STORE", "only in OTHER"), [
            (topic, counts.store, counts.other, counts.differing, counts.only_in_store, counts.only_in_other)
            for topic, counts in sorted(report.found.topics.items())], title="topics")
    print(report.sentence)
    for note in report.notes:
        print(f"note: {output.printable(note)}")
    output.write_facts([
        *((name, f"{one.min_offset:,} to {one.end_offset:,}  {output.printable(one.path)}")
          for name, one in (("STORE", report.store), ("OTHER", report.other))),
        ("compared", f"{report.start:,} to {report.end:,}" if report.start < report.end else "nothing"),
        ("read", f"{output.size_text(2 * max(0, report.end - report.start))} in {report.seconds:.2f} s")])


def _difference_text(kind: str, fields: tuple[str, ...], bad_crc: tuple[str, ...]) -> str:
    """Return for example `only in STORE` or `body differs; the body does not fit its checksum in OTHER`."""
    text = f"{', '.join(fields)} {'differ' if len(fields) > 1 else 'differs'}" if kind == "differs" else kind.replace("_", " ")
    return text.replace("only in store", "only in STORE").replace("only in other", "only in OTHER") + "".join(
        f"; the body does not fit its checksum in {where.upper()}" for where in bad_crc)


@click.command()
@store_command
@click.option("--accept-loss", is_flag=True,
              help="Recover even if durable bytes are damaged: everything after the damage goes to quarantine.")
@click.option("--dry-run", is_flag=True, help="Print what would be truncated, kept and moved to quarantine; change nothing.")
def recover(store: Path, settings: dict[str, str], as_json: bool, accept_loss: bool, dry_run: bool) -> int:
    """Recover a store that was not stopped in order. The command finds the end of its log, truncates torn records, and
    brings queues and index up to date.

    `start` does the same first. The result is that of RocketMQ's own recovery, but removed bytes
    go to STORE/quarantine before. Bytes that are only in the pool buffers of a dead engine are
    written to the log. If durable bytes are damaged, the command refuses the store and changes
    nothing, unless --accept-loss is given. After an interruption run it again.

    --dry-run reads the same data and prints what the command would do, with its exit code. It reports
    what would leave the log, queues and index. It does not check the offsets of groups, and does not
    find queues that lack entries in their middle.

    Exit codes: 0 recovered, 4 something went to quarantine, 3 refused, 5 in use.

    \b
    Examples:
      pyengine recover STORE --dry-run
      pyengine recover STORE
      pyengine recover STORE --accept-loss --json
    """
    from pyengine.ipc.crashed_engine_memory import preview_offline, recover_offline

    existing_store(store)
    config = load_config(store, settings)
    run = preview_offline if dry_run else recover_offline
    with byte_bar("recover", None) as show:
        report = run(store, config, progress=show, accept_loss=accept_loss)
    return output.print_report(report, as_json, _print_recovery)


def _print_recovery(report: RecoveryReport) -> None:
    """Print what a recovery did."""
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
@click.option("--topic", default=None, help="Only this topic's queues, and the index only with --index.")
@click.option("--queue-id", type=click.IntRange(min=0), default=None, help="Only this queue of the topic.")
@click.option("--queues", is_flag=True, help="Rebuild queues, and the index only with --index.")
@click.option("--index", is_flag=True, help="Rebuild the index, and queues only with --queues or --topic.")
def rebuild(
    store: Path, settings: dict[str, str], as_json: bool, topic: str | None, queue_id: int | None, queues: bool, index: bool,
) -> int:
    """Rebuild queues and index from the commit log alone.

    The command rebuilds all of them, or those that the options name, with light queues and extension.
    It moves the old files to STORE/quarantine. It does not change the log, except that it first
    recovers a store that was not stopped in order. The store must not be running. After an
    interruption run the command again; the next start also finishes it. A queue without any message
    in the log stays as it is.

    Exit codes: 0 rebuilt, 3 refused (durable bytes are damaged; nothing was changed),
    4 rebuilt, and part of the log went to quarantine, 5 in use.

    \b
    Examples:
      pyengine rebuild STORE
      pyengine rebuild STORE --topic orders --queue-id 0
      pyengine rebuild STORE --index --json
    """
    existing_store(store)
    from pyengine.ipc.crashed_engine_memory import rebuild_offline
    from pyengine.storage.recovery.rebuild import Selection

    selection = Selection(queues=queues or topic is not None or not index, index=index or not (queues or topic is not None),
                          topic=topic, queue_id=queue_id)
    config = load_config(store, settings)
    with byte_bar("rebuild", None) as show:
        report = rebuild_offline(store, config, selection, progress=show)
    return output.print_report(report, as_json, _print_rebuild)


def _print_rebuild(report: RebuildReport) -> None:
    """Print what was rebuilt."""
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
              help="Copy the messages in STORE/quarantine too, after those of the log.")
def salvage(store: Path, settings: dict[str, str], as_json: bool, dest: Path, with_quarantine: bool) -> int:
    """Make a new store of every whole record of a damaged one.

    The command does not change the damaged store, which may be one of a RocketMQ broker that does not
    start any more. Records keep their order and get new positions; queues, index and checkpoint are
    new. Whole messages in STORE/quarantine follow those of the log, with new queue offsets, unless
    `quarantine restore` has put them back. DEST must not exist or be an empty folder. For a store
    without config/watermark (RocketMQ writes none) the report says that messages after the last
    found one may be missing.

    Exit codes: 0 nothing is known to be missing, 4 something was left out.

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
                               with_quarantine=with_quarantine, settings=config)
    output.print_answer(report.to_dict(), as_json, lambda: _print_salvage(report, dest))
    return report.exit_code


def _print_salvage(report: SalvageReport, dest: Path) -> None:
    """Print what was copied and what was left out."""
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


IN_FLIGHT_MAX = 256  # unanswered puts
SETTLE_WAIT_S = 60.0  # until the writer has executed what a killed restore submitted
FLUSH_WAIT_S = 30.0   # until the messages are durable
FLUSH_POLL_INTERVAL_S = 0.02


@click.command()
@click.argument("action", type=click.Choice(["list", "show", "restore"]), default="list")
@store_command
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--max-messages", type=click.IntRange(min=0), default=32, show_default=True, help="Show at most this many messages.")
@raw_option
def quarantine(
    store: Path, settings: dict[str, str], as_json: bool, action: str, names: tuple[str, ...], max_messages: int, raw: bool,
) -> int:
    """List or show what recovery cut, or put it back. Recovery moves what it cuts to STORE/quarantine, in pieces.

    A piece NAME is a part of the log that recovery removed (commitlog-..., pool-...), or replaced files
    of queues and index (queue-..., derived-..., rebuild-...), which `rebuild` makes from the log.
    `restore` needs a running engine: it puts every whole message of a piece as a new message at the end
    of its queue, with the properties, flags and times of its producer, and notes that in the piece. After
    an interruption run it again: it puts each message once. It leaves out prepared and rolled back
    records of transactions, half messages with the messages that ended them, and delayed messages that
    are delivered in these pieces: name all pieces of a cut together. Delete a piece by hand when you no longer need it.

    \b
    Examples:
      pyengine quarantine STORE
      pyengine quarantine show STORE commitlog-00000000000000047869-512
      pyengine quarantine restore STORE commitlog-00000000000000047869-512
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
        raise UsageError(f"{action} needs the name of a piece: {command('quarantine', action, store, 'NAME')}")
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
    """Print each piece and its messages; return FAILED if a piece differs from the bytes that recovery copied."""
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
    """Put the messages of these pieces into the running store; return how many of each piece the store now has.

    UsageError for a piece without messages or one that is restored already, StoreBusyError while another restore runs,
    EngineError if a put fails or is not durable within FLUSH_WAIT_S: the next restore continues there.
    """
    from pyengine import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S
    from pyengine.storage.salvage.log import delayed_identity, ended_half, is_delivery, messages_in

    for entry in entries:
        if not entry.holds_messages:
            raise UsageError(f"{entry.name} holds nothing of the log: `pyengine rebuild` makes queues and index again")
        if entry.restored is not None:
            raise UsageError(f"{entry.name} is restored already: {entry.restored:,} messages")
        if entry.problem:
            raise UsageError(f"{entry.name} cannot be restored: {entry.problem}")
    with (_one_at_a_time(entries[0].path.parent), reading(store, settings) as reader,
          connect(store, ring_bytes=None, timeout_s=CONNECT_TIMEOUT_S, refusals="return", **settings) as producer):
        settled = Counter[object](ended_half(message) or (delayed_identity(message) if is_delivery(message) else None)
                                  for entry in entries for message in messages_in(entry))
        return {entry.name: _restore(entry, reader, producer, settled) for entry in entries}


def _is_wanted(message: Message, entry: QuarantineEntry, reader: LiveStoreReader, settled: Counter[object]) -> bool:
    """Return whether to put a message of the piece again: of a transaction only what cannot mislead the check-back.

    `settled` counts half messages that have ended and delayed messages that are delivered; these are left out. An op message
    ends a half message by its queue offset. After the cut another half message has the offset of one that was cut.
    """
    from pyengine.storage.salvage.log import delayed_identity, ended_half, is_put_again

    if message.topic == TRANSACTION_HALF_TOPIC:
        return not settled[message.queue_id, message.queue_offset]
    if message.topic == SCHEDULE_TOPIC and settled[identity := delayed_identity(message)]:
        settled[identity] -= 1
        return False
    half = ended_half(message)
    if half is None:
        return is_put_again(message)
    found = reader.get_message(TRANSACTION_HALF_TOPIC, *half, 1, level="written").messages
    return bool(found) and found[0].physical_offset < entry.physical_offset


def _restore(entry: QuarantineEntry, reader: LiveStoreReader, producer: Producer, settled: Counter[object]) -> int:
    from pyengine.ipc.live_reader import settled_end
    from pyengine.storage.recovery.quarantine import note_restore
    from pyengine.storage.salvage.log import identity_of, messages_in

    there: Counter[tuple[object, ...]] = Counter()
    wanted = 0  # the end of all messages of the piece that are in the log
    if entry.restoring_from is None:  # after a power cut the log continues below what is only written
        note_restore(entry, restoring_from=reader.max_physical_offset("flushed"))
    else:  # a restore was interrupted
        wanted = settled_end(reader.root, SETTLE_WAIT_S)
        there.update(identity_of(message) for message in _messages_from(reader, entry.restoring_from))
    count = 0
    in_flight: deque[PutFuture[PutResult]] = deque()
    for message in messages_in(entry):
        if not _is_wanted(message, entry, reader, settled):
            continue
        count += 1
        if there[identity_of(message)]:
            there[identity_of(message)] -= 1
            continue
        in_flight.append(_put(producer, message))
        if len(in_flight) == IN_FLIGHT_MAX:
            wanted = max(wanted, _stored_end(in_flight.popleft(), entry))
    for future in in_flight:
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
        time.sleep(FLUSH_POLL_INTERVAL_S)


def _put(producer: Producer, message: Message) -> PutFuture[PutResult]:
    from pyengine.client.outgoing import RawMessage
    from pyengine.storage.salvage.log import properties_of_producer

    return producer.put_raw_async(RawMessage(
        message.topic, message.body, message.queue_id, properties_of_producer(message), message.flag,
        message.sys_flag & ~SYS_FLAG_TRANSACTION_MASK, message.born_timestamp_ms, message.born_host,
        reconsume_times=message.reconsume_times))


def _stored_end(future: PutFuture[PutResult], entry: QuarantineEntry) -> int:
    """Return the end of the put message in the log; EngineError if it was not stored."""
    result = future.result()
    if not result.stored:
        raise EngineError(f"{entry.name} is restored in part: a put was answered with {result.status.name}, {result.reason}; "
                          "run the command again, it continues where this one ended")
    end: int = result.physical_offset + result.size_bytes
    return end


def _messages_from(reader: LiveStoreReader, offset: int) -> Iterator[Message]:
    """Yield the log's messages from this offset on, up to its current end."""
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
