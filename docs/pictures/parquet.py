"""Spark's rate over the log, divided by its rate over Parquet of the same rows."""

from __future__ import annotations

import math

from charts import Scale, kept, legend
from shapes import Picture

SIZE = (760, 260)
ALT = """Points for three sizes of bodies on a logarithmic scale of ratios, with a line at 1, where the log is as fast as
Parquet. The table below has the figures."""
COLOURS = ("purple_edge", "blue_edge", "green_edge")


def draw(p: Picture) -> None:
    rows = kept()["spark"]
    works = [work for work in rows[0] if work != "body_bytes"]
    ratios = [row[work] for row in rows for work in works]
    low, high = math.floor(math.log2(min(ratios)) - 0.1), math.ceil(math.log2(max(ratios)) + 0.1)
    scale = Scale(2.0 ** min(low, -1), 2.0 ** max(high, 1), 180, 720)
    legend(p, 24, 26, {f"bodies of {row['body_bytes']:,} B": colour for row, colour in zip(rows, COLOURS, strict=True)})
    bottom = 60 + 28 * len(works)
    for mark in (2.0 ** power for power in range(min(low, -1), max(high, 1) + 1)):
        at = scale.at(mark)
        p.line((at, 52), (at, bottom), colour="line" if mark == 1 else "grey_edge", width=1.6 if mark == 1 else 0.4)
        p.text(at, bottom + 16, f"{mark:g}", 11, anchor="middle", colour="muted")
    p.text(scale.at(1) - 8, bottom + 34, "Parquet is faster", 12, anchor="end", colour="muted")
    p.text(scale.at(1) + 8, bottom + 34, "the log is faster", 12, colour="muted")
    for number, work in enumerate(works):
        y = 70 + 28 * number
        p.text(20, y + 4, work)
        values = [row[work] for row in rows]
        for beside, (value, colour) in enumerate(zip(values, COLOURS, strict=True)):
            p.dot(scale.at(value), y + 6 * (beside - 1), colour, 4.5)
