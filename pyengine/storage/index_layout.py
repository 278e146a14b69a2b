"""How many slots and entries an index file was made for, read off its own bytes.

A file's length gives one equation for two numbers. The rest comes from what stands in
it: the used slots stand before entry 1, their count is in the header, and every entry
belongs to the slot from which its chain starts (hash mod slots). In each golden store
with an index exactly one pair fits.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pyengine.errors import FormatError
from pyengine.formats.constants import INDEX_ENTRY_BYTES, INDEX_HEADER_BYTES, INDEX_SLOT_BYTES
from pyengine.formats.index_file import SLOT, IndexHeader, IndexLayout, unpack_entry, unpack_header

_FILES_CHECKED = 3
_CHAINS_CHECKED = 256
_PAGE = bytes(4096)


def find_layout(files: Sequence[Path], wanted: IndexLayout) -> IndexLayout | None:
    """The layout of these index files (oldest first), or None when they cannot tell.

    `wanted` is tried first: a store that has it, default or set, is told by a few
    chains instead of a search. Without any key in the files only `wanted` can be
    right, and only if it has their length; then None leaves it as it is.
    """
    with_keys = [view for view in map(_map, _spread(files)) if view is not None and unpack_header(view).index_count > 1]
    if not with_keys:
        return None
    if all(fits(view, wanted) for view in with_keys):
        return wanted
    for candidate in _candidates(with_keys[0]):
        if all(fits(view, candidate) for view in with_keys):
            return candidate
    return None


def fits(view, layout: IndexLayout) -> bool:
    """True when the file has this layout's length and a sample of its chains obeys the layout."""
    if len(view) != layout.size_bytes:
        return False
    header = unpack_header(view)
    if not 1 < header.index_count <= layout.max_index_num or header.hash_slot_count > layout.max_hash_slot_num:
        return False
    try:
        return _ends_fit(view, layout, header) and all(
            _chain_fits(view, layout, header, number) for number in _sample(header.index_count)
        )
    except FormatError:
        return False


def _ends_fit(view, layout: IndexLayout, header: IndexHeader) -> bool:
    first = unpack_entry(view, layout.entry_at(1))
    last = unpack_entry(view, layout.entry_at(header.index_count - 1))
    return first.physical_offset == header.begin_physical_offset and last.physical_offset == header.end_physical_offset


def _chain_fits(view, layout: IndexLayout, header: IndexHeader, number: int) -> bool:
    """Entry `number` is reached from its own slot, over entries of that slot only."""
    slot = layout.slot_of(unpack_entry(view, layout.entry_at(number)).key_hash)
    (current,) = SLOT.unpack_from(view, layout.slot_at(slot))
    for _ in range(header.index_count):
        if not number <= current < header.index_count:
            return False
        if current == number:
            return True
        entry = unpack_entry(view, layout.entry_at(current))
        if entry.key_hash < 0 or layout.slot_of(entry.key_hash) != slot or entry.previous >= current:
            return False
        current = entry.previous
    return False


def _sample(index_count: int) -> range:
    """Entry numbers spread over the file. The oldest have the longest chains, so not only those."""
    return range(1, index_count, max(1, (index_count - 1) // _CHAINS_CHECKED))


def _candidates(view) -> Iterator[IndexLayout]:
    """Layouts of this file's length with all used slots before entry 1, nearest to the first entry's bytes first.

    The length fixes slots modulo 5, and a used entry 1 (20 bytes, the size of five
    slots) holds some byte that is not zero, unless hash, offset, time and previous all
    are 0: so the first candidate is right but for that case.
    """
    header = unpack_header(view)
    words, rest = divmod(len(view) - INDEX_HEADER_BYTES, INDEX_SLOT_BYTES)
    if rest or header.hash_slot_count < 1:
        return
    per_entry = INDEX_ENTRY_BYTES // INDEX_SLOT_BYTES
    last_slot, entry_word = _boundary(view, header.hash_slot_count)
    if last_slot is None:
        return
    # Entry 1 stands `per_entry` words behind the slots (entry 0 is never used).
    slots = entry_word - per_entry
    slots -= (slots - words) % per_entry
    while slots > last_slot:
        entries = (words - slots) // per_entry
        if entries >= 2:
            yield IndexLayout(slots, entries)
        slots -= per_entry


def _boundary(view, used_slots: int) -> tuple[int | None, int]:
    """(the last used slot, the first word behind it that is not zero), counted in words from the header's end."""
    last_slot = None
    seen = 0
    for word in _used_words(view):
        if seen == used_slots:
            return last_slot, word
        last_slot = word
        seen += 1
    return None, 0


def _used_words(view) -> Iterator[int]:
    """Numbers of the 4-byte words behind the header that are not zero. Zero pages are passed quickly."""
    for start in range(INDEX_HEADER_BYTES, len(view), len(_PAGE)):
        page = view[start : start + len(_PAGE)]
        if page == _PAGE[: len(page)]:
            continue
        first_word = (start - INDEX_HEADER_BYTES) // INDEX_SLOT_BYTES
        whole = len(page) // INDEX_SLOT_BYTES * INDEX_SLOT_BYTES
        for number, (value,) in enumerate(SLOT.iter_unpack(page[:whole])):
            if value:
                yield first_word + number


def _spread(files: Sequence[Path]) -> list[Path]:
    """A few of the files: the first, the last, and some between."""
    if len(files) <= _FILES_CHECKED:
        return list(files)
    return [files[0], files[len(files) // 2], files[-1]]


def _map(path: Path) -> mmap.mmap | None:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= INDEX_HEADER_BYTES:
                return None
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return None
