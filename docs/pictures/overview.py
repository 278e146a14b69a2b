"""Programs put into one log; consumers, tables and RocketMQ's clients read it."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 300)
ALT = """Programs put messages into one log, the files of a store on a local disk, which the engine's processes write. Consumer groups,
Spark, DuckDB, Polars and pandas read these files. RocketMQ's clients send and consume through the gateway."""


def draw(p: Picture) -> None:
    p.text(20, 28, "Programs", bold=True)
    producers = [p.box(20, 42 + 52 * number, 150, 40, name, "`put, put_many", fill="blue")
                 for number, name in enumerate(("web service", "import job", "any process"))]
    clients = p.box(20, 222, 150, 56, "RocketMQ's clients", "Java, Go, ...", "unchanged", fill="yellow")
    p.text(262, 28, "One log: files of one store", bold=True)
    p.rect(262, 42, 236, 236, "grey", edge="grey_edge", radius=6)
    p.text(380, 66, "engine: worker processes", 12, anchor="middle", colour="muted")
    gateway = p.box(278, 232, 204, 36, "gateway", fill="yellow")
    p.box(278, 78, 204, 30, "writer, flusher, reputter ...", fill="green", title=False)
    p.box(278, 120, 204, 46, "commit log", "every message, in order", fill="green")
    p.box(278, 176, 98, 40, "queues", "by topic", fill="green")
    p.box(384, 176, 98, 40, "index", "by key", fill="green")
    for one in producers:
        p.arrow(one.right, (262, one.right[1]))
    p.text(566, 28, "Readers", bold=True)
    readers = [p.box(566, 42 + 52 * number, 174, 40, *lines, fill="purple") for number, lines in enumerate((
        ("consumer groups", "`consume, run_consumer"), ("DuckDB, Polars, pandas", "`arrow.dataset"), ("Spark", "`read, readStream")))]
    for one in readers:
        p.arrow((498, one.left[1]), one.left)
    p.line(clients.right, gateway.left, head=True)
    p.line(gateway.left, clients.right, head=True)
    p.text(566, 226, "no server to ask: readers", 12, colour="muted")
    p.text(566, 243, "open the files themselves", 12, colour="muted")
