"""The whole-store check: log, queues, index, config/, checkpoint, watermark and a list of acknowledged messages. It never writes.

The list of acknowledged messages has one JSON object per line: topic, queue_id, queue_offset, physical_offset, body_sha256 (hex). The
physical offset may be null (put_many returns only that of its first message): then it is taken from the queue entry.

Of config/ it checks the tables that a start needs and that cannot be rebuilt from the log.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyengine.engine_config import EngineConfig
from pyengine.errors import CorruptionError, DiskError, EngineError, FormatError, StoreRefusedError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import is_live
from pyengine.formats.paths import StorePaths, segment_name, segment_start
from pyengine.formats.record import Message, decode_record
from pyengine.formats.small_file import PARSE_ERRORS, Checkpoint, decode_config
from pyengine.native.scan import classify
from pyengine.storage import config_table
from pyengine.storage.check.parts import (
    RunPieces,
    StoreUnderCheck,
    check_extensions,
    check_index,
    check_log,
    check_queues,
    index_pieces,
    queue_pieces,
    run_here,
)
from pyengine.storage.check.report import REFUSED_BY_RECOVER, CheckReport, FileFinding, Severity
from pyengine.storage.checkpoint import (
    REBUILD,
    StopNotes,
    read_cut,
    read_stop_notes,
    read_sync_failure,
    read_watermark,
)
from pyengine.storage.commit_log import Log, LogScan, find_end, missing_folder, own_watermark
from pyengine.storage.consumer_offset import decode_delay_offsets, decode_offsets
from pyengine.storage.durable_file import ConfigFile
from pyengine.storage.index_file import list_index_files
from pyengine.storage.later_format import find_later_features, queues_are_elsewhere
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.derived import QueueState, list_index, list_queues, lost_messages, read_entry
from pyengine.storage.recovery.recover import copied_note, would_refuse
from pyengine.storage.recovery.report import Progress


def check(
    store: MessageStore,
    *,
    acked: Path | str | None = None,
    limit: int | None = None,
    options: EngineConfig | None = None,
    progress: Progress | None = None,
    run: RunPieces = run_here,
    beside: str = "",
) -> CheckReport:
    """Check the whole store; the report's exit code is 3 if a finding is an error.

    `limit` is for a store that an engine has open: its `reput_from`, beyond which
    nothing is checked. `beside` names a broker that has the store open: then `limit` is the offset that its checkpoint has flushed.
    Missing light queues are findings if `options` enable them, or if the store has any.
    `run` runs the pieces of the reading (default: in this process). Raises NotAStoreError, UsageError (for the list of acknowledged
    messages), DiskError. Files that RocketMQ would refuse are findings, not exceptions.
    """
    store.require_exists()
    started_s = time.monotonic()
    report, reading, left, is_running = CheckReport(), read_watermark(store), read_stop_notes(store), limit is not None
    was_stopped = is_running or not left.abort_exists
    try:
        segments, queues = store.list_log(), list_queues(store)
        index_files = list_index_files(store)
    except StoreRefusedError as error:
        _, inside, rest = str(error).partition(f"{store.root}/")  # the root may have spaces; names below it have none
        _add_refusal(store.root, report, rest.split()[0].rstrip(":") if inside else "", error)
        if not is_running:
            _check_notes(store.root, report, reading.damage, left)
        report.seconds = time.monotonic() - started_s
        return report
    log = Log.of(segments, store.segment_bytes, own_watermark(reading, segments[0].start_offset if segments else 0))
    end = LogScan(limit, limit, "range_end") if limit is not None else find_end(store.root, log)
    log = replace(log, end=end.end_offset)
    if beside:
        report.info("broker", "lock", None, f"{beside} has the store open: this check covers the log up to {log.end:,}, with its "
                                              "queues and keys, that its checkpoint has flushed; later records are not checked")
    if missing := missing_folder(store.root, segments, is_running=is_running, is_noted=not beside):
        report.error("gap", "", None, missing)
    copied, is_refused = copied_note(store, reading, options)
    if is_refused:
        report.error("copy", "config/watermark", None, copied)
    elif copied:
        report.info("copy", "config/watermark", None, copied)
    checked = StoreUnderCheck(store, log, run, report, own_watermark(reading, 0), was_stopped, is_running)
    _check_files(checked, left, end, queues, index_files, options or EngineConfig(), progress or (lambda done, total: None))
    if acked is not None:
        _check_acked(checked, Path(acked))
    _check_config(store.root, report, is_broker_running=bool(beside))
    if not is_running:
        _check_notes(store.root, report, reading.damage, left)
        _check_checkpoint(checked, left.checkpoint)
    log.forget()
    if not is_running:
        report.findings = _with_limits(store, report.findings, checked.is_ours)
    report.findings.sort(key=lambda finding: list(Severity).index(finding.severity))
    report.seconds = time.monotonic() - started_s
    return report


def _check_files(
    checked: StoreUnderCheck, left: StopNotes, end: LogScan, queues: list[QueueState], index_files: list[Path],
    options: EngineConfig, progress: Progress,
) -> None:
    """Check the log up to `end`, and compare queues and index with it."""
    store, log, report = checked.store, checked.log, checked.report
    if not options.message_index_enable:
        index_files = []
    check_log(checked, end, progress)
    if not checked.is_ours and not checked.is_running and left.marker is None:
        was_emptied = checked.was_stopped and not checked.is_cut_short
        known = lost_messages(log, queues, list_index(store), log.end, was_emptied=was_emptied)
        if known:
            report.error("lost messages", "commitlog", log.end, known)
    for one in find_later_features(store.root):
        report.warning("later format", one.path, None, one.what)
    are_elsewhere = queues_are_elsewhere(store.root)
    outcomes = checked.run([*(() if are_elsewhere else queue_pieces(checked, queues)), *index_pieces(checked, index_files)], log)
    if not are_elsewhere:
        check_queues(checked, queues, outcomes, expects_light_queues=options.enable_multi_dispatch)
        check_extensions(checked, queues)
    check_index(checked, outcomes)


def _with_limits(store: MessageStore, findings: list[FileFinding], is_ours: bool) -> list[FileFinding]:
    """Return the findings, with what `recover` and `rebuild` would not repair."""
    is_damaged = any(finding.kind in REFUSED_BY_RECOVER or finding.kind == "copy" and finding.severity is Severity.ERROR
                     for finding in findings)
    recover_is_refused = is_damaged and would_refuse(store)
    lacking = {finding.file for finding in findings if finding.kind == "log gap"}  # queues with holes in the log
    return [
        replace(finding, recover_is_refused=recover_is_refused,
                rebuild_is_vain=recover_is_refused or is_damaged and is_ours or "/".join(finding.file.split("/")[:3]) in lacking)
        for finding in findings
    ]


def _add_refusal(root: Path, report: CheckReport, file: str, error: EngineError) -> None:
    report.error("refused", file, None, f"{str(error).replace(f'{root}/', '')}; `recover` and `start` refuse the store as it is")


def _check_notes(root: Path, report: CheckReport, watermark_damage: str, left: StopNotes) -> None:
    if watermark_damage:
        report.warning("watermark", "config/watermark", None, watermark_damage.replace(f"{root}/", ""))
    if left.abort_exists:
        report.info("abort", "abort", None, "the store was not stopped in order; `recover` it")
    try:
        if read_cut(root) is not None:
            report.warning("marker", "config/cut", None, "a cut of the log was decided on and is not finished; run `recover`")
    except (CorruptionError, DiskError) as error:
        _add_refusal(root, report, "config/cut", error)
    failure = read_sync_failure(root)
    if failure is not None:
        report.warning("marker", "config/sync-failure", None,
                         f"a sync failed ({failure.file or 'the log'}: {failure.cause}), and what it was to sync was not written "
                         "again yet; run `recover`")
    if REBUILD.read(root).record is not None:
        report.warning("marker", "config/rebuild", None, "a rebuild has begun and not finished")
    elif left.marker is not None:
        report.warning("marker", "config/recovery", None, "a recovery has begun and not finished; run `recover` again")


def _check_checkpoint(checked: StoreUnderCheck, checkpoint: Checkpoint) -> None:
    root, report = checked.root, checked.report
    last_ms = max(checked.last_store_timestamp_ms, 0)
    for name, at, time_ms in (
        ("physicMsgTimestamp", 0, checkpoint.physic_msg_timestamp_ms),
        ("logicsMsgTimestamp", 8, checkpoint.logics_msg_timestamp_ms),
        ("indexMsgTimestamp", 16, checkpoint.index_msg_timestamp_ms),
    ):
        if time_ms > last_ms and not (checked.is_damaged or checked.is_cut_short or any(  # a clock may be set back
                header is not None and header.end_timestamp_ms == time_ms for _, header in list_index(checked.store))):
            severity = Severity.WARNING if not checked.was_stopped else Severity.ERROR
            report.add(severity, "checkpoint", "checkpoint", at,
                         f"{name} is {time_ms}, later than the newest message ({last_ms})")
    if checkpoint.index_msg_timestamp_ms and not list_index_files(root):
        report.warning("checkpoint", "checkpoint", 16, "it speaks of an index, but there is none")


_FIELDS = {"topic": str, "queue_id": int, "queue_offset": int, "physical_offset": int | None, "body_sha256": str}


def _check_acked(checked: StoreUnderCheck, acked: Path) -> None:
    """Search for every message of the list; UsageError names a line that is not such an object, unless it is a torn last one."""
    lines = []
    for number, ack in _read(acked, checked.report):
        place = _place_by_queue(checked.store, ack)
        lines.append((number, ack, place, place if ack["physical_offset"] is None else ack["physical_offset"]))
    for number, ack, place, offset in sorted(lines, key=lambda line: -1 if line[3] is None else line[3]):
        checked.report.acked += 1
        wrong, kind = _in_log(ack, offset, checked.log) if offset is not None else "", "acked"
        if not wrong and place != offset or offset is None:
            wrong = "its queue has no such entry" if place is None else "its queue entry does not point to it"
            kind = "acked entry"
        if wrong:
            checked.report.acked_missing += 1
            checked.report.error(
                kind, "commitlog", offset,
                f"acknowledged message {ack['queue_offset']} of queue {ack['queue_id']} of {ack['topic']} "
                f"(line {number}): {wrong}",
            )


def _read(acked: Path, report: CheckReport) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = acked.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the list of acknowledged messages {acked}: {error}") from error
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            ack = json.loads(line)
        except PARSE_ERRORS as error:
            if 1 < number == len(lines) and not text.endswith("\n"):  # a full disk, or a kill of its writer
                report.warning("acked list", str(acked), None, f"its last line, {number}, is torn, and left out")
                return
            raise UsageError(f"{acked}, line {number}: no JSON ({error})") from error
        if not isinstance(ack, dict) or any(not isinstance(ack.get(name), kind) for name, kind in _FIELDS.items()):
            raise UsageError(f"{acked}, line {number}: needs {', '.join(_FIELDS)}")
        yield number, ack


def _in_log(ack: dict[str, Any], offset: int, log: Log) -> str:
    """Return what is wrong with the message's record at `offset`, "" if nothing is."""
    segment = log.view_at(offset)
    if segment is None:
        return f"the log holds [{max(log.min_offset, 0)}, {log.end}) only"
    base, limit, view = segment
    label = classify(view, offset - base, limit - offset, offset)
    if label != "message":
        return f"there is no whole record ({label})"
    try:
        message: Message = decode_record(view, offset - base)
    except FormatError as error:
        return f"there is no whole record ({error})"
    if (message.topic, message.queue_id, message.queue_offset) != (ack["topic"], ack["queue_id"], ack["queue_offset"]):
        return f"message {message.queue_offset} of queue {message.queue_id} of {message.topic} is there"
    if hashlib.sha256(message.body).hexdigest() != ack["body_sha256"].lower():
        return "its body is another one"
    return ""


