"""How long a put takes: median and 99th percentile of every round, beside other logs, on a logarithmic scale."""

from __future__ import annotations

from charts import NAMES, legend, over, turns
from shapes import Picture

SIZE = (760, 424)
ALT = """Points for each log on a logarithmic scale of microseconds: median and 99th percentile of a put in each round, async
and sync."""
WORKS = ("put, 128 B", "put, 1 KiB", "put, sync, 1 KiB", "put, sync, 1 KiB, four producers")


def duration(us: float) -> str:
    """10 ns, 1 us, 0.1 ms."""
    factor, unit = next((pair for pair in ((1e6, "s"), (1e3, "ms"), (1, "us")) if us * 10 > pair[0] * 0.999), (1e-3, "ns"))
    return f"{us / factor:.3g} {unit}"


def panel(p: Picture, x: float, y: float, work: str) -> None:
    p.text(x, y, work, bold=True)
    halves, highs = turns(work, "p50_us"), turns(work, "p99_us")
    scale = over([value for rounds in (halves, highs) for values in rounds.values() for value in values], x + 84, x + 336)
    bottom = y + 14 + 24 * len(halves)
    for mark in scale.marks():
        p.line((scale.at(mark), y + 10), (scale.at(mark), bottom), colour="grey_edge", width=0.4)
        p.text(scale.at(mark), bottom + 13, duration(mark), 11, anchor="middle", colour="muted")
    for number, log in enumerate(halves):
        middle = y + 26 + 24 * number
        p.text(x + 72, middle + 4, NAMES[log], 12, anchor="end", bold=log == "pyengine")
        for values, colour in ((halves[log], "blue_edge"), (highs[log], "yellow_edge")):
            for value in values:
                p.dot(scale.at(value), middle, colour, 3.5)


def draw(p: Picture) -> None:
    legend(p, 24, 26, {"median of a round": "blue_edge", "99th percentile of a round": "yellow_edge"})
    for number, work in enumerate(WORKS):
        panel(p, 20 + 370 * (number % 2), 60 + 220 * (number // 2), work)
