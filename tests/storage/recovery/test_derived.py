"""The ends of queue files, as recovery reads them."""

from __future__ import annotations

import random
import time

import pytest

from pyengine.arguments import INT64_MAX
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, FILLER_BYTES, is_live
from pyengine.storage.recovery.derived import live_entries

SEED = time.time_ns() & 0xFFFFFFFF
DEAD = ((0, 0, 0), (-1, 91, 7), (5, 0, 7), (5, -3, 7), (-(1 << 63), -(1 << 31), 0))


def one_by_one(content, size_bytes, below):
    """The same, an entry at a time."""
    found = []
    for at in range(0, min(len(content), size_bytes) // CQ_ENTRY_BYTES * CQ_ENTRY_BYTES, CQ_ENTRY_BYTES):
        entry = ENTRY.unpack_from(content, at)
        if not is_live(entry) or entry[0] >= below:
            break
        found.append(entry)
    return len(found), found[-1] if found else None


@pytest.mark.parametrize("count", [0, 1, 203, 204, 205, 3467, 3468, 3469, 60_000])
def test_entries_end_at_the_first_that_is_none_or_too_far(tmp_path, count):
    chance = random.Random(SEED + count)
    print("seed", SEED + count)
    path = tmp_path / "00000000000000000000"
    live = b"".join(ENTRY.pack(number * 100, 91, chance.randrange(1 << 32)) for number in range(count))
    for end in (b"", b"\0" * CQ_ENTRY_BYTES * 300, b"half an entry", *(ENTRY.pack(*dead) + live[:100] for dead in DEAD)):
        path.write_bytes(FILLER_BYTES * 3 + live + end)
        content = path.read_bytes()
        for size_bytes in (len(content), len(content) + CQ_ENTRY_BYTES, chance.randrange(len(content))):
            for below in (INT64_MAX, count * 100, chance.randrange(count * 100 + 1)):
                assert live_entries(path, size_bytes, below) == one_by_one(content, size_bytes, below), (size_bytes, below, end[:20])
