"""`pyengine check`, `diff`, `recover`, `rebuild`, `salvage` and `quarantine`: check and repair a store.

    check        check a whole store
    diff         compare two stores
    recover      recover a store after a crash
    rebuild      rebuild queues and index from the log
    salvage      make a new store of the valid records of a damaged one
    quarantine   list and show what recovery moved to STORE/quarantine
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import (
    GivenPath,
    Reply,
    byte_bar,
    master_option,
    raw_option,
    spark_option,
    spark_session,
    store_command,
)
from pyengine.errors import ExitCode, UsageError, command
from pyengine.storage.config import existing_store, load_config

if TYPE_CHECKING:
    from pyengine.storage.check.diff import DiffReport
    from pyengine.storage.check.report import CheckReport
    from pyengine.storage.recovery.quarantine import QuarantineEntry
    from pyengine.storage.recovery.rebuild import RebuildReport
    from pyengine.storage.recovery.report import CutQueue, RecoveryReport
    from pyengine.storage.salvage import SalvageReport


@click.command()
@store_command
@click.option("--acked", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, metavar="FILE",
              help="Messages that the store must have, as `ingest --acked` writes them.")
@spark_option
@master_option
def check(store: Path, settings: dict[str, str], acked: Path | None, on_spark: bool, master: str | None) -> Reply:
    """Check a whole store, and change nothing. It reads log, CRCs, queues, index, config and checkpoint.

    Beside an engine it checks what is dispatched; beside a broker what its checkpoint calls flushed. An error (exit code 3) breaks
    a promise of the store; a warning is repairable.

    \b
    Examples:
      pyengine check STORE --acked acks.jsonl --json
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
    return Reply(report.to_dict(), lambda: _print_report(report), report.exit_code)


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
def diff(store: Path, settings: dict[str, str], other: Path) -> Reply:
    """Compare a store with its slave or its copy. It compares each record and the ends of the queues.

    Engines may run on both.

    Exit codes: 0 equal in the range that both have, 3 different, 1 no part of the log is in both.

    \b
    Example:
      pyengine diff STORE OTHER
    """
    existing_store(store)
    existing_store(other)
    from pyengine.ipc.live_reader import diff_now

    with byte_bar("diff", None) as show:
        report = diff_now(store, other, settings=settings, progress=show)
    return Reply(report.to_dict(), lambda: _print_diff(report), report.exit_code)


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
    _print_notes(report.notes)
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
              help="Move everything after damage to quarantine.")
@click.option("--dry-run", is_flag=True, help="Print what would be done; change nothing.")
def recover(store: Path, settings: dict[str, str], accept_loss: bool, dry_run: bool) -> Reply:
    """Recover a store that was not stopped in order. `start` does it first.

    Bytes that are removed go to STORE/quarantine. Damaged durable bytes are refused without --accept-loss.

    Exit codes: 3 refused, 4 something went to quarantine.

    \b
    Examples:
      pyengine recover STORE --accept-loss
    """
    from pyengine.ipc.crashed_engine_memory import preview_offline, recover_offline

    existing_store(store)
    config = load_config(store, settings)
    run = preview_offline if dry_run else recover_offline
    with byte_bar("recover", None) as show:
        report = run(store, config, progress=show, accept_loss=accept_loss)
    return Reply.of(report, _print_recovery)


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
    losses = [*(("segment", name, "deleted: nothing in it is of the log") for name in report.removed_files),
              *(("queue", f"{cut.topic} {cut.queue_id}", _queue_loss(cut)) for cut in report.cut_queues),
              *(("index file", name, f"deleted: {label}") for name, label in report.deleted_index_files)]
    output.write_tables(
        (("quarantined", "from offset", "bytes", "why"), [
            (str(piece.path), piece.physical_offset, piece.size_bytes, piece.reason) for piece in report.quarantined]),
        (("cut", "which", "what"), losses))
    _print_notes(report.notes)


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        output.note(note, sys.stdout)


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
def rebuild(store: Path, settings: dict[str, str], topic: str | None, queue_id: int | None, queues: bool, index: bool) -> Reply:
    """Rebuild queues and index from the commit log. Options select some.

    Old files go to STORE/quarantine. The store must be stopped.

    Exit codes: 3 refused (durable bytes are damaged), 4 part of the log went to quarantine.

    \b
    Examples:
      pyengine rebuild STORE --topic orders --queue-id 0
    """
    existing_store(store)
    from pyengine.ipc.crashed_engine_memory import rebuild_offline
    from pyengine.storage.recovery.rebuild import Selection

    selection = Selection(queues=queues or topic is not None or not index, index=index or not (queues or topic is not None),
                          topic=topic, queue_id=queue_id)
    config = load_config(store, settings)
    with byte_bar("rebuild", None) as show:
        report = rebuild_offline(store, config, selection, progress=show)
    return Reply.of(report, _print_rebuild)


