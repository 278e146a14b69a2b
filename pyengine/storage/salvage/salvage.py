"""Copy the valid records of a damaged store to a new one.

The new store has every complete record of the old log in the old order, at new physical
offsets (so message ids change). Queue offsets stay the same up to the first lost message of a
queue; later ones are lowered, so that queues have no gaps. Offsets that
other records and files contain are changed accordingly: prepared transaction offsets, the numbers of half messages in op
messages, consumer offsets, delay offsets. After the log's messages come the complete records in quarantine/, from earlier
recoveries, that are not in the log, with new queue offsets. Queues, index and checkpoint are built
from the new log. The old store is not changed.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import ExitCode, FormatError, NotAStoreError, UsageError, shown
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.paths import StorePaths, without_log_folders
from pyengine.formats.record_case import CaseLabel
from pyengine.formats.small_file import decode_config, encode_config, read_small_file
from pyengine.storage.check.check import NOT_KEPT, why_unusable
from pyengine.storage.checkpoint import read_watermark
from pyengine.storage.commit_log import log_exists
from pyengine.storage.config import record_sizes
from pyengine.storage.durable_writes import write_config
from pyengine.storage.file_system import own_folder
from pyengine.storage.later_format import LEFT_BY_SALVAGE, find_later_features
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.quarantine import QuarantineEntry, is_quarantine, list_pieces, list_quarantine
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import Progress, RecoveryOptions, RecoveryReport
from pyengine.storage.salvage.log import (
    MovedQueue,
    Run,
    SalvagedLog,
    Skipped,
    carve,
    carve_quarantined,
    list_damaged_segments,
    records_of,
)

LOST = "lost"  # a reason in addition to those of formats.record_case: bytes that were synced are missing
MISSING_LISTED_MAX = 1000


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """The records that were copied, and the ranges that were not."""

    records: int
    kept_bytes: int
    skipped: tuple[Skipped, ...]
    missing_segments: tuple[int, ...]  # start offsets
    moved_queues: dict[tuple[str, int], int]  # by how much the queue's newest offsets moved up
    quarantined: int  # records that came from quarantine/, after those of the log
    lost_beyond_end: int | None  # bytes that had been synced after the last record; None: no watermark tells
    end_offset: int
    written_end: int  # of the new log; end_offset is how far its recovery found it whole
    recovery: RecoveryReport  # of the new store
    notes: tuple[str, ...]
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """OK if no loss is known, REPAIRED if bytes had to be left out."""
        is_all = not (self.skipped or self.missing_segments or self.end_offset < self.written_end)
        return ExitCode.OK if is_all else ExitCode.REPAIRED

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        return {
            "records": self.records,
            "kept_bytes": self.kept_bytes,
            "skipped": [{"start": piece.start, "end": piece.end, "reason": piece.reason} for piece in self.skipped],
            "missing_segments": list(self.missing_segments),
            "quarantined": self.quarantined,
            "lost_beyond_end": self.lost_beyond_end,
            "moved_queues": [
                {"topic": topic, "queueId": queue_id, "by": by} for (topic, queue_id), by in sorted(self.moved_queues.items())
            ],
            "end_offset": self.end_offset,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "exit_code": int(self.exit_code),
        }


def salvage(
    root: Path | str, destination: Path | str, geometry: Geometry, *,
    options: RecoveryOptions | None = None, progress: Progress | None = None, with_quarantine: bool = True,
    settings: EngineConfig | None = None,
) -> SalvageReport:
    """Make a store at `destination`, an absent or empty directory, from the valid records of the store at `root`.

    The records in quarantine/ follow those of the log, unless `with_quarantine` is False. If `root` is a store's quarantine/
    alone, or a copy of it, the new store has the messages of its pieces, by physical offset. The new store records the sizes of
    `settings`. Root makes it through no link of another user, and in no directory in which another user can put one.

    Raises NotAStoreError, UsageError, DiskFullError or DiskError; no file is left at the
    destination then.
    """
    started_s = time.monotonic()
    root, destination = Path(root), Path(destination)
    if not log_exists(root) and not is_quarantine(root):
        raise NotAStoreError(f"{root} holds no store: there is no commitlog in it, and no piece of a log that recovery moved aside")
    if destination.exists() and not destination.is_dir():
        raise UsageError(f"{destination} is not an empty directory; name a new one")
    if destination.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{destination} lies inside the damaged store; name a directory outside")
    with own_folder(destination) as held:
        if any(held.iterdir()):
            raise UsageError(f"{destination} is not an empty directory; name a new one")
        try:
            report = _salvage(root, held, geometry, options, progress, started_s, with_quarantine)
            if settings is not None:
                record_sizes(held, replace(settings, store_path_commit_log="", read_only_commit_log_store_paths=""))  # its log is in it
            return replace(report, notes=tuple(map(shown, report.notes)))
        except BaseException:  # the directory itself stays with its rights if it was there; it may be a mount
            for path in held.iterdir():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            raise


def _missing(segments: Sequence[tuple[int, Path]], size_bytes: int) -> tuple[tuple[int, ...], list[str]]:
    """Return the start offsets of missing segments between others; and a sentence if there are too many to list."""
    missing: list[int] = []
    notes = []
    for (before, _), (after, path) in itertools.pairwise(segments):
        starts = range(before + size_bytes, after, size_bytes)
        missing += starts[:MISSING_LISTED_MAX]
        if len(starts) > MISSING_LISTED_MAX:
            notes.append(f"{len(starts):,} segments are missing before {path.name}; the first {MISSING_LISTED_MAX:,} are listed")
    return tuple(missing), notes


def _salvage(
    root: Path, destination: Path, geometry: Geometry, options: RecoveryOptions | None, progress: Progress | None,
    started_s: float, with_quarantine: bool,
) -> SalvageReport:
    size_bytes = geometry.mapped_file_size_commit_log_bytes
    has_log = log_exists(root)
    folders = StorePaths(root).commit_log_folders.all if has_log else ()
    segments, no_files = list_damaged_segments(folder for folder in folders if folder.is_dir())
    missing, notes = _missing(segments, size_bytes)
    missing = tuple(sorted({*missing, *no_files}))
    notes += [f"the log's folder {folder} does not exist: if its disk is not mounted, mount it and salvage again"
              for folder in folders if not folder.is_dir()]
    skipped: list[Skipped] = []
    unsure: list[Skipped] = []  # zeros that are the end of the log, unless records follow
    end = segments[0][0] if segments else 0
    with SalvagedLog(StorePaths(destination).commit_log, size_bytes) as log:
        for number, (base, path) in enumerate(segments, 1):
            reached = base
            for piece, data in carve(path, base, size_bytes):
                skipped += unsure
                unsure.clear()
                end = reached = piece.end
                if isinstance(piece, Run):
                    log.append_run(piece, data)
                elif piece.reason:
                    skipped.append(piece)
            there = max(reached, base + min(size_bytes, path.stat().st_size))
            if reached < there:
                unsure.append(Skipped(reached, there, str(CaseLabel.ZEROES)))
            if there < base + size_bytes:
                unsure.append(Skipped(there, base + size_bytes, LOST))
            if progress is not None:
                progress(number * size_bytes, len(segments) * size_bytes)
        if has_log:
            notes += copy_config(root, destination, log.queues)
        moved = {key: queue.moved_by for key, queue in log.queues.items() if queue.moved_by}
        pieces = list_pieces(root) if not has_log else list_quarantine(root) if with_quarantine else []
        quarantined, left_out = _append_pieces(pieces, log, dict(segments), size_bytes)
        if not has_log:
            skipped += left_out
            notes += [f"{entry.name}: {entry.problem}" for entry in pieces if entry.problem]
    reading = read_watermark(root)
    durable = reading.watermark
    if durable is not None and end < durable.flushed:
        skipped.append(Skipped(end, durable.flushed, LOST))
    notes += [f"{one.sentence}; nothing of that comes over" for one in find_later_features(root)]
    report = recover(MessageStore(destination, geometry), options=options)
    if report.end_offset < log.end_offset:
        notes.append(f"the new log was written to {log.end_offset:,}, and its recovery ended it at {report.end_offset:,}: "
                     "compare with the damaged store before you give that up")
    if durable is None and has_log:
        notes.append(f"whether messages are missing after {end:,}, where the last one ends, is unknown: "
                     + (reading.damage or "the store has no config/watermark, which would say up to where it had been synced"))
    return SalvageReport(
        log.records, log.kept_bytes, tuple(skipped), missing,
        moved, quarantined,
        None if durable is None else max(0, durable.flushed - end),
        report.end_offset, log.end_offset, report, tuple(notes), time.monotonic() - started_s,
    )


def _append_pieces(
    entries: Sequence[QuarantineEntry], log: SalvagedLog, segments: Mapping[int, Path], size_bytes: int,
) -> tuple[int, list[Skipped]]:
    """Append the complete records of these pieces of a log that are not in the log; return their number, and what they lack."""
    seen: set[tuple[int, bytes]] = set()
    left_out: list[Skipped] = []
    for entry in entries:
        if not entry.holds_messages:
            continue
        for piece, data in carve_quarantined(entry):
            if isinstance(piece, Skipped):
                left_out += [piece] if piece.reason not in ("", str(CaseLabel.BLANK)) else []
                continue
            for offset, record in records_of(piece, data):
                known = offset, hashlib.sha256(record).digest()
                if known not in seen and not _is_there(segments.get(offset - offset % size_bytes), offset % size_bytes, record):
                    log.append_after_old_log(offset, record)
                    seen.add(known)
    return len(seen), left_out


def _is_there(segment: Path | None, at: int, record: memoryview) -> bool:
    """Whether the segment has these bytes at `at`: a recovery that was killed has copied them and not truncated the log yet."""
    if segment is None:
        return False
    with open(segment, "rb") as file:
        file.seek(at)
        return file.read(len(record)) == record


# Files of the engine that wrote the old store, or of an unfinished change to it, which are not copied.
_NOT_COPIED = LEFT_BY_SALVAGE | NOT_KEPT | frozenset({"engine-id", "epoch", "watermark", "recovery", "recovered", "rebuild", "cut",
                                               "sync-failure"})
_NOT_COPIED_SUFFIXES = (".tmp", ".bak", ".damaged")

Queues = Mapping[tuple[str, int], MovedQueue]


def copy_config(root: Path, destination: Path, queues: Queues) -> list[str]:
    """Copy config/*; return a sentence for each file that could not be used: its `.bak` was copied, or it was left out."""
    folder = StorePaths(root).config
    found = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    notes = []
    for name in sorted({path.name.removesuffix(".bak") if path.name.endswith(".json.bak") else path.name for path in found}):
        path = folder / name
        if name in _NOT_COPIED or path.suffix in _NOT_COPIED_SUFFIXES:
            continue
        if path.suffix == ".json" and (why := why_unusable(path)):
            backup = folder / f"{name}.bak"
            if why_unusable(backup):
                notes.append(f"config/{name} {why}: it was left out")
                continue
            notes.append(f"config/{name} {why}: config/{backup.name}, its content before the last change, was used instead")
            path = backup
        try:
            content = read_small_file(path)
            if name == "engine.toml":
                content = without_log_folders(content)
            if name in ("consumerOffset.json", "delayOffset.json"):
                table = decode_config(content.decode("utf-8"))
                _move_offsets(table["offsetTable"], queues, is_delay=name == "delayOffset.json")
                content = encode_config(table).encode("utf-8")
        except (OSError, FormatError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            notes.append(f"config/{name} could not be read and was left out: {error}")
            continue
        write_config(StorePaths(destination).config / name, content, keep_backup=False)
    return notes


def _move_offsets(table: dict[str, Any], queues: Queues, *, is_delay: bool) -> None:
    """Change the offsets in {"topic@group": {queue id: offset}} to those of the new store; {level: offset} with `is_delay`.

    Delay level n waits in queue n - 1 of the schedule topic.
    """
    for name, offsets in {SCHEDULE_TOPIC: table}.items() if is_delay else table.items():
        for number, offset in offsets.items():
            queue = queues.get((name.partition("@")[0], int(number) - is_delay))
            if queue is not None:
                offsets[number] = queue.moved(offset)
