"""What can be done about what a check finds: the grade of each kind of finding, and the advice.

    grade       means
    ok          nothing was found
    notice      nothing has to be done
    repairable  the log still holds everything: a command here brings it to order
    loss        messages are gone, damaged or out of reach in this copy of the store
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from pyengine.formats.paths import parse_segment_name


class Grade(enum.IntEnum):
    """Ordered: the worst finding's grade is the store's."""

    OK = 0
    NOTICE = 1
    REPAIRABLE = 2
    LOSS = 3

    @property
    def label(self) -> str:
        return self.name.lower()


RECOVER = "run `pyengine recover STORE`; every start does the same"
REBUILD_QUEUE = "run `pyengine rebuild STORE --topic {topic} --queue-id {queue_id}`"
REBUILD_QUEUES = "run `pyengine rebuild STORE --queues`"
REBUILD_INDEX = "run `pyengine rebuild STORE --index`"
RESTORE = "restore the segment from a copy, or carve out what is whole with `pyengine salvage STORE DEST`"
RESTORE_CONFIG = "copy what it said before over it: `cp STORE/{file}.bak STORE/{file}`"
GIVE_UP_CONFIG = "restore STORE/{file} from a copy, or give up what it said: `rm -rf STORE/{file} STORE/{file}.bak`"


class Row(NamedTuple):
    """A kind of finding: its grade as an error, its grade otherwise, and what to do."""

    as_error: Grade
    otherwise: Grade
    advice: str


_R, _N, _L = Grade.REPAIRABLE, Grade.NOTICE, Grade.LOSS
KINDS = {
    #                       as error  otherwise
    "refused":           Row(_R,      _R,  "move away what does not belong there"),
    "gap":               Row(_L,      _L,  RESTORE),
    "below watermark":   Row(_L,      _L,  RESTORE),
    "damaged before":    Row(_L,      _L,  RESTORE),
    "unreachable":       Row(_L,      _L,  RESTORE),
    "tail":              Row(_L,      _R,  "run `pyengine recover STORE`: what stands there goes to quarantine first"),
    "log gap":           Row(_L,      _L,  RESTORE),
    "missing queue":     Row(_R,      _R,  REBUILD_QUEUE),
    "missing entries":   Row(_R,      _R,  REBUILD_QUEUE),
    "queue gap":         Row(_R,      _R,  REBUILD_QUEUE),
    "queue hole":        Row(_R,      _R,  REBUILD_QUEUE),
    "wrong entry":       Row(_R,      _R,  REBUILD_QUEUE),
    "entry beyond the log": Row(_R,   _R,  RECOVER),
    "extension":         Row(_R,      _R,  REBUILD_QUEUE),
    "index length":      Row(_R,      _R,  REBUILD_INDEX),
    "index header":      Row(_R,      _R,  REBUILD_INDEX),
    "index chain":       Row(_R,      _R,  REBUILD_INDEX),
    "wrong key":         Row(_R,      _R,  REBUILD_INDEX),
    "missing keys":      Row(_R,      _R,  REBUILD_INDEX),
    "key beyond the log": Row(_R,     _R,  RECOVER),
    "acked":             Row(_L,      _L,  RESTORE),
    "acked entry":       Row(_R,      _R,  REBUILD_QUEUES),
    "config":            Row(_R,      _R,  RESTORE_CONFIG),
    "config lost":       Row(_L,      _L,  GIVE_UP_CONFIG),
    "config backup":     Row(_N,      _N,  ""),
    "watermark":         Row(_R,      _N,  "the next orderly stop writes it again"),
    "copy":              Row(_R,      _N,  "the next start, or `pyengine recover STORE`, makes it a store of its own"),
    "abort":             Row(_R,      _R,  RECOVER),
    "marker":            Row(_R,      _R,  RECOVER),
    "checkpoint":        Row(_R,      _R,  RECOVER),
    "later format":      Row(_N,      _N,  "keep the store with RocketMQ 5, or make one of its log with `pyengine salvage STORE DEST`"),
    "blocks":            Row(_N,      _N,  ""),
}


def grade_of(kind: str, file: str, *, is_error: bool) -> Grade:
    """The grade of one finding. KeyError for a kind that has no row."""
    row = KINDS[kind]
    if kind == "refused" and _is_segment(file):
        return Grade.LOSS
    return row.as_error if is_error else row.otherwise


def _is_segment(file: str) -> bool:
    """True for a log segment, which nothing makes again; a foreign file has no such name."""
    folder, _, name = file.rpartition("/")
    return folder == "commitlog" and parse_segment_name(name) is not None


def advice_for(kind: str, file: str, grade: Grade) -> str:
    """What to do, with the queue's own name where the file tells it."""
    advice = KINDS[kind].advice
    if kind == "refused" and file.startswith("consumequeue/"):
        advice = REBUILD_QUEUE
    elif kind == "refused" and grade is Grade.LOSS:
        advice = RESTORE
    if advice in (RESTORE_CONFIG, GIVE_UP_CONFIG):
        return advice.format(file=file)
    if advice is REBUILD_QUEUE:
        parts = file.split("/")
        if len(parts) < 3:
            return REBUILD_QUEUES
        advice = advice.format(topic=parts[1], queue_id=parts[2])
    return advice
