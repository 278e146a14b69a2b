"""The processes of an engine, what they hand on, and what only each of them may move."""

from __future__ import annotations

from pyengine.engine.kinds import KINDS
from shapes import Picture

SIZE = (760, 430)
ALT = """Producers write into rings. The writer appends what is in them to the log, the flusher syncs it, the reputter enters it
into queues and index, which wakes consumers. Committer, allocator, checkpointer, cleaner, scheduler, replicator, gateway and
gRPC work beside them. The supervisor watches them all, the fork server forks them. Spark reads the files."""


def draw(p: Picture) -> None:
    producers = p.box(16, 80, 112, 52, "producers", "sessions", fill="blue")
    boxes = {}
    for name, x, y, width, *lines in (
            ("writer", 232, 80, 130, "moves wrote"), ("committer", 426, 20, 140, "only with the pool", "moves committed"),
            ("flusher", 626, 80, 118, "fdatasync", "moves flushed"), ("reputter", 426, 152, 140, "queues and index", "moves reput_from"),
            ("allocator", 16, 246, 136, "next segment"), ("checkpointer", 162, 246, 136, "syncs queues"),
            ("cleaner", 308, 246, 136, "deletes old files"),
            ("scheduler", 454, 246, 136, "delayed messages"), ("replicator", 16, 308, 136, "log to slaves"),
            ("gateway", 162, 308, 136, "RocketMQ's clients"), ("grpc", 308, 308, 136, "RocketMQ 5's clients")):
        fill = "yellow" if name in ("replicator", "gateway", "grpc") else "green"
        boxes[name] = p.box(x, y, width, 52 if len(lines) < 2 else 62, name, *lines, fill=fill, dashed=name == "committer")
    if set(boxes) != {kind.name for kind in KINDS}:
        raise ValueError("the kinds of workers are not those of pyengine/engine/kinds.py")
    writer, committer, flusher, reputter = (boxes[name] for name in ("writer", "committer", "flusher", "reputter"))
    p.arrow(producers.right, writer.left, label="submission ring", above=7)
    p.line((writer.right[0], 96), (395, 96), (395, 51), committer.left, head=True)
    p.line((566, 51), (685, 51), flusher.top, head=True)
    p.arrow((writer.right[0], 108), (flusher.x, 108), label="segments: page cache", above=6)
    p.line((writer.right[0], 122), (395, 122), (395, 183), reputter.left, head=True)
    p.line((writer.x + 40, 80), (writer.x + 40, 51), (72, 51), producers.top, head=True)
    p.text(82, 44, "answers (async)", 12, colour="muted")
    consumers = p.box(626, 157, 118, 52, "consumers", "sleep till woken", fill="blue")
    p.line(reputter.right, consumers.left, head=True)
    p.line((685, 80), (685, 12), (44, 12), (44, 80), head=True, dashed=True)
    p.text(224, 27, "flush sequence (sync)", 12, colour="muted")
    p.box(454, 308, 136, 52, "Spark", "files, nothing shared", fill="purple")
    p.box(16, 372, 282, 46, "supervisor", "recovers, starts, watches, restarts; opens sessions", fill="red", size=12)
    p.box(308, 372, 282, 46, "fork server", "forks the workers, holds nothing of the store", fill="red", size=12)
    for y, fill, text in ((262, "green", "always"), (288, "yellow", "if configured"), (314, "blue", "your programs"),
                          (340, "purple", "readers of files"),
                          (390, "red", "starts the workers")):
        p.rect(612, y, 16, 16, fill, edge=f"{fill}_edge", radius=3)
        p.text(636, y + 13, text, 12)