def _place_by_queue(store: MessageStore, ack: dict[str, Any]) -> int | None:
    """Return the physical offset in the message's queue entry; None without an entry."""
    position = ack["queue_offset"] * CQ_ENTRY_BYTES
    start = segment_start(position, store.queue_file_bytes)
    try:
        entry = read_entry(store.queue_folder(ack["topic"], ack["queue_id"]) / segment_name(start), position - start)
    except (OSError, ValueError):  # ValueError: no queue has such a name or offset
        return None
    return entry[0] if is_live(entry) else None


BACKUP = ".bak"
NOT_KEPT = frozenset(("engine-run.json",))  # the place of the last engine's shared memory, useless after a reboot


BROKER_REPLACES_S = 1.0  # a broker has replaced a table long before
REPLACED_POLL_INTERVAL_S = 0.01


def _check_config(root: Path, report: CheckReport, *, is_broker_running: bool) -> None:
    """Check every .json of config/ except NOT_KEPT, and each `.bak` whose own file does not exist.

    A running broker replaces a table in steps: it writes `.bak`, deletes the table and renames the new one.
    """
    folder = StorePaths(root).config
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    tables = sorted({name.removesuffix(BACKUP) for name in names if name.removesuffix(BACKUP).endswith(".json")})
    for name in tables:
        if name in NOT_KEPT:
            continue
        file = f"config/{name}"
        why = why_unusable(folder / name)
        deadline_s = time.monotonic() + BROKER_REPLACES_S
        while why and is_broker_running and time.monotonic() < deadline_s:
            time.sleep(REPLACED_POLL_INTERVAL_S)
            why = why_unusable(folder / name)
        if not why:
            if name + BACKUP in names and (old_why := why_unusable(folder / (name + BACKUP))):
                report.info("config backup", file + BACKUP, None, f"it {old_why}; the next change replaces it")
        elif why_unusable(folder / (name + BACKUP)):
            report.error("config lost", file, None, f"it {why}, and no {name}{BACKUP} can be used in its place")
        else:
            report.error("config", file, None, f"it {why}: {name}{BACKUP}, its content before the last change, is used instead")


def why_unusable(path: Path) -> str:
    """Return what is wrong with a table of config/ (*.json, *.json.bak), as the end of a sentence from its verb on; "" if nothing is."""
    return ConfigFile(path, _DECODERS.get(path.name.removesuffix(BACKUP), _decode_any)).attempt(path)[1]


def _decode_any(text: str) -> None:
    """Check another table of a broker: it must be a JSON object, with any content."""
    if not isinstance(decode_config(text), dict):
        raise FormatError("it is not a table")


_DECODERS: dict[str, Callable[[str], Any]] = {
    "topics.json": config_table.TOPICS_FORMAT.decode,
    "delayOffset.json": decode_delay_offsets,
    "consumerOffset.json": lambda text: decode_offsets(text.encode()),
}
