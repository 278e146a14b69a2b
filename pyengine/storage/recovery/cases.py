"""Recovery's decisions as tables: what may stand beyond the end of the log, and what becomes of it.

The end is where the walk stopped. What follows it in the end's own segment:

    label        likely cause
    nothing      the end of a store that was stopped in order, or killed between puts
    unpublished  a pass that was never published: the commit slot ends before it, nobody was told
    roll         RocketMQ closed the last segment and made no new one; its next put does it again
    torn         one put that was cut short by a crash: a head that names this offset, and nothing behind it
    spoiled      a whole record whose body or text has changed
    unknown      anything else: random bytes, stale records, records behind a hole

and in each segment behind it:

    spare        made ahead of need, never written
    unpublished  as above
    stranded     records whose way back to the log is broken

A message that somebody was told of is never thrown away: it goes to quarantine/
before the log changes. Only what provably nobody was told of is just cleared. In a
RocketMQ store nothing is known of what was synced, so a spoiled record is kept
there; above our own watermark the record was not durable yet, and its writer died.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pyengine.errors import InvariantError


class Owner(enum.Enum):
    """Whose bytes: decided by a believable config/watermark."""

    OURS = "ours"
    THEIRS = "theirs"  # RocketMQ's, or ours without its watermark


class End(enum.Enum):
    """Who says where the end is."""

    SLOT = "slot"  # the commit slot in shared memory
    SCAN = "scan"  # the walk through the files


class Content(enum.Enum):
    """What stands between the end and the end of its segment."""

    ZEROS = "zeros"
    BLANK = "blank"                        # the filler that closes a segment; what follows it is undefined
    INCOMPLETE_RECORD = "incomplete_record"  # its head names this offset; lengths do not add up; nothing behind it
    SPOILED_RECORD = "spoiled_record"      # its lengths add up, its CRC or text does not; nothing behind it
    OTHER = "other"


class TailDecision(enum.Enum):
    """What happens to it."""

    LEAVE = "leave"            # there is nothing to do
    CLEAR = "clear"            # zeros are written over it
    QUARANTINE = "quarantine"  # kept in quarantine/, then zeros are written over it


@dataclass(frozen=True, slots=True)
class TailCase:
    """One row: None stands for any value."""

    label: str
    content: Content | None
    owner: Owner | None
    end: End | None
    decision: TailDecision

    def matches(self, content: Content, owner: Owner, end: End) -> bool:
        return self.content in (None, content) and self.owner in (None, owner) and self.end in (None, end)


_ANY = None
TAIL_CASES = (
    #        label          content                     owner         end       decision
    TailCase("nothing",     Content.ZEROS,              _ANY,         _ANY,     TailDecision.LEAVE),
    TailCase("unpublished", Content.BLANK,              _ANY,         End.SLOT, TailDecision.CLEAR),
    TailCase("unpublished", Content.INCOMPLETE_RECORD,  _ANY,         End.SLOT, TailDecision.CLEAR),
    TailCase("unpublished", Content.SPOILED_RECORD,     _ANY,         End.SLOT, TailDecision.CLEAR),
    TailCase("unpublished", Content.OTHER,              _ANY,         End.SLOT, TailDecision.CLEAR),
    TailCase("roll",        Content.BLANK,              _ANY,         End.SCAN, TailDecision.CLEAR),
    TailCase("torn",        Content.INCOMPLETE_RECORD,  _ANY,         End.SCAN, TailDecision.CLEAR),
    TailCase("torn",        Content.SPOILED_RECORD,     Owner.OURS,   End.SCAN, TailDecision.CLEAR),
    TailCase("spoiled",     Content.SPOILED_RECORD,     Owner.THEIRS, End.SCAN, TailDecision.QUARANTINE),
    TailCase("unknown",     Content.OTHER,              _ANY,         End.SCAN, TailDecision.QUARANTINE),
)


class FileDecision(enum.Enum):
    """What happens to a segment that begins at or behind the end of the end's own segment."""

    DELETE = "delete"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class FileCase:
    """One row: None stands for any value."""

    label: str
    is_zero: bool
    end: End | None
    decision: FileDecision

    def matches(self, is_zero: bool, end: End) -> bool:
        return self.is_zero == is_zero and self.end in (None, end)


SPARE = "spare"  # made ahead and never written to

FILE_CASES = (
    #        label          is_zero  end       decision
    FileCase(SPARE,         True,    _ANY,     FileDecision.DELETE),
    FileCase("unpublished", False,   End.SLOT, FileDecision.DELETE),
    FileCase("stranded",    False,   End.SCAN, FileDecision.QUARANTINE),
)


def tail_case(content: Content, owner: Owner, end: End) -> TailCase:
    """The one row of TAIL_CASES that fits."""
    for case in TAIL_CASES:
        if case.matches(content, owner, end):
            return case
    raise InvariantError(f"no tail case for {content}, {owner}, {end}")


def file_case(is_zero: bool, end: End) -> FileCase:
    """The one row of FILE_CASES that fits."""
    for case in FILE_CASES:
        if case.matches(is_zero, end):
            return case
    raise InvariantError(f"no file case for is_zero={is_zero}, {end}")
