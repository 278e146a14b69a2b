"""A failover by hand, in four frames with the terms."""

from __future__ import annotations

from shapes import Picture

SIZE = (760, 400)
ALT = """Four frames. First: store A is the master of term n, store B follows as its slave. Second: A is lost; B serves reads
and refuses puts, and nothing promotes it by itself. Third: an operator runs pyengine promote on B, which is now the master of
term n + 1; until A and B meet, A would take puts too. Fourth: A hears of term n + 1 and refuses puts; started as a slave of B
it moves what only it had into quarantine and follows."""


def frame(p: Picture, number: int, title: str) -> tuple[float, float]:
    x, y = 16 + 372 * ((number - 1) % 2), 16 + 190 * ((number - 1) // 2)
    p.rect(x, y, 356, 176, "paper", edge="grey_edge", radius=6)
    p.text(x + 12, y + 22, f"{number}. {title}", bold=True)
    return x, y


def pair(p: Picture, x: float, y: float, first: tuple[str, ...], second: tuple[str, ...], fills: str) -> None:
    one, other = fills.split()
    p.box(x + 14, y + 40, 136, 62, *first, fill=one, dashed=one == "red")
    p.box(x + 206, y + 40, 136, 62, *second, fill=other)


def draw(p: Picture) -> None:
    x, y = frame(p, 1, "B follows A")
    pair(p, x, y, ("A: master", "term n", "takes puts"), ("B: slave", "same log", "serves reads"), "green blue")
    p.line((x + 150, y + 71), (x + 206, y + 71), head=True)
    p.text(x + 166, y + 62, "log", 12, colour="muted")
    p.text(x + 14, y + 128, "SYNC_MASTER: PUT_OK once a slave", 12, colour="muted")
    p.text(x + 14, y + 145, "has the message", 12, colour="muted")
    x, y = frame(p, 2, "A is lost")
    pair(p, x, y, ("A", "no answer"), ("B: slave", "refuses puts", "serves reads"), "red blue")
    p.text(x + 14, y + 128, "pyengine does not promote by itself:", 12, colour="muted")
    p.text(x + 14, y + 145, "pyengine status B", 12, mono=True)
    x, y = frame(p, 3, "an operator promotes B")
    pair(p, x, y, ("A", "if it runs: takes", "puts till they meet"), ("B: master", "term n + 1", "takes puts"), "red green")
    p.text(x + 14, y + 128, "pyengine promote B", 12, mono=True)
    p.text(x + 14, y + 145, "Stop A first where you can; both know each other", 12, colour="muted")
    p.text(x + 14, y + 161, "by ha_peers.", 12, colour="muted")
    x, y = frame(p, 4, "A comes back")
    pair(p, x, y, ("A: slave", "only its own bytes:", "to quarantine"), ("B: master", "term n + 1", "takes puts"), "blue green")
    p.line((x + 206, y + 71), (x + 150, y + 71), head=True)
    p.text(x + 166, y + 62, "log", 12, colour="muted")
    p.text(x + 14, y + 128, "A hears of term n + 1 and refuses puts, until", 12, colour="muted")
    p.text(x + 14, y + 145, "pyengine start A --set broker_role=SLAVE", 12, mono=True)
    p.text(x + 14, y + 161, "--set ha_master_address=B:PORT", 12, mono=True)
