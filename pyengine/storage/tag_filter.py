"""Subscription text: which tags a reader wants (FilterAPI, DefaultMessageFilter)."""

from __future__ import annotations

from dataclasses import dataclass

from pyengine import arguments
from pyengine.errors import UsageError
from pyengine.formats.properties import string_hash

SUB_ALL = "*"
TAG_SEPARATOR = "||"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """The wanted tags and their hashes. The hash is looked at first, in the queue entry; then the text."""

    tags: frozenset[str]
    codes: frozenset[int]

    def matches_code(self, tags_code: int | None) -> bool:
        """By the queue entry's code, of which 32 bits count; None (nobody knows it) matches."""
        return tags_code is None or _to_int(tags_code) in self.codes

    def matches_text(self, tags: str | None) -> bool:
        return tags in self.tags


def parse_subscription(text: str | None) -> TagFilter | None:
    """`a || b`: those tags; None, empty or `*`: no filter. UsageError when nothing stands on one side of a bar."""
    if text is None or arguments.text(text, "tags") in ("", SUB_ALL):
        return None
    tags = frozenset(piece.strip() for piece in text.split(TAG_SEPARATOR))
    if "" in tags:
        raise UsageError(f"no tag in a part of {text!r}: write tags like 'a || b', or '*' for all")
    return TagFilter(tags, frozenset(map(string_hash, tags)))


def _to_int(value: int) -> int:
    """Java's narrowing of a long to an int."""
    value &= 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x80000000 else value