def _print_rebuild(report: RebuildReport) -> None:
    """Print what was rebuilt."""
    if report.exit_code is not ExitCode.CORRUPTION:
        print(report.sentence)
    output.write_facts([("queues", len(report.queues)), ("index", report.index), ("log end", report.end_offset),
                        ("bytes dispatched", report.log_bytes), ("seconds", report.seconds)])
    for topic, queue_id in report.kept:
        print(f"kept: queue {queue_id} of {output.printable(topic)}, of which the log holds no message any more")
    _print_notes(report.notes)


@click.command()
@store_command
@click.argument("dest", type=GivenPath(path_type=Path), metavar="DEST")
@click.option("--quarantine/--no-quarantine", "with_quarantine", default=True, show_default=True,
              help="Copy the messages in STORE/quarantine too.")
def salvage(store: Path, settings: dict[str, str], dest: Path, with_quarantine: bool) -> Reply:
    """Make a new store of every whole record of a damaged one. The damaged one, also a broker's, stays as it is.

    Records keep their order, those in STORE/quarantine last (docs/recovery.md).

    Exit code 4: something was left out.

    \b
    Examples:
      pyengine salvage STORE/quarantine DEST
    """
    from pyengine.storage.commit_log import log_exists
    from pyengine.storage.recovery.quarantine import is_quarantine
    from pyengine.storage.salvage import salvage as salvage_store

    if is_quarantine(store):
        is_inside = log_exists(store.parent)
        config = load_config(store.parent if is_inside else None, settings)
    else:
        config = load_config(existing_store(store), settings)
    with byte_bar("salvage", None) as show:
        report = salvage_store(store, dest, config.geometry, options=config, progress=show,
                               with_quarantine=with_quarantine, settings=config)
    return Reply(report.to_dict(), lambda: _print_salvage(report, dest), report.exit_code)


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
    _print_notes(report.notes)


@click.command()
@click.argument("action", type=click.Choice(["list", "show"]), default="list")
@store_command
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--max-messages", type=click.IntRange(min=0), default=32, show_default=True, help="Show at most this many messages.")
@raw_option
def quarantine(store: Path, settings: dict[str, str], action: str, names: tuple[str, ...], max_messages: int, raw: bool) -> Reply:
    """List or show what recovery cut. The pieces are in STORE/quarantine.

    `pyengine salvage STORE/quarantine DEST` makes a store of all messages in them.

    \b
    Example:
      pyengine quarantine show STORE commitlog-00000000000000047869-512
    """
    from pyengine.storage.recovery.quarantine import list_quarantine

    existing_store(store)
    entries = {entry.name: entry for entry in list_quarantine(store)}
    if action == "list":
        if names:
            raise UsageError("list takes no NAME: give show before it")
        return Reply({"pieces": [_document(entry) for entry in entries.values()]}, lambda: _list(list(entries.values())))
    if not names:
        raise UsageError(f"{action} needs the name of a piece: {command('quarantine', action, store, 'NAME')}")
    for name in names:
        if name not in entries:
            raise UsageError(f"{store}/quarantine holds no {name}: {command('quarantine', store)} lists what it holds")
    return _show([entries[name] for name in names], max_messages, raw)


def _document(entry: QuarantineEntry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _list(entries: list[QuarantineEntry]) -> None:
    if not entries:
        print("nothing is in quarantine")
        return
    output.write_table(("piece", "from offset", "bytes", "since", "why"), [
        (entry.name, entry.physical_offset, entry.size_bytes, entry.at, entry.problem or entry.reason) for entry in entries])


def _show(entries: list[QuarantineEntry], max_messages: int, raw: bool) -> Reply:
    """Show each piece and its messages; FAILED if a piece differs from the bytes that recovery copied."""
    from pyengine.storage.recovery.quarantine import changed_content
    from pyengine.storage.salvage import messages_in

    code, documents, shown = ExitCode.OK, [], []
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
        documents.append(_document(entry) | {"problem": problem, "message_count": count, "messages": [
            output.message_document(one, raw) for one in found]})
        shown.append((entry, problem, count, found))

    def show() -> None:
        for entry, problem, count, found in shown:
            output.write_facts([("piece", entry.name), ("from", entry.origin), ("from offset", entry.physical_offset),
                                ("bytes", entry.size_bytes), ("since", entry.at), ("why", entry.reason),
                                ("whole messages", count), *([("problem", problem)] if problem else [])])
            if found:
                print()
                output.write_message_table(found, raw)

    return Reply({"pieces": documents}, show, code)
