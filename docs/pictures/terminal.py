"""A terminal with what record.py kept of a program, as it was printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from shapes import Picture, width_of

HERE = Path(__file__).resolve().parent
STEP, TOP, SIZE_PX = 15, 46, 11
PAUSE_S_MAX = 1.5
LETTERS_MAX = 108
Lines = list[tuple[float, str]]


def recorded(name: str) -> Lines:
    return [(at_s, line) for at_s, line in json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))]


def size_for(lines: Lines) -> tuple[int, int]:
    return 760, TOP + STEP * len(lines) + 6


def terminal(p: Picture, command: str, lines: Iterable[tuple[float, str]], colour_of: Callable[[str], str]) -> None:
    """Each line appears at its time; pauses are PAUSE_S_MAX long at most, and lines LETTERS_MAX letters."""
    p.rect(0.5, 0.5, p.width - 1, p.height - 1, "paper", edge="grey_edge", radius=8)
    p.text(20, 24, f"$ {command}", 12, mono=True, bold=True)
    shown_s, last_s = 0.0, 0.0
    for number, (at_s, line) in enumerate(lines):
        shown_s += min(PAUSE_S_MAX, at_s - last_s)
        last_s = at_s
        text = line if len(line) <= LETTERS_MAX else line[:LETTERS_MAX - 3] + "..."
        if not text.strip():
            continue
        y = TOP + STEP * number
        with p.appearing(shown_s):
            if set(text) == {"─"}:
                p.line((20, y - 4), (20 + width_of(text, SIZE_PX, mono=True), y - 4), colour="grey_edge")
            else:
                p.text(20, y, text, SIZE_PX, mono=True, colour=colour_of(text))
