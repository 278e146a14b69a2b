"""How recovery decides where the log ends, and what becomes of the bytes after it."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 376)
ALT = """A decision tree. If shared memory belongs to these files, the log ends at the slot's position; otherwise at the first
byte that is part of no whole record. Below the durable watermark that is degraded, exit code 3. What is after the end is left
if zeros, cleared if never published or one torn record, and otherwise moved to quarantine, exit code 4."""


def draw(p: Picture) -> None:
    p.box(180, 16, 300, 54, "Is shared memory of these files?", "UUID, epoch, boot, lock; they reach far enough", fill="blue")
    slot = p.box(16, 116, 250, 54, "the end is the slot's position", "pool buffers are written into the files", fill="green")
    scan = p.box(396, 116, 348, 54, "the end is the first byte of no whole record", "each record is read with its CRC", fill="green")
    below = p.box(396, 212, 220, 40, "below the watermark?", fill="blue")
    p.box(516, 286, 228, 62, "degraded", "nothing changes, exit code 3", "restore, salvage, --accept-loss", fill="red")
    after = p.box(120, 212, 210, 40, "What is after the end?", fill="blue")
    p.line((250, 70), (250, 93), (141, 93), slot.top, head=True)
    p.text(160, 88, "yes", 12, colour="muted")
    p.line((410, 70), (410, 93), (570, 93), scan.top, head=True)
    p.text(480, 88, "no", 12, colour="muted")
    p.line((506, 170), below.top, head=True)
    p.line((560, 252), (560, 286), head=True, colour="red_edge")
    p.text(568, 274, "yes", 12, colour="muted")
    p.line(below.left, after.right, head=True)
    p.text(356, 226, "no", 12, colour="muted")
    p.line((180, 170), (180, 212), head=True)
    for number, (fill, *lines) in enumerate((("grey", "zeros", "left"), ("yellow", "not published", "cleared"),
                                             ("yellow", "one torn record", "cleared"), ("red", "anything else", "quarantine, exit 4"))):
        x = 16 + 122 * number
        choice = p.box(x, 312, 116, 50, *lines, fill=fill, size=12)
        p.line((225, 252), (225, 284), (choice.top[0], 284), choice.top, head=True)
