"""Panels of monitoring/dashboard.json in their places, with what Prometheus answered to their queries in a run (record.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from charts import short
from shapes import Box, Picture, width_of

HERE = Path(__file__).resolve().parent
COLUMN, ROW, TOP, ROWS = 31, 15, 8, 36  # pixels of Grafana's units, and how many rows of them are shown
SIZE = (760, TOP + ROW * ROWS + 6)
ALT = """Panels of the dashboard for Grafana, for ten minutes of a store and its slave: verdict, workers, slaves; puts and bytes
a second; times of puts, syncs and dispatch; sizes of log and disk; lags of groups; delayed messages."""
COLOURS = ("blue_edge", "green_edge", "yellow_edge", "red_edge", "purple_edge", "grey_edge")
PANELS = json.loads((HERE.parent.parent / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))["panels"]
(_, _, TIMES), *LINES = json.loads((HERE / "dashboard.json").read_text(encoding="utf-8"))
Lines = list[tuple[str, list[float | None]]]


def said(value: float, unit: str) -> str:
    """A value in the unit of its panel."""
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value:.0%}"
    return short(value) + {"bytes": "B", "Bps": "B/s", "ops": "/s"}.get(unit, "")


def stat(p: Picture, place: Box, lines: Lines, *, is_name: bool) -> None:
    """The last value of each line, or its name alone."""
    for number, (legend, values) in enumerate(line for line in lines if line[1][-1] is not None):
        y = place.y + 30 + 14 * number
        p.text(place.x + 8, y, legend, 11, colour="muted")
        if not is_name:
            p.text(place.x + place.width - 8, y, short(values[-1] or 0), 12, anchor="end", bold=True)


def series(p: Picture, place: Box, lines: Lines, unit: str) -> None:
    """Each line over the run, on a scale from 0, with the highest value, and the names that fit below."""
    if len(lines) > len(COLOURS) // 2:
        lines = sorted(lines, key=lambda line: -max((value for value in line[1] if value is not None), default=0))
    highest = max((value for _, values in lines for value in values if value is not None), default=0)
    left, right, top, bottom = place.x + 8, place.x + place.width - 8, place.y + 33, place.y + place.height - 22
    p.text(right, place.y + 29, said(highest, unit) if highest else "0", 10, anchor="end", colour="muted")
    for y in (top, (top + bottom) / 2, bottom):
        p.line((left, y), (right, y), colour="grey_edge", width=0.3)
    for number, (_, values) in reversed(list(enumerate(lines))):
        points = [(left + (right - left) * at / TIMES[-1], bottom - (bottom - top) * (value / highest if highest else 0))
                  for at, value in zip(TIMES, values, strict=True) if value is not None]
        if points:
            p.line(*points, colour=COLOURS[min(number, len(COLOURS) - 1)], width=1.2)
    x = left
    for number, (legend, _) in enumerate(lines):
        if x + 9 + width_of(legend, 10) > right:
            break
        p.dot(x + 3, bottom + 11, COLOURS[min(number, len(COLOURS) - 1)], 3)
        x += 9 + p.text(x + 9, bottom + 14, legend, 10, colour="muted").width + 10


def draw(p: Picture) -> None:
    for panel in PANELS:
        at: dict[str, Any] = panel["gridPos"]
        if at["y"] + at["h"] > ROWS:
            continue
        place = Box(8 + at["x"] * COLUMN, TOP + at["y"] * ROW, at["w"] * COLUMN - 6, at["h"] * ROW - 6)
        p.rect(place.x, place.y, place.width, place.height, "grey", edge="grey_edge", radius=4)
        p.text(place.x + 8, place.y + 14, panel["title"], 11, bold=True)
        lines = [(legend, values) for title, legend, values in LINES if title == panel["title"]]
        if panel["type"] == "stat":
            stat(p, place, lines, is_name=panel["options"]["textMode"] == "name")
        else:
            series(p, place, lines, panel["fieldConfig"]["defaults"].get("unit", "short"))
