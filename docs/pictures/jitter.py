"""Five minutes of single puts beside rolls, deletions, checkpoints and Spark: quantiles, and the causes of the stalls."""

from __future__ import annotations

from charts import Scale, markdown_table, short
from shapes import Picture

SIZE = (760, 262)
ALT = """Above, points on a logarithmic scale of microseconds: median, 99th and 99.9th percentile and the longest of the single puts of
five minutes, beside rolls, deletions, checkpoints and Spark. Below, a bar for each cause of stalls of 5 ms and more: how long they
took together, with their number."""
TO_US = {"us": 1.0, "ms": 1e3, "s": 1e6}


def in_us(text: str) -> float:
    number, unit = text.split()
    return float(number) * TO_US[unit]


def draw(p: Picture) -> None:
    (quantiles,) = markdown_table("p50 | p99 | p99.9 | longest |")
    causes = markdown_table("cause | stalls | longest | together |")
    scale = Scale(0.1, 1e6, 40, 720)
    p.text(20, 28, "single puts, 1 KiB: us", 14, bold=True)
    for mark in (0.1, 1, 10, 100, 1e3, 1e4, 1e5, 1e6):
        p.line((scale.at(mark), 60), (scale.at(mark), 88), colour="grey_edge", width=0.4)
        p.text(scale.at(mark), 104, short(mark), 11, anchor="middle", colour="muted")
    p.line((scale.at(0.1), 74), (scale.at(1e6), 74), colour="grey_edge", width=0.6)
    for name, colour in (("p50", "blue_edge"), ("p99", "green_edge"), ("p99.9", "yellow_edge"), ("longest", "red_edge")):
        at = scale.at(in_us(quantiles[name]))
        p.dot(at, 74, colour, 5)
        p.text(at, 54, name, 12, anchor="middle")
    p.text(20, 144, f"stalls of 5 ms or more: {quantiles['stalls of 5 ms or more']}", 14, bold=True)
    longest = max(in_us(cause["together"]) for cause in causes)
    for number, cause in enumerate(causes):
        y = 172 + 28 * number
        p.text(20, y, cause["cause"], 12)
        width = max(2, in_us(cause["together"]) / longest * 250)
        p.rect(330, y - 12, width, 16, "yellow", edge="yellow_edge")
        p.text(338 + width, y, f"{cause['together']}, {cause['stalls']} stalls", 12, colour="muted")
    if 172 + 28 * len(causes) > SIZE[1]:
        raise ValueError("the causes are more than fit")
