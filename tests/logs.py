"""Logs for the tests of what reads them: segments of varied records, built by formats alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pyengine.formats.paths import segment_name
from pyengine.formats.record import Message, decode_record, encode_blank
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.mapped_file import list_segments, map_read_only
from record_bytes import encode_record


@dataclass
class LogBuilder:
    """Appends records as the writer would: blanks at segment ends, queue offsets without gaps."""

    segment_bytes: int
    first_offset: int = 0
    segments: list[bytearray] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    queue_offsets: dict[tuple[str, int], int] = field(default_factory=dict)
    used: int = 0  # in the last segment

    @property
    def end(self) -> int:
        return self.first_offset + max(0, len(self.segments) - 1) * self.segment_bytes + self.used

    def append(self, topic: str = "T", body: bytes = b"body", *, queue_id: int = 0, sys_flag: int = 0,
               queue_offset: int | None = None, **fields) -> Message:
        """One record; its queue offset is the queue's next unless given."""
        queued = sys_flag & 0xC not in (0x4, 0xC)
        key = (topic, queue_id)
        if queue_offset is None:
            queue_offset = self.queue_offsets.get(key, 0) if queued else 0
        if queued:
            self.queue_offsets[key] = queue_offset + 1
        values = {"topic": topic, "body": body, "queue_id": queue_id, "sys_flag": sys_flag, "queue_offset": queue_offset,
                  "store_timestamp_ms": 1_700_000_000_000 + 700 * len(self.messages), **fields}
        size = len(encode_record(**values))
        if not self.segments or self.used + size + 8 > self.segment_bytes:
            self.roll()
        data = encode_record(**values, physical_offset=self.end)
        self.segments[-1][self.used : self.used + size] = data
        self.messages.append(decode_record(data))
        self.used += size
        return self.messages[-1]

    def append_varied(self, rng: random.Random, count: int, topics: Iterable[str] = ("A", "topic-1", "主题")) -> None:
        """Records of all kinds: transactions, keys, tags, delays, hosts."""
        topics = list(topics)
        for number in range(count):
            keys = " ".join(f"k{rng.randrange(50)}" for _ in range(rng.randrange(4)))
            pieces = [f"KEYS\x01{keys}"] if keys else []
            pieces += [f"UNIQ_KEY\x01U{rng.randrange(1 << 30):08X}"] if rng.random() < 0.7 else []
            pieces += [f"TAGS\x01{rng.choice(['tagA', 'tagB', '标签', 'polygenelubricants'])}"] if rng.random() < 0.7 else []
            pieces += [f"DELAY\x01{rng.randrange(25)}"] if rng.random() < 0.1 else []
            rng.shuffle(pieces)
            self.append(
                rng.choice([*topics, "SCHEDULE_TOPIC_XXXX"]) if rng.random() < 0.3 else topics[0],
                rng.randbytes(rng.choice([0, 3, 40, 200])),
                queue_id=rng.randrange(3),
                sys_flag=rng.choice([0, 0, 0, 0x4, 0x8, 0xC]),
                properties="\x02".join(pieces),
                born_host=rng.choice(["10.0.0.1:1", "[::1]:1"]),
            )

    def write(self, root: Path) -> Path:
        """The segments as files below `root`."""
        folder = root / "commitlog"
        folder.mkdir(parents=True)
        for number, data in enumerate(self.segments):
            (folder / segment_name(self.first_offset + number * self.segment_bytes)).write_bytes(data)
        return root

    def roll(self) -> None:
        if self.segments:
            self.segments[-1][self.used : self.used + 8] = encode_blank(self.segment_bytes - self.used)
        self.segments.append(bytearray(self.segment_bytes))
        self.used = 0


class Log:
    """The mapped segments of a store, to dispatch or scan from."""

    def __init__(self, root: Path, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.views = {
            segment.start_offset: map_read_only(segment.path)
            for segment in list_segments(root / "commitlog", segment_bytes)
        }

    @property
    def start(self) -> int:
        return min(self.views, default=0)

    def dispatch(self, dispatcher, start: int | None = None, end: int | None = None) -> int:
        """Dispatch from `start` to `end` or as far as it goes; the position reached."""
        position = self.start if start is None else start
        while True:
            base = position - position % self.segment_bytes
            if base not in self.views:
                return position
            stop = base + self.segment_bytes if end is None else min(end, base + self.segment_bytes)
            if stop <= position:
                return position
            reached = dispatcher.dispatch(self.views[base], base, position, stop)
            if reached == position:
                return position
            position = reached


def files_below(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file."""
    if not folder.is_dir():
        return {}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def index_contents(root: Path) -> list[bytes]:
    """Contents of the index files in the order of their names, which are times."""
    return list(files_below(root / "index").values())


def queue_ends(dispatcher: Dispatcher) -> dict[tuple[str, int], int]:
    """The next queue offset of every queue that got entries from the dispatcher."""
    queues = dispatcher.loop.queues
    return {(queues.topic(number).decode("utf-8", "replace"), queues[number].queue_id): queues[number].next_offset
            for number in range(len(queues)) if not queues[number].refused}
