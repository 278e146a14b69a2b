"""Panels of figures: bars with the rounds as points, curves, and what bench/ keeps for them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
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
