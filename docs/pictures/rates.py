"""Messages a second beside other logs, async and sync apart, with every round as a point."""

from __future__ import annotations

from charts import bars, turns
from shapes import Picture

SIZE = (760, 568)
ALT = """Bars of messages a second with the rounds as points, for pyengine, RocketMQ, Chronicle, Aeron, SQLite and LMDB: single
puts and batches in async mode, single puts in sync mode. The table below has the figures."""


def draw(p: Picture) -> None:
    p.text(20, 28, "Async: PUT_OK before the disk has it. Messages a second", 14, bold=True)
    bars(p, 20, 56, 350, "put, 128 B", turns("put, 128 B"))
    bars(p, 390, 56, 350, "put, 1 KiB", turns("put, 1 KiB"))
    batches = bars(p, 20, 256, 350, "put_many(256), 1 KiB", turns("put_many(256), 1 KiB"))
    p.text(20, batches + 24, "Sync: PUT_OK when the disk has it", 14, bold=True)
    bars(p, 20, batches + 46, 350, "put, 1 KiB", turns("put, sync, 1 KiB"), 76)
    several = turns("put, sync, 1 KiB, four producers")
    bars(p, 390, batches + 46, 350, "put, 1 KiB, four producers", several)
    bars(p, 390, 256, 350, "put_many(256), 128 B, two producers", turns("put_many(256), 128 B, two producers"))
    p.text(390, batches + 24, "bar: median; points: all rounds", 12, colour="muted")
