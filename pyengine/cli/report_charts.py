"""The few charts of the report page, as inline SVG: stacked bars over time, and a line. Colours are the page's CSS.

Values are numbers of any size, times any that a record can hold; every text goes through `escaped`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pyengine.cli.output import printable

WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 8, 10, 26
COLOURS = 8  # --c0 ... of the page; the last is for the rest
_LABELS = 7
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Layer(NamedTuple):
    """One part of each bar: its name, the number of its colour, and a value for each bar."""

    name: str
    colour: int
    values: Sequence[float]


def escaped(text: str) -> str:
    """Any text, also one that is no Unicode or holds control characters, as a part of the page."""
    return html.escape(printable(text))


def moment(time_ms: int, step_ms: int = 1) -> str:
    """A time, UTC, as fine as a step of time needs it."""
    try:
        at = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    if step_ms >= 86_400_000:
        return f"{at:%Y-%m-%d}"
    return f"{at:%Y-%m-%d %H:%M}" if step_ms >= 60_000 else f"{at:%Y-%m-%d %H:%M:%S}"


def bars(labels: Sequence[str], layers: Sequence[Layer], shown: Callable[[float], str], what: str, base: int = 10) -> str:
    """Stacked bars, one for each label; `shown` makes a value readable, `what` says what is drawn; `base` as in scale()."""
    totals = [sum(layer.values[at] for layer in layers) for at in range(len(labels))]
    top, ticks = scale(max(totals, default=0), base)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    bar = max(0.5, slot * 0.86)
    parts = [_axes(labels, slot, top, ticks, shown)]
    for at, label in enumerate(labels):
        y = float(HEIGHT - BOTTOM)
        x = LEFT + at * slot + (slot - bar) / 2
        for layer in layers:
            value = layer.values[at]
            if value <= 0:
                continue
            height = (HEIGHT - TOP - BOTTOM) * value / top
            y -= height
            told = f"{label}: {shown(value)}" if len(layers) == 1 else f"{label} {layer.name}: {shown(value)} of {shown(totals[at])}"
            parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{bar:.2f}" height="{max(height, 0.4):.2f}" class="c{layer.colour}">'
                         f"<title>{escaped(told)}</title></rect>")
    return _svg(parts, what)


def line(labels: Sequence[str], values: Sequence[float | None], shown: Callable[[float], str], what: str, base: int = 10) -> str:
    """A line through the values; where there is none it is broken."""
    top, ticks = scale(max((value for value in values if value is not None), default=0), base)
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(labels))
    parts = [_axes(labels, slot, top, ticks, shown)]
    run: list[str] = []
    for at, value in enumerate([*values, None]):
        if value is None:
            if len(run) > 1:
                parts.append(f'<polyline class="line" points="{" ".join(run)}"/>')
            run = []
            continue
        x, y = LEFT + (at + 0.5) * slot, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top
        run.append(f"{x:.2f},{y:.2f}")
        parts.append(f'<circle class="c0" cx="{x:.2f}" cy="{y:.2f}" r="2.5"><title>{escaped(f"{labels[at]}: {shown(value)}")}'
                     "</title></circle>")
    return _svg(parts, what)


def scale(most: float, base: int = 10) -> tuple[float, list[float]]:
    """A round top of an axis that holds `most`, and the values to mark: whole numbers, round in 10s or in 1024s."""
    if most <= 0:
        return 1.0, [0.0]
    if most <= 1:
        return 1.0, [0.0, 1.0]
    unit = 1.0 if base == 10 else 1024.0 ** math.floor(math.log(most, 1024))
    power = 10.0 ** math.floor(math.log10(most / unit))
    steps = (unit * power * part for part in (0.2, 0.25, 0.5, 1, 2, 2.5))
    step = next(step for step in steps if step * 5 >= most and step == round(step))
    count = math.ceil(most / step - 1e-9)
    return step * count, [step * number for number in range(count + 1)]


def _axes(labels: Sequence[str], slot: float, top: float, ticks: Sequence[float], shown: Callable[[float], str]) -> str:
    parts = []
    for tick in ticks:
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tick / top
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escaped(shown(tick))}</text>')
    every = -(-len(labels) // _LABELS) if len(labels) > 24 or any(len(label) > 5 for label in labels) else 1
    for at in range(0, len(labels), every):
        x = LEFT + (at + 0.5) * slot
        if at == 0 or x + 3.2 * len(labels[at]) < WIDTH:
            parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escaped(labels[at])}</text>')
    return "".join(parts)


def _svg(parts: Sequence[str], what: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(what)}">{"".join(parts)}</svg>'
