"""Panels of figures: bars with the rounds as points, curves, and what bench/ keeps for them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import Picture, width_of

BENCH = Path(__file__).resolve().parents[2] / "bench"
NAMES = {"pyengine": "pyengine", "rocketmq": "RocketMQ", "chronicle": "Chronicle", "aeron": "Aeron", "sqlite": "SQLite", "lmdb": "LMDB"}


def kept() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BENCH / "figures.json").read_text(encoding="utf-8"))
    return document


def turns(work: str, figure: str = "rate") -> dict[str, list[float]]:
    """One figure of every round of each log, for a work of the comparison."""
    for outcome in kept()["outcomes"]:
        if outcome["work"]["name"] == work:
            return {log: [turn[figure] for turn in outcome["turns"][log]] for log in NAMES if outcome["turns"].get(log)}
    raise ValueError(f"bench/figures.json has no work {work!r}")


def short(value: float) -> str:
    """For a scale: 2M, 500k, 0.5."""
    for divisor, unit in ((1e6, "M"), (1e3, "k")):
        if value >= divisor:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:.3g}"


def steps_to(highest: float) -> list[float]:
    """Two to five round steps of a scale from 0 on."""
    step: float = 10.0 ** math.floor(math.log10(highest))
    step = next(step * factor for factor in (0.25, 0.5, 1, 2, 2.5) if step * factor * 4 >= highest)
    return [step * number for number in range(1, math.floor(highest / step) + 1)]


def bars(p: Picture, x: float, y: float, width: float, title: str, rounds: Mapping[str, Sequence[float]], label: float = 76) -> float:
    """A bar up to the median for each name, its rounds as points, on a scale from 0; returns where the panel ends."""
    p.text(x, y, title, bold=True)
    left, row = x + label, 24
    room = width - label - 8
    highest = max(max(values) for values in rounds.values())
    bottom = y + 14 + row * len(rounds)
    for step in steps_to(highest):
        at = left + step / highest * room
        p.line((at, y + 10), (at, bottom), colour="grey_edge", width=0.4)
        text = short(step)
        if at + width_of(text, 11) / 2 <= x + width:
            p.text(at, bottom + 13, text, 11, anchor="middle", colour="muted")
    for number, (name, values) in enumerate(rounds.items()):
        middle = y + 14 + row * number + row / 2
        ours = name == "pyengine"
        p.text(left - 8, middle + 4, NAMES.get(name, name), 12, anchor="end", bold=ours)
        fill = "blue" if ours else "grey"
        p.rect(left, middle - 8, statistics.median(values) / highest * room, 16, fill, edge=f"{fill}_edge")
        for value in values:
            p.dot(left + value / highest * room, middle, f"{fill}_edge")
    return bottom + 20


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis from `low` to `high`, drawn from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (self.end - self.start) * math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self) -> list[float]:
        """Powers of ten, every second one if they are many."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0 ** power for power in range(first, last + 1, 1 + (last - first > 5))]


def over(values: Sequence[float], start: float, end: float) -> Scale:
    """The scale that has room for all values."""
    return Scale(10.0 ** math.floor(math.log10(min(values))), 10.0 ** math.ceil(math.log10(max(values))), start, end)


def curves(p: Picture, x: float, y: float, width: float, title: str, below: str, lines: Mapping[str, Sequence[tuple[float, float]]],
           colours: Sequence[str]) -> None:
    """A panel 150 high with both axes logarithmic: a curve with its points for each name."""
    p.text(x, y, title, bold=True)
    left, top, bottom = x + 40, y + 14, y + 134
    points = [point for line in lines.values() for point in line]
    across = over([at for at, _ in points], left, x + width - 12)
    up = over([value for _, value in points], bottom, top)
    for mark in up.marks():
        p.line((left, up.at(mark)), (x + width - 12, up.at(mark)), colour="grey_edge", width=0.4)
        p.text(left - 6, up.at(mark) + 4, short(mark), 11, anchor="end", colour="muted")
    for mark in across.marks():
        p.line((across.at(mark), bottom), (across.at(mark), bottom + 4), colour="grey_edge")
        p.text(across.at(mark), bottom + 17, short(mark), 11, anchor="middle", colour="muted")
    p.text((left + x + width - 12) / 2, bottom + 32, below, 12, anchor="middle", colour="muted")
    for colour, line in zip(colours, lines.values(), strict=True):
        drawn = [(across.at(at), up.at(value)) for at, value in line]
        p.line(*drawn, colour=colour, width=1.6)
        for point in drawn:
            p.dot(*point, colour)


def legend(p: Picture, x: float, y: float, names: Mapping[str, str]) -> None:
    """A dot and a name for each colour, in one line."""
    for name, colour in names.items():
        p.dot(x, y - 4, colour, 4)
        x += 18 + p.text(x + 9, y, name, 12).width + 12


def markdown_table(begin: str) -> list[dict[str, str]]:
    """The rows of the table of bench/notes/engine.md whose first line begins so, by the names of the columns."""
    lines = (BENCH / "notes" / "engine.md").read_text(encoding="utf-8").splitlines()
    at = next((number for number, line in enumerate(lines) if line.startswith(f"| {begin}")), None)
    if at is None:
        raise ValueError(f"bench/notes/engine.md has no table {begin}")
    rows = []
    for line in lines[at:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    names, _, *cells = rows
    return [dict(zip(names, row, strict=True)) for row in cells]


def table(first: str) -> tuple[list[float], dict[str, list[float]]]:
    """The values and the figures of a table of bench/growth.py, which begins with `first`."""
    rows = markdown_table(f"{first} | 1")
    values = [name for name in rows[0] if name not in (first, "growth")]
    return [number(value) for value in values], {row[first]: [number(row[value]) for value in values] for row in rows}


def number(text: str) -> float:
    return float(text.replace(",", ""))
