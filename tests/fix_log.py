"""Small stores made record by record from the formats alone, for tests that damage them.

`build_store(...)` gives a `BuiltStore`: a log of a few segments, one record known by
number, and by default the watermark that makes it a store of our own engine. Queues
and index are not made here; a recovery of the undamaged store makes them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pyengine.engine_config import Geometry
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.formats.record import encode_blank
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from record_bytes import encode_record

UUID = "5b1f4a52-6f0e-4a1c-9b57-0d6a3f1f8e11"
FIRST_STORE_TIME_MS = 1_700_000_000_000
SMALL = Geometry(
    mapped_file_size_commit_log_bytes=4096, mapped_file_size_consume_queue_bytes=400, max_hash_slot_num=16, max_index_num=40
)


@dataclass(frozen=True)
class BuiltRecord:
    """One record as it is in the log."""

    start: int
    data: bytes
    topic: str
    queue_id: int
    queue_offset: int
    key: str
    store_timestamp_ms: int

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass
class BuiltStore:
    """A store on the disk and what was put into it."""

    root: Path
    geometry: Geometry
    records: list[BuiltRecord] = field(default_factory=list)
    blanks: list[int] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.geometry.mapped_file_size_commit_log_bytes

    @property
    def end(self) -> int:
        return self.records[-1].end if self.records else 0

    def segment(self, offset: int) -> Path:
        return StorePaths(self.root).commit_log_segment(offset - offset % self.size_bytes)

    def read(self, start: int, end: int) -> bytes:
        """Log bytes of one segment."""
        with open(self.segment(start), "rb") as file:
            file.seek(start % self.size_bytes)
            return file.read(end - start)

    def poke(self, offset: int, data: bytes) -> None:
        """Write into the log, file times kept as a disk error would leave them."""
        path = self.segment(offset)
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(offset % self.size_bytes)
            file.write(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def flip(self, offset: int, bit: int = 0) -> None:
        """Change one bit of the log."""
        self.poke(offset, bytes([self.read(offset, offset + 1)[0] ^ 1 << bit]))

    def boundary_before(self, offset: int) -> int:
        """The end of the last record that lies wholly below `offset`; a roll counts as part of the next record."""
        return max((record.end for record in self.records if record.end <= offset), default=0)

    def queue_ends(self, log_end: int) -> dict[tuple[str, int], int]:
        """The queues as they must be when the log ends at `log_end`."""
        ends: dict[tuple[str, int], int] = {}
        for record in self.records:
            if record.end <= log_end:
                ends[record.topic, record.queue_id] = record.queue_offset + 1
        return ends

    def mark(self, flushed: int) -> None:
        """Write the watermark of our own engine."""
        WATERMARK.write(self.root, DurableWatermark(UUID, 1, flushed))

    def tree(self, *ignored: str) -> dict[str, bytes]:
        """Every file but those below the folders in `ignored`; index files by their rank, since their names are times."""
        files: dict[str, bytes] = {}
        for path in sorted(self.root.rglob("*")):
            relative = path.relative_to(self.root)
            if path.is_file() and relative.parts[0] not in ignored:
                name = str(relative)
                if relative.parts[0] == "index":
                    name = f"index/{sum(key.startswith('index/') for key in files)}"
                files[name] = path.read_bytes()
        return files


@pytest.fixture
def build_store(tmp_path: Path) -> Callable[..., BuiltStore]:
    """build_store(count=20, flushed=None, ours=True, spare=True, geometry=SMALL, body_bytes=200) -> BuiltStore.

    `flushed` is the watermark, by default the end of the log's first half. `spare` adds
    the empty segment that the allocator prepares.
    """

    def build(
        count: int = 20, *, flushed: int | None = None, ours: bool = True, spare: bool = True,
        geometry: Geometry = SMALL, body_bytes: int = 200, seed: int = 1, name: str = "store",
    ) -> BuiltStore:
        rng = random.Random(seed)
        store = BuiltStore(tmp_path / name, geometry)
        StorePaths(store.root).commit_log.mkdir(parents=True)
        size = geometry.mapped_file_size_commit_log_bytes
        segments: dict[int, bytearray] = {0: bytearray(size)}
        next_offset: dict[tuple[str, int], int] = {}
        at = 0
        for number in range(count):
            topic, queue_id = f"topic-{number % 2}", number % 3 % 2
            fields = {
                "topic": topic, "queue_id": queue_id, "body": rng.randbytes(rng.randrange(1, body_bytes)),
                "queue_offset": next_offset.get((topic, queue_id), 0),
                "properties": f"KEYS\x01key-{number}\x02TAGS\x01tag-{number % 3}",
                "store_timestamp_ms": FIRST_STORE_TIME_MS + 1000 * number,
                "born_timestamp_ms": FIRST_STORE_TIME_MS, "born_host": "10.0.0.1:4000",
            }
            data = encode_record(physical_offset=at, **fields)
            if len(data) + 8 > size - at % size:
                segments[at - at % size][at % size : at % size + 8] = encode_blank(size - at % size)
                store.blanks.append(at)
                at += size - at % size
                segments[at] = bytearray(size)
                data = encode_record(physical_offset=at, **fields)
            segments[at - at % size][at % size : at % size + len(data)] = data
            store.records.append(
                BuiltRecord(at, data, topic, queue_id, fields["queue_offset"], f"key-{number}", fields["store_timestamp_ms"])
            )
            next_offset[topic, queue_id] = fields["queue_offset"] + 1
            at += len(data)
        if spare:
            segments[max(segments) + size] = bytearray(size)
        for start, content in segments.items():
            (StorePaths(store.root).commit_log / segment_name(start)).write_bytes(content)
        if ours:
            store.mark(store.records[count // 2].end if flushed is None else flushed)
        return store

    return build
