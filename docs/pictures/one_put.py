"""One put as a sequence, async and sync side by side."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 400)
ALT = """A put in async mode: the producer copies the message into its ring and wakes the writer; the writer checks and copies
it into the log, publishes the commit slot and wrote; the producer sees that it was acknowledged and returns PUT_OK. In sync
mode the flusher then calls fdatasync, moves flushed and wakes the producer, and the put returns PUT_OK."""


def lifelines(p: Picture, end: float, **names: float) -> None:
    for name, x in names.items():
        p.box(x - 42, 44, 84, 28, name, fill="blue" if name == "producer" else "green")
        p.line((x, 72), (x, end), dashed=True, width=0.8)


def step(p: Picture, start: float, end: float, y: float, text: str) -> None:
    """From one lifeline to another; a step within a process has its text beside its dot."""
    if start == end:
        p.dot(start, y, "green_edge", 4)
        p.text(start + 9, y + 4, text, 12)
        return
    p.line((start, y), (end, y), head=True)
    p.text((start + end) / 2, y - 6, text, 12, anchor="middle")


def returned(p: Picture, x: float, y: float) -> None:
    p.box(x - 42, y, 84, 26, "PUT_OK", fill="yellow")


def draw(p: Picture) -> None:
    p.text(20, 26, "async: at written", 14, bold=True)
    producer, writer = 62, 230
    lifelines(p, 330, producer=producer, writer=writer)
    step(p, producer, producer, 92, "copy into the ring")
    step(p, producer, writer, 130, "tail; wake if asleep")
    for number, text in enumerate(("copy, check", "write the record", "commit slot, wrote")):
        step(p, writer, writer, 160 + 28 * number, text)
    step(p, writer, producer, 256, "acked")
    returned(p, producer, 276)
    p.line((370, 20), (370, 380), width=0.8)
    p.text(390, 26, "sync: at flushed", 14, bold=True)
    producer, writer, flusher = 432, 556, 690
    lifelines(p, 388, producer=producer, writer=writer, flusher=flusher)
    step(p, producer, writer, 104, "ring, tail, wake")
    p.text(producer + 8, 136, "sleeps once", 12, colour="muted")
    for number, text in enumerate(("copy, check", "write the record", "commit slot, wrote")):
        step(p, writer, writer, 134 + 26 * number, text)
    step(p, writer, flusher, 230, "wake")
    for number, text in enumerate(("fdatasync", "flushed")):
        step(p, flusher, flusher, 256 + 26 * number, text)
    p.line((flusher, 320), (producer, 320), head=True)
    p.text((producer + writer) / 2, 314, "flush sequence", 12, anchor="middle")
    returned(p, producer, 338)
