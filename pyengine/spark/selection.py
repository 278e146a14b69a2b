"""Which rows of the log a read wants, whichever way they are found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyengine.spark.options import EARLIEST, INT64_MAX, INT64_MIN, LATEST, QueueOffsets, ReadOptions

if TYPE_CHECKING:
    from pyengine.native.columns import ChooseQueue

EVERY_OFFSET = (INT64_MIN, INT64_MAX)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of the log are wanted; None and empty are no filter.

    `offsets`: queue -> [first offset, end) for queues with bounds, `times` likewise [start, end) of their store
    times. `queues`: only these.
    `queued_only`: prepared and rolled back messages, which are in no queue, are left out.
    Times are the store's, [start, end) in ms.
    """

    topics: tuple[str, ...] = ()
    topic_pattern: str | None = None
    queues: frozenset[tuple[str, int]] | None = None
    offsets: tuple[tuple[str, int, int, int], ...] = ()
    times: tuple[tuple[str, int, int, int], ...] = ()
    tags: tuple[str, ...] = ()
    start_ms: int | None = None
    end_ms: int | None = None
    queued_only: bool = False


def select(options: ReadOptions, *, with_offsets: bool = True) -> Selection:
    """The rows that the options choose; without offsets, those of a stream whatever it has come to."""
    assigned = None
    if options.assign is not None:
        assigned = frozenset((topic, queue_id) for topic, ids in options.assign.items() for queue_id in ids)
    return Selection(
        topics=options.subscribe or tuple(options.assign or ()),
        topic_pattern=options.subscribe_pattern,
        queues=assigned,
        offsets=tuple((topic, queue_id, *bounds) for (topic, queue_id), bounds in sorted(offset_bounds(options).items()))
        if with_offsets else (),
        times=tuple((topic, queue_id, *bounds) for (topic, queue_id), bounds in sorted(_time_bounds(options).items()))
        if with_offsets else (),
        tags=options.tags,
        start_ms=options.starting_timestamp_ms,
        end_ms=options.ending_timestamp_ms,
        queued_only=options.is_queue_view,
    )


def offset_bounds(options: ReadOptions) -> dict[tuple[str, int], tuple[int, int]]:
    """(topic, queue) -> [first offset, end) of the queues that the options bound; EVERY_OFFSET's number where they do not."""
    found: dict[tuple[str, int], tuple[int, int]] = {}
    for (topic, queue_id), offset in _flat(options.starting_offsets):
        if offset != EARLIEST:
            found[topic, queue_id] = offset, INT64_MAX
    for (topic, queue_id), offset in _flat(options.ending_offsets):
        if offset != LATEST:
            found[topic, queue_id] = found.get((topic, queue_id), EVERY_OFFSET)[0], offset
    return found


def _time_bounds(options: ReadOptions) -> dict[tuple[str, int], tuple[int, int]]:
    """(topic, queue) -> [start, end) in ms, of the queues that the options bound by times of their own."""
    found = {queue: (time_ms, INT64_MAX) for queue, time_ms in _flat(options.starting_timestamps)}
    for queue, time_ms in _flat(options.ending_timestamps):
        found[queue] = found.get(queue, (INT64_MIN,))[0], time_ms
    return found


def queue_chooser(selection: Selection) -> ChooseQueue | None:
    """A function that tells for a queue which of its offsets (and store times, where they are bounded) are wanted,
    or None; itself None when all are."""
    topics = frozenset(selection.topics)
    pattern = re.compile(selection.topic_pattern) if selection.topic_pattern else None
    offsets = {(topic, queue_id): (first, end) for topic, queue_id, first, end in selection.offsets}
    times = {(topic, queue_id): (start_ms, end_ms) for topic, queue_id, start_ms, end_ms in selection.times}
    if not topics and pattern is None and selection.queues is None and not offsets and not times:
        return None

    def choose(topic: str, queue_id: int) -> tuple[int, ...] | None:
        if topics and topic not in topics or pattern is not None and not pattern.fullmatch(topic):
            return None
        if selection.queues is not None and (topic, queue_id) not in selection.queues:
            return None
        return offsets.get((topic, queue_id), EVERY_OFFSET) + times.get((topic, queue_id), ())

    return choose


def _flat(offsets: QueueOffsets | None) -> list[tuple[tuple[str, int], int]]:
    return [((topic, queue_id), offset) for topic, queues in (offsets or {}).items() for queue_id, offset in queues.items()]
