"""What a message, a start and a recovery cost as the work grows."""

from __future__ import annotations

from charts import curves, legend, table
from shapes import Picture

SIZE = (760, 432)
ALT = """Six panels with logarithmic axes. CPU of producer, writer and reputter for a message is flat from 1 to 1,000 segments
and sessions, and with queues flat up to the number of open files. CPU of start and recovery grows with the queues; memory
hardly does."""
WORKERS = {"producer": "blue_edge", "writer": "green_edge", "reputter": "purple_edge"}
TOTALS = {"start": "yellow_edge", "recovery after kill -9": "red_edge"}


def message(p: Picture, x: float, y: float, first: str, below: str) -> None:
    values, rows = table(first)
    lines = {name: list(zip(values, rows[f"{name}, a message, us"], strict=True)) for name in WORKERS}
    curves(p, x, y, 240, "CPU of a message, us", below, lines, list(WORKERS.values()))


def draw(p: Picture) -> None:
    legend(p, 24, 26, WORKERS | TOTALS | {"private memory of all": "line"})
    for number, (first, below) in enumerate((("segments", "segments"), ("sessions", "sessions"), ("bytes of a body", "bytes of a body"))):
        message(p, 16 + 246 * number, 58, first, below)
    message(p, 16, 250, "queues", "queues")
    values, rows = table("queues")
    costs = {"start": rows["start, CPU, ms"], "recovery": rows["recover after kill -9, CPU, ms"]}
    curves(p, 262, 250, 240, "CPU, ms", "queues", {name: list(zip(values, cells, strict=True)) for name, cells in costs.items()},
           list(TOTALS.values()))
    memory = rows["private memory, all processes, MiB"]
    curves(p, 508, 250, 240, "private memory, MiB", "queues", {"memory": list(zip(values, memory, strict=True))}, ["line"])
