"""A run of scripts/quickstart as it is printed, from what record.py kept."""

from __future__ import annotations

import json
from pathlib import Path

from shapes import Picture, width_of

KEPT = Path(__file__).resolve().parent / "quickstart.json"
TOPICS_SHOWN = 3


def shown() -> list[tuple[float, str]]:
    """The run without every second line of progress, what `check` says after its first line, and the topics after the first three."""
    lines, topics = [], 0
    for at_s, line in json.loads(KEPT.read_text(encoding="utf-8")):
        topics += line.endswith(" same") and not line.startswith(("...", "all "))
        is_progress = line.lstrip()[:4].strip() in ("10 %", "30 %", "50 %", "70 %", "90 %")
        is_detail = line.split(" ")[0] in ("grade", "log", "log:", "queues", "index", "read") and "session" not in line
        is_further = topics > TOPICS_SHOWN and line.endswith(" same") and not line.startswith(("...", "all "))
        if line and not (is_progress or is_detail or is_further or line.startswith("messages  ")):
            lines.append((at_s, line))
    return lines


LINES = shown()
STEP, TOP = 15, 46
SIZE = (760, TOP + STEP * len(LINES) + 6)
ALT = """A terminal in which scripts/quickstart runs: an engine starts, four producers put lines of Python's library, the writer
gets SIGKILL on the way and is back, the store is checked, and Spark counts in it what the producers counted: nothing was lost
and nothing doubled. Long pauses are shortened, some lines are left out."""
PAUSE_S_MAX = 1.5
LETTERS_MAX = 108


def colour_of(line: str) -> str:
    if line.startswith("  SIGKILL"):
        return "red_edge"
    if " is back after " in line or line.startswith("Nothing "):
        return "green_edge"
    return "blue_edge" if line.startswith("$") else "ink"


def draw(p: Picture) -> None:
    p.rect(0.5, 0.5, SIZE[0] - 1, SIZE[1] - 1, "paper", edge="grey_edge", radius=8)
    p.text(20, 24, "$ scripts/quickstart", 12, mono=True, bold=True)
    shown_s, last_s = 0.5, 0.0
    for number, (at_s, line) in enumerate(LINES):
        shown_s += min(PAUSE_S_MAX, at_s - last_s)
        last_s = at_s
        text = line if len(line) <= LETTERS_MAX else line[:LETTERS_MAX - 3] + "..."
        if set(text) == {"─"}:
            y = TOP + STEP * number - 4
            with p.appearing(shown_s):
                p.line((20, y), (20 + width_of(text, 11, mono=True), y), colour="grey_edge")
            continue
        with p.appearing(shown_s):
            p.text(20, TOP + STEP * number, text, 11, mono=True, colour=colour_of(text))
