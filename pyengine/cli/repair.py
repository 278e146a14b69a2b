"""`pyengine check`, `diff`, `recover`, `rebuild`, `salvage` and `quarantine`: check and repair a store.

    check        check a whole store
    diff         compare two stores
    recover      recover a store after a crash
    rebuild      rebuild queues and index from the log
    salvage      make a new store of the valid records of a damaged one
    quarantine   list and show what recovery moved to STORE/quarantine
"""

from __future__ import annotations

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
from pyengine.formats.paths import StorePaths
from pyengine.storage.config import existing_store, load_config

if TYPE_CHECKING:
    from pyengine.storage.recovery.quarantine import QuarantineEntry


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
    config = load_config(existing_store(store), settings)
    if on_spark or master is not None:
        with spark_session("pyengine check", master) as spark, byte_bar("check", None) as show:
            from pyengine.spark.store_verify import verify

            report = verify(spark, store, config=config, acked=acked, progress=show)
    else:
        from pyengine.ipc.live_reader import check_now

        with byte_bar("check", None) as show:
            report = check_now(store, config, acked, show)
    return Reply.of(
        report, "grade min_offset end_offset messages queues queue_entries index_files index_keys acked? acked_missing? bytes seconds "
        "left_out?", repairs=False, findings="severity grade file offset text")


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
    document = report.to_dict()

    def show_differences() -> None:
        print(report.sentence)
        output.write_rows([document[name] | {"which": name.upper()} for name in ("store", "other")], "which path min_offset end_offset")
        output.write_document(
            document | {"compared": f"{report.start:,} to {report.end:,}" if report.start < report.end else "nothing", "differences": [
                one | {name: ", ".join(one[name]) for name in ("fields", "bad_crc")} for one in document["differences"]]},
            "compared left_out? seconds", differences="physical_offset topic queue_id queue_offset kind fields bad_crc",
            queues="topic queue_id store other: queues with other ends", topics="topic store other differing only_in_store only_in_other")

    return Reply(document, show_differences, report.exit_code)


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
    from pyengine.ipc.crashed_engine_memory import recover_offline

    config = load_config(existing_store(store), settings)
    with byte_bar("recover", None) as show:
        report = recover_offline(store, config, progress=show, accept_loss=accept_loss, dry_run=dry_run)
    return Reply.of(
        report, "path end_offset scan_from records kept_bytes# cut_bytes# drained_bytes# dispatched_bytes# queue_entries_removed "
        "index_files_removed shared_state seconds gigabytes_per_second", quarantined="path physical_offset size_bytes# reason",
        removed_files="segment", cut_queues="topic queue_id entries deleted_files cleared", deleted_index_files="index_file why")


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
    return Reply.of(report, "queues index end_offset log_bytes# seconds",
                    kept="topic queueId: kept, of which the log holds no message any more")


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

    if not log_exists(store) and is_quarantine(store):
        is_inside = log_exists(store.parent)
        config = load_config(store.parent if is_inside else None, settings)
    else:
        config = load_config(existing_store(store), settings)
    with byte_bar("salvage", None) as show:
        report = salvage_store(store, dest, config.geometry, options=config, progress=show,
                               with_quarantine=with_quarantine, settings=config)
    return Reply.of(
        report, "dest records kept_bytes# quarantined? seconds", skipped="start end bytes# reason: left out",
        missing_segments="start: segments that are missing", moved_queues="topic queueId by: newest offsets moved up",
        more={"dest": dest, "skipped": [asdict(piece) | {"bytes": piece.end - piece.start} for piece in report.skipped]})


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
    from pyengine.storage.recovery.quarantine import list_pieces

    existing_store(store)
    entries = {entry.name: entry for entry in list_pieces(StorePaths(store).quarantine)}
    if action == "list":
        if names:
            raise UsageError("list takes no NAME: give show before it")
        pieces = [_document(entry) for entry in entries.values()]
        return Reply({"pieces": pieces}, (lambda: output.write_rows(pieces, "name physical_offset size_bytes# at reason problem"))
                     if pieces else "nothing is in quarantine")
    if not names:
        raise UsageError(f"{action} needs the name of a piece: {command('quarantine', action, store, 'NAME')}")
    for name in names:
        if name not in entries:
            raise UsageError(f"{store}/quarantine holds no {name}: {command('quarantine', store)} lists what it holds")
    return _show([entries[name] for name in names], max_messages, raw)


def _document(entry: QuarantineEntry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _show(entries: list[QuarantineEntry], max_messages: int, raw: bool) -> Reply:
    """Show each piece and its messages; FAILED if a piece differs from the bytes that recovery copied."""
    from pyengine.storage.recovery.quarantine import changed_content
    from pyengine.storage.salvage import messages_in

    code, shown = ExitCode.OK, []
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
        shown.append((_document(entry) | {"problem": problem, "message_count": count, "messages": [
            output.message_document(one, raw) for one in found]}, found))

    def show() -> None:
        for document, found in shown:
            output.write_document(document, "name origin physical_offset size_bytes# at reason message_count problem?")
            if found:
                print()
                output.write_message_table(found, raw)

    return Reply({"pieces": [document for document, _ in shown]}, show, code)
