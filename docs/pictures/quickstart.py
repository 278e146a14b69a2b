"""A run of scripts/quickstart as it is printed, with a worker killed on the way."""

from __future__ import annotations

from shapes import Picture
from terminal import Lines, recorded, size_for, terminal

ALT = """A terminal in which scripts/quickstart runs: four producers put, the writer gets SIGKILL and is back, the store is
checked, and Spark counts in it what the producers counted. Long pauses are shortened, some lines are left out."""
TOPICS_SHOWN = 3
DETAILS = ("log: ", "grade ", "min offset", "end offset", "messages  ", "queue", "index ", "bytes ", "seconds ")  # most of `check`'s


def shown() -> Lines:
    """The run without every second line of progress, the details of `check`, and the topics after the first ones."""
    lines, topics = [], 0
    for at_s, line in recorded("quickstart"):
        is_topic = line.endswith(" same") and not line.startswith(("...", "all "))
        topics += is_topic
        is_progress = line.strip()[:4] in ("10 %", "30 %", "50 %", "70 %", "90 %")
        if line and not (is_progress or line.startswith(DETAILS) or (is_topic and topics > TOPICS_SHOWN)):
            lines.append((at_s, line))
    return lines


LINES = shown()
SIZE = size_for(LINES)


def colour_of(line: str) -> str:
    if line.startswith("  SIGKILL"):
        return "red_edge"
    if " is back after " in line or line.startswith("Nothing "):
        return "green_edge"
    return "blue_edge" if line.startswith("$") else "ink"


def draw(p: Picture) -> None:
    terminal(p, "scripts/quickstart", LINES, colour_of)
