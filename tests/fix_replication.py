"""What tests of masters and slaves share: ports, the bytes of two logs, a producer under way."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pyengine
from pyengine.errors import EngineError
from pyengine.formats.paths import parse_segment_name
from pyengine.results import PutStatus
from waiting import eventually

UNCONFIRMED_PAUSE_S = 0.1


def log_bytes(root: Path, start: int, end: int) -> bytes:
    """The bytes [start, end) of a store's log as its files hold them; shorter where a segment is missing."""
    found = bytearray()
    for path in sorted((root / "commitlog").iterdir()):
        base = parse_segment_name(path.name)
        if base is None or base >= end or base + path.stat().st_size <= start:
            continue
        with path.open("rb") as file:
            file.seek(max(0, start - base))
            found += file.read(min(end, base + path.stat().st_size) - max(start, base))
    return bytes(found)


class Load:
    """Puts in a thread of its own, each waiting for its slaves, until stop(). Survives engines that come and go.

    `confirmed` are the ends of puts that got PUT_OK, with what was put; `statuses` counts all answers.
    """

    def __init__(self, root: Path, rng: random.Random, *, body_bytes_max: int = 2000, topic: str = "Ha") -> None:
        self.root = root
        self.rng = rng
        self.body_bytes_max = body_bytes_max
        self.topic = topic
        self.confirmed: list[tuple[int, int, bytes]] = []  # physical offset, its end, body
        self.statuses: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self.running = True
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while self.running:
            try:
                with pyengine.connect(self.root, refusals="return") as producer:
                    while self.running:
                        self.put(producer)
            except EngineError:
                threading.Event().wait(0.02)  # the engine is down
            except BaseException as error:
                self.errors.append(error)
                return

    def put(self, producer) -> None:
        body = self.rng.randbytes(self.rng.randrange(self.body_bytes_max))
        result = producer.put(self.topic, body, queue_id=self.rng.randrange(4), keys="k")
        self.statuses[result.status.name] = self.statuses.get(result.status.name, 0) + 1
        if result.status is PutStatus.PUT_OK:
            self.confirmed.append((result.physical_offset, result.physical_offset + result.size_bytes, body))
        else:  # refused, or not confirmed: a slave that comes back must not find more than it can catch up with
            threading.Event().wait(UNCONFIRMED_PAUSE_S)

    def wait_for(self, more: int) -> None:
        """Wait until so many more were confirmed."""
        wanted = len(self.confirmed) + more
        eventually(lambda: len(self.confirmed) >= wanted or self.errors, f"{more} more puts are confirmed", 60)
        assert not self.errors, self.errors

    def stop(self) -> None:
        self.running = False
        self.thread.join(30)
        assert not self.thread.is_alive() and not self.errors, self.errors

    def missing_in(self, log: bytes, start: int) -> list[int]:
        """Offsets of confirmed messages whose body is not where the answer said, in a log's bytes from `start` on."""
        return [at for at, end, body in self.confirmed if at >= start and body not in log[at - start:end - start]]
