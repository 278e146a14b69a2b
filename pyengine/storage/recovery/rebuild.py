"""Rebuild queues and index from the log alone (`pyengine rebuild`).

It is a recovery whose plan leaves these pieces out and dispatches the whole log. config/rebuild names them before the first is moved to
quarantine/rebuild-N/; after a kill at any point another run, or just a start, continues from that note. A queue without messages in the
log is not moved, because its end has the next queue offset.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from pyengine.engine_config import EngineConfig
from pyengine.errors import ExitCode, NotAStoreError, UsageError
from pyengine.storage.checkpoint import (
    REBUILD,
    RebuildMarker,
    SharedState,
    read_watermark,
)
from pyengine.storage.commit_log import Log, find_end, own_watermark
from pyengine.storage.mapped_file import queue_folders, refuse_file
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.derived import queues_between
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import Findings, Progress, RecoveryReport, RecoveryState

Queue = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to rebuild: all queues, those of one topic or a single one, and the index."""

    queues: bool = True
    index: bool = True
    topic: str | None = None
    queue_id: int | None = None

    def __post_init__(self) -> None:
        if self.queue_id is not None and self.topic is None:
            raise UsageError("a queue id needs its topic")
        if not self.queues and not self.index:
            raise UsageError("neither queues nor index are selected: there is nothing to rebuild")

    def wants(self, queue: Queue) -> bool:
        return self.queues and self.topic in (None, queue[0]) and self.queue_id in (None, queue[1])


@dataclass(frozen=True, slots=True)
class RebuildReport(Findings):
    """The outcome of a rebuild. `state` degraded: the log is damaged below its durable end, and nothing was changed."""

    state: RecoveryState
    queues: tuple[Queue, ...] = ()       # rebuilt from the log
    kept: tuple[Queue, ...] = ()         # selected, but without messages in the log: not changed
    index: bool = False
    replaced: tuple[str, ...] = ()       # the moved pieces, as paths relative to the root
    quarantine: str = ""                 # where they were moved to; "" if there were none
    end_offset: int = 0
    log_bytes: int = 0                   # dispatched
    damage_offset: int | None = None
    recovery: RecoveryReport | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.CORRUPTION if self.recovery is None else self.recovery.exit_code

    @property
    def sentence(self) -> str:
        if self.state is RecoveryState.DEGRADED:
            return (f"The log is damaged at offset {self.damage_offset}, in bytes that had been synced: queues rebuilt from it "
                    "would lack messages. Nothing was changed; restore the segment, `salvage`, or `recover --accept-loss`.")
        queues = "1 queue" if len(self.queues) == 1 else f"{len(self.queues)} queues"
        made = [queues] * bool(self.queues) + ["the index"] * self.index
        what = " and ".join(made) or "nothing"
        return f"Rebuilt {what} from {self.log_bytes} bytes of log" + (
            f"; the replaced files are in {self.quarantine}." if self.quarantine else ".")

    def to_dict(self) -> dict[str, Any]:
        """For --json: plain values."""
        fields = Findings.to_dict(self)
        del fields["recovery"]
        return fields | {name: [{"topic": topic, "queueId": queue_id} for topic, queue_id in fields[name]] for name in ("queues", "kept")}


def rebuild(
    store: MessageStore,
    selection: Selection | None = None,
    *,
    options: EngineConfig | None = None,
    shared: SharedState | None = None,
    progress: Progress | None = None,
) -> RebuildReport:
    """Rebuild queues and index of the stopped store from its log; the caller owns the store.

    Afterwards the store is like one that was stopped in order. Raises NotAStoreError, UsageError (there is
    no such queue), StoreRefusedError (a file that is not replaced, or a segment, has a
    wrong length), CorruptionError (a segment is missing), DiskFullError, DiskError.
    """
    started_s = time.monotonic()
    selection = selection or Selection()
    options = options or EngineConfig()
    segments = store.list_complete_log()
    if not segments:
        raise NotAStoreError(f"{store} has no commit log: queues and index are rebuilt from it")
    log = Log.of(segments, store.segment_bytes, own_watermark(read_watermark(store), segments[0].start_offset))
    end = find_end(store.root, log).end_offset
    in_log = {(queue.topic, queue.queue_id) for queue in queues_between(log, max(log.min_offset, 0), end, multi_dispatch=True)}
    for folder in (store.consume_queue, store.consume_queue_ext, store.index):
        refuse_file(folder)
    index = selection.index and options.message_index_enable
    on_disk = {(topic, queue_id) for topic, queue_id, _ in queue_folders(store.consume_queue)}
    asked = {queue for queue in in_log | on_disk if selection.wants(queue)}
    if selection.topic is not None and not asked:
        where = selection.topic if selection.queue_id is None else f"{selection.topic}, queue {selection.queue_id}"
        raise UsageError(f"neither the log nor the store's folders know {where}")
    made = asked & in_log
    pieces = _pieces(on_disk, made, index)
    marker = _merged(store, REBUILD.read(store).record, pieces)
    log.forget()  # recovery gives the space of deleted segments back, and reads others again from the disk: no mapping may keep them
    report = recover(store, options=options, shared=shared, rebuilding=marker, progress=progress)
    if report.state is RecoveryState.DEGRADED:
        return RebuildReport(report.state, damage_offset=report.damage_offset, seconds=time.monotonic() - started_s)
    there = store.quarantine / marker.folder
    return RebuildReport(
        state=report.state, queues=tuple(sorted(made)), kept=tuple(sorted(asked - made)), index=index,
        replaced=tuple(piece for piece in marker.pieces if (there / piece).exists()),
        quarantine=str(there) if there.exists() else "",
        end_offset=report.end_offset, log_bytes=report.dispatched_bytes,
        recovery=report, notes=report.notes, seconds=time.monotonic() - started_s,
    )


def _pieces(on_disk: set[Queue], made: set[Queue], index: bool) -> list[str]:
    """Return the paths to rebuild, relative to the root: a whole topic if the disk has no other queue of it."""
    pieces, in_part = list[str](), {topic for topic, _ in on_disk - made}
    for topic, queues in itertools.groupby(sorted(made), key=lambda queue: queue[0]):
        names = [topic] if topic not in in_part else [f"{topic}/{queue_id}" for _, queue_id in queues]
        pieces += [f"{folder}/{name}" for folder in ("consumequeue", "consumequeue_ext") for name in names]
    return pieces + ["index"] * index


def _merged(store: MessageStore, unfinished: RebuildMarker | None, pieces: list[str]) -> RebuildMarker:
    """Return one marker for the pieces of an interrupted rebuild and those of this one."""
    if unfinished is not None:
        return replace(unfinished, pieces=tuple(dict.fromkeys((*unfinished.pieces, *pieces))))
    number = 1
    quarantine = store.quarantine
    while (quarantine / f"rebuild-{number}").exists() or (quarantine / f"rebuild-{number}.json").exists():
        number += 1
    return RebuildMarker(f"rebuild-{number}", tuple(pieces))
