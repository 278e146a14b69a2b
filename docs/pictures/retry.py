"""The life of a message with a delay, retries and dead letters."""

from __future__ import annotations

from pyengine.client.consumer import MAX_DELIVERIES
from pyengine.client.retries import MAX_RECONSUME_TIMES
from shapes import Picture

SIZE = (760, 330)
ALT = """A put enters the message into its topic's queue; with a delay it waits in SCHEDULE_TOPIC_XXXX first. A member of the
group gets it. If the handler returns, it is acknowledged and done. If it raises, a copy waits in SCHEDULE_TOPIC_XXXX and then
enters the group's retry topic, from which a member gets it again. After 16 retries, or 16 deliveries that ended by a kill, it
is a dead letter in the group's DLQ topic, from which dlq requeue puts it into the retry topic."""


def draw(p: Picture) -> None:
    put = p.box(16, 40, 84, 44, "put", fill="blue")
    waits = p.box(190, 132, 210, 52, "waits for its time", "`SCHEDULE_TOPIC_XXXX", fill="yellow")
    queue = p.box(190, 36, 210, 52, "its queue", "`orders", fill="green")
    retry = p.box(190, 240, 210, 52, "the group's retries", "`%RETRY%billing", fill="green")
    handler = p.box(500, 132, 120, 52, "handler", "of a member", fill="blue")
    done = p.box(650, 40, 94, 44, "done", "offset moves", fill="green")
    dead = p.box(560, 240, 184, 52, "dead letter", "`%DLQ%billing", fill="red")
    p.line(put.right, queue.left, head=True)
    p.line((80, 84), (80, 150), (190, 150), head=True)
    p.text(88, 140, "with a delay", 12, colour="muted")
    p.line(waits.top, queue.bottom, head=True)
    p.line(waits.bottom, retry.top, head=True)
    p.line(queue.right, (540, 62), (540, 132), head=True)
    p.line((400, 254), (520, 254), (520, 184), head=True)
    p.text(420, 270, "delivered again", 12, colour="muted")
    p.line((590, 132), (590, 62), done.left, head=True)
    p.text(598, 110, "returns: ack", 12, colour="muted")
    p.arrow(handler.left, waits.right, label="raises: retry", above=7)
    p.line((600, 184), (600, 240), head=True, colour="red_edge")
    p.text(608, 204, f"after {MAX_RECONSUME_TIMES} retries, or", 12, colour="muted")
    p.text(608, 221, f"{MAX_DELIVERIES} deliveries", 12, colour="muted")
    p.line(dead.bottom, (652, 318), (295, 318), retry.bottom, head=True, dashed=True)
    p.text(474, 312, "pyengine dlq requeue", 12, anchor="middle", colour="muted")
