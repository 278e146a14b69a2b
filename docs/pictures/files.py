"""The files of a store, and how queues and index lead into the log."""

from __future__ import annotations

from pyengine.engine_config import EngineConfig
from shapes import Picture

SIZE = (760, 400)
ALT = """The folder of a store. commitlog has segments of whole records, each closed by a blank. consumequeue has a folder for
each topic and queue, whose entries lead to records; index leads from a key to them. Beside them are checkpoint, abort, lock and
config."""


def draw(p: Picture) -> None:
    size = EngineConfig().mapped_file_size_commit_log_bytes
    p.text(20, 28, "commitlog/", bold=True, mono=True)
    for number, x in enumerate((20, 394)):
        p.rect(x, 40, 346, 70, "grey", edge="grey_edge", radius=4)
        p.text(x + 10, 58, f"{number * size:020d}", 12, mono=True, colour="muted")
        widths = (62, 88, 54, 74) if number == 0 else (80, 60)
        at = x + 10
        for width in widths:
            p.box(at, 68, width - 3, 32, "record", fill="green", size=11, title=False)
            at += width
        end, fill = ("zeros", "paper") if number else ("blank", "yellow")
        p.box(at, 68, 46, 32, end, fill=fill, size=11, title=False, dashed=bool(number))
    for x, place, says in ((20, "consumequeue/TOPIC/QUEUE/", "entries of 20 bytes: offset, size, tags code"),
                           (394, "index/", "a key leads to its newest entry, each to the one before")):
        p.rect(x, 150, 346, 82, "grey", edge="grey_edge", radius=4)
        p.text(x + 10, 206, place, bold=True, mono=True)
        p.text(x + 10, 223, says, 12, colour="muted")
    for number, target in enumerate((61, 207, 444)):
        x = 30 + 74 * number
        p.box(x, 158, 70, 28, str(number), fill="blue", title=False)
        p.line((x + 35, 158), (target, 101), head=True, colour="blue_edge")
    p.box(404, 158, 96, 28, "slot of a key", fill="purple", title=False)
    p.box(530, 158, 160, 28, "entry: offset, time", fill="purple", title=False)
    p.line((500, 172), (530, 172), head=True, colour="purple_edge")
    p.line((690, 172), (715, 172), (715, 130), (514, 130), (514, 101), head=True, colour="purple_edge")
    for x, y, width, name, says in (
            (20, 250, 230, "checkpoint", "up to when all is durable"), (20, 306, 230, "abort", "while the store is open"),
            (265, 250, 230, "lock", "who owns the store"),
            (265, 306, 230, "config/watermark", "up to where the log is durable"),
            (510, 250, 230, "config/topics.json", "queues of each topic"),
            (510, 306, 230, "config/consumerOffset.json", "offsets of the groups")):
        p.box(x, y, width, 48, f"`{name}", says, title=False)
    p.text(20, 382, "/dev/shm/pyengine-ID/", 12, mono=True)
    p.text(200, 382, "shared memory, a cache of these files; with the pool also bytes that are not committed", 12, colour="muted")
