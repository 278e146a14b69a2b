"""A topic, its queues, two groups and their offsets."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 300)
ALT = """The topic orders has three queues, whose messages are numbered from 0. The group billing has two members: one reads
queues 0 and 1, the other queue 2. Its offset in a queue is the number of the next message; lag is the number of messages from
there to the end. The group audit has offsets of its own."""
CELL = 34
QUEUES = ((9, 6, 2), (7, 7, 4), (10, 5, 0))  # messages in the queue, offset of billing, offset of audit


def draw(p: Picture) -> None:
    p.text(20, 28, "topic orders", bold=True)
    left, right = 92, 92 + 10 * CELL
    for queue, (end, offset, audit) in enumerate(QUEUES):
        y = 58 + 66 * queue
        p.text(20, y + 21, f"queue {queue}", 13)
        for number in range(end):
            p.box(left + number * CELL, y, CELL - 3, 30, str(number), fill="green" if number < offset else "yellow", title=False)
        p.line((left + offset * CELL - 2, y - 8), (left + offset * CELL - 2, y + 38), colour="blue_edge", width=2.5)
        p.line((left + audit * CELL - 2, y - 8), (left + audit * CELL - 2, y + 38), colour="purple_edge", width=2.5, dashed=True)
        p.text(right + 10, y + 21, f"lag {end - offset}", 12, colour="muted")
    first = p.box(580, 74, 160, 44, "member 1", "of group billing", fill="blue")
    second = p.box(580, 193, 160, 44, "member 2", "of group billing", fill="blue")
    for y, member, end_y in ((73, first, 88), (139, first, 104), (205, second, second.left[1])):
        p.arrow((right + 56, y), (member.x, end_y), colour="blue_edge")
    y = 270
    p.line((22, y - 14), (22, y + 6), colour="blue_edge", width=2.5)
    p.text(30, y, "offset of billing: its next message", 12)
    p.line((252, y - 14), (252, y + 6), colour="purple_edge", width=2.5, dashed=True)
    p.text(260, y, "offset of audit, another group", 12)
    p.box(456, y - 15, 22, 22, "", fill="green")
    p.text(484, y, "done by billing", 12)
    p.box(592, y - 15, 22, 22, "", fill="yellow")
    p.text(620, y, "its lag: not done yet", 12)
