"""One refresh of `pyengine top`, beside a program that puts into three topics."""

from __future__ import annotations

from shapes import Picture
from terminal import recorded, size_for, terminal

ALT = """A terminal with pyengine top: puts a second, their times and the disk's; the log's positions; each worker with its
state; each topic with its rates."""
LINES = recorded("top")
SIZE = size_for(LINES)


def colour_of(line: str) -> str:
    return "blue_edge" if line.startswith(("position ", "worker ", "topic ")) else "ink"


def draw(p: Picture) -> None:
    terminal(p, "pyengine top my-store", LINES, colour_of)
