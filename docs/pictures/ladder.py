"""The positions of the log that promise more and more, and what each failure takes."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 330)
ALT = """Four positions in the log. Written: complete records, moved by the writer. Committed: in the page cache, moved by the writer, or
with the pool by the committer. Flushed: on the disk, moved by the flusher. Replicated: on the required number of slaves, moved by the
replicator. Kill -9 of every process takes nothing. A power cut takes what is after flushed. Loss of the disk takes what is
after replicated. Async mode answers a put at written, sync mode at flushed."""
STEPS = (("written", "complete records", "writer", 560, "purple"),
         ("committed", "in the files' page cache", "writer; with the pool: committer", 480, "blue"),
         ("flushed", "on the disk", "flusher", 360, "green"), ("replicated", "on enough slaves", "replicator", 290, "yellow"))
LEFT = 110


def draw(p: Picture) -> None:
    p.text(20, 28, "up to here the log is ...", bold=True)
    for number, (name, means, mover, end, fill) in enumerate(STEPS):
        y = 42 + 38 * number
        p.rect(LEFT, y, end - LEFT, 28, fill, edge=f"{fill}_edge", radius=3)
        p.text(20, y + 19, name, bold=True)
        p.text(LEFT + 10, y + 19, means, 12)
        p.text(end + 10, y + 19, f"moved by the {mover}", 12, colour="muted")
    p.line((LEFT, 202), (600, 202), head=True)
    p.text(606, 206, "end of the log", 12, colour="muted")
    p.text(20, 232, "what is lost", bold=True)
    rows = (("kill -9 of all", None, "nothing: page cache and shared memory outlive the processes"),
            ("power cut", 360, "what is after flushed"), ("disk lost", 290, "what is after replicated"))
    for number, (failure, start, says) in enumerate(rows):
        y = 244 + 26 * number
        p.text(20, y + 15, failure, 12)
        p.rect(LEFT, y, (start or 560) - LEFT, 20, "green", edge="green_edge")
        if start:
            p.rect(start, y, 560 - start, 20, "red", edge="red_edge")
        p.text((start or LEFT) + 10, y + 15, says, 12)
    for number, note in enumerate(("PUT_OK: async at written,", "sync at flushed; flushed and", "replicated move on their own")):
        p.text(580, 283 + 16 * number, note, 12, colour="muted")
