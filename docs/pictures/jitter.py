"""Single puts beside rolls, deletions and checkpoints: quantiles, and when each stall came, for how long, and why."""

from __future__ import annotations

from charts import Scale, kept, short
from shapes import Picture

SIZE = (760, 356)
ALT = """Above: median, 99th, 99.9th and 99.99th percentile of the single puts of one run, in microseconds. Below: each put of 5
ms or more over the seconds of that run, in milliseconds, coloured by its cause."""
COLOURS = ("blue_edge", "green_edge", "yellow_edge", "red_edge", "purple_edge")


def draw(p: Picture) -> None:
    run = kept()["jitter"]
    stalls = run["stalls"]
    causes: dict[str, list[float]] = {}
    for stall in stalls:
        causes.setdefault(stall["cause"], []).append(stall["ms"])
    beside = f"{run['rolls']} rolls, {run['deletions']} deletions, {run['checkpoints']} checkpoints{' and Spark' if run['spark'] else ''}"
    p.text(20, 28, f"{run['rate']:,} single puts a second, {run['body_bytes']:,} B: us", bold=True)
    p.text(740, 28, f"beside {beside}", 12, anchor="end", colour="muted")
    scale = Scale(1, 1e4, 40, 720)
    for mark in (1, 10, 100, 1e3, 1e4):
        p.line((scale.at(mark), 60), (scale.at(mark), 88), colour="grey_edge", width=0.4)
        p.text(scale.at(mark), 104, short(mark), 11, anchor="middle", colour="muted")
    p.line((scale.at(1), 74), (scale.at(1e4), 74), colour="grey_edge", width=0.6)
    for part in ("50", "99", "99.9", "99.99"):
        p.dot(scale.at(run[f"p{part}_us"]), 74, "blue_edge", 5)
        p.text(scale.at(run[f"p{part}_us"]), 54, f"p{part}", 12, anchor="middle")
    p.text(20, 140, f"{len(stalls)} of {run['puts']:,} puts took {run['stall_ms']:g} ms or more: ms", bold=True)
    up, across = Scale(run["stall_ms"], max(20.0, run["longest_ms"]) * 1.2, 280, 156), Scale(1, 2, 52, 730)
    for mark in (5, 10, 20, 50, 100):
        if up.low <= mark <= up.high:
            p.line((across.start, up.at(mark)), (across.end, up.at(mark)), colour="grey_edge", width=0.4)
            p.text(across.start - 6, up.at(mark) + 4, short(mark), 11, anchor="end", colour="muted")
    room, step = across.end - across.start, 20 if run["seconds"] <= 120 else 60
    for second in range(0, round(run["seconds"]) + 1, step):
        at = across.start + room * second / run["seconds"]
        p.line((at, up.start), (at, up.start + 4), colour="grey_edge")
        p.text(at, up.start + 17, f"{second} s", 11, anchor="middle", colour="muted")
    order = sorted(causes, key=lambda cause: -sum(causes[cause]))
    if len(order) > len(COLOURS):
        raise ValueError("the causes are more than there are colours")
    for stall in stalls:
        p.dot(across.start + room * stall["at_s"] / run["seconds"], up.at(stall["ms"]), COLOURS[order.index(stall["cause"])], 3.5)
    for number, cause in enumerate(order):
        x, y = 28 + number % 2 * 370, 322 + number // 2 * 20
        p.dot(x, y - 4, COLOURS[number], 4)
        p.text(x + 10, y, f"{cause}: {len(causes[cause])}", 12)
