"""`pyengine report`: draws rates, sizes, topics, hours and lags of a store on one HTML page.

Spark's workers count the messages; the lags come from the groups' offsets. The driver collects a row for each topic,
and a row for each hour and each of the few topics with a colour of their own. The page is one file that loads nothing
else, for light and dark screens and for paper.

The charts are inline SVG, stacked bars over time and a line, with colours in the page's CSS. Numbers may have any size, and
times any value that a record can hold; every text goes through `escaped`.
"""

from __future__ import annotations

import html
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pyengine.cli.output import (
    Reply,
    byte_bar,
    master_option,
    number_text,
    printable,
    size_options,
    size_text,
    spark_level_option,
    spark_session,
    store_command,
)
from pyengine.errors import UsageError, disk_errors
from pyengine.storage.config import existing_store
from pyengine.storage.file_system import open_output

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 70, 8, 10, 26
COLOURS = 8  # --c0 ... of the page; the last one is for all other topics
_LABELS = 7
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Layer(NamedTuple):
    """One part of each stacked bar: its name, the number of its colour, and a value for each bar."""

    name: str
    colour: int
    values: Sequence[float]


def escaped(text: str) -> str:
    """Escape a text for the page, also one with lone surrogates or control characters."""
    return html.escape(printable(text))


def moment(time_ms: int, step_ms: int = 1) -> str:
    """Return a time in UTC, with the precision that an interval of `step_ms` needs."""
    try:
        at = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    if step_ms >= 86_400_000:
        return f"{at:%Y-%m-%d}"
    return f"{at:%Y-%m-%d %H:%M}" if step_ms >= 60_000 else f"{at:%Y-%m-%d %H:%M:%S}"


def bars(labels: Sequence[str], layers: Sequence[Layer], shown: Callable[[float], str], what: str, base: int = 10) -> str:
    """Draw stacked bars, one for each label; `shown` formats a value, `what` is the chart's title; `base` as in scale()."""
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
            title = f"{label}: {shown(value)}" if len(layers) == 1 else f"{label} {layer.name}: {shown(value)} of {shown(totals[at])}"
            parts.append(f'<rect x="{x:.2f}" y="{y:.2f}" width="{bar:.2f}" height="{max(height, 0.4):.2f}" class="c{layer.colour}">'
                         f"<title>{escaped(title)}</title></rect>")
    return _svg(parts, what)


def line(labels: Sequence[str], values: Sequence[float | None], shown: Callable[[float], str], what: str, base: int = 10) -> str:
    """Draw a line through the values, with gaps at None."""
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
    """Return a round end of an axis for values up to `most`, and its ticks: whole numbers, round in base 10 or 1024."""
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


HOUR_MS = 3_600_000
DRAWN = COLOURS - 1   # topics with a colour of their own
BARS_MAX = 168        # the hours of a week
_DAY_MS = 24 * HOUR_MS
_STEPS_MS = (HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS, 6 * HOUR_MS, 12 * HOUR_MS, _DAY_MS, 7 * _DAY_MS, 30 * _DAY_MS, 365 * _DAY_MS)
STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1c2024; --soft: #60646c; --rule: #e0e1e6; --card: #f7f8fa;
  --c0: #3b6fd4; --c1: #d9822b; --c2: #2f9e73; --c3: #c2417c; --c4: #7b5bc7; --c5: #b8a125; --c6: #2a9bb5; --c7: #9aa0a8; }
@media (prefers-color-scheme: dark) { :root { --back: #16181c; --fore: #e8eaed; --soft: #a0a6b0; --rule: #33373e; --card: #1e2126;
  --c0: #6f9cf0; --c1: #eda25a; --c2: #55c79a; --c3: #e579a8; --c4: #a78bea; --c5: #d9c659; --c6: #5cc4dc; --c7: #7d848e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1040px; padding: 24px 20px 60px; background: var(--back); color: var(--fore);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5em; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin: 2.2em 0 .4em; }
p { margin: .3em 0; } .soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 10px; margin: 18px 0; }
.facts div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 8px 12px; }
.facts b { display: block; font-size: 1.15em; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; } svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--soft); }
.grid { stroke: var(--rule); } .line { fill: none; stroke: var(--c0); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: .87em; margin: 4px 0 6px; overflow-wrap: anywhere; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9em; }
th, td { text-align: right; padding: 4px 8px; border-bottom: 1px solid var(--rule); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; } th.name, td.name { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 8em; } td.bar { width: 22%; min-width: 90px; } td.bar i { display: block; height: 10px; border-radius: 2px; min-width: 1px; }
tr.rest td { color: var(--soft); font-style: italic; } .note { border-left: 3px solid var(--c1); padding-left: 10px; }
details { margin-top: 8px; } summary { cursor: pointer; color: var(--soft); }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } svg, tr { break-inside: avoid; } }
""" + "".join(f".c{n} {{ fill: var(--c{n}); background: var(--c{n}); }}\n" for n in range(COLOURS))
_NAME = ' class="name"'


@dataclass(frozen=True, slots=True)
class Count:
    """A number of messages, and the bytes of their records."""

    messages: int
    bytes: int

    def __add__(self, other: Count) -> Count:
        return Count(self.messages + other.messages, self.bytes + other.bytes)


NOTHING = Count(0, 0)

@dataclass(frozen=True, slots=True)
class TopicFigures:
    """One topic. `largest` is the size of its longest record; times are store times."""

    topic: str
    count: Count
    largest: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """One consumer group on one topic. `lost`: messages deleted unread; `waiting_since_ms` 0: no message waits."""

    group: str
    topic: str
    queues: int
    lag: int
    lost: int
    waiting_since_ms: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A store at one moment.

    `topics` are in order of bytes, the largest first. `hours` maps the begin of an hour (ms) to a count for each of the first
    `drawn` topics, and under None for all others together.
    """

    store: str
    made_ms: int
    level: str
    topics: list[TopicFigures] = field(default_factory=list)
    drawn: int = 0
    hours: dict[int, dict[str | None, Count]] = field(default_factory=dict)
    groups: list[GroupFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> Count:
        return sum((topic.count for topic in self.topics), NOTHING)


def collect(spark: SparkSession, root: Path, options: Mapping[str, object], settings: Mapping[str, Any], *, level: str,
            drawn: int, progress: Callable[[int, int], None] | None = None) -> Figures:
    """Collect the figures of the store at `root` in one pass over its log; count `drawn` topics by hour."""
    import pyarrow
    from pyarrow import compute

    from pyengine.spark.jobs import count_messages, with_milliseconds

    made_ms = time.time_ns() // 1_000_000
    table = with_milliseconds(count_messages(spark, root, None, "hour", {**options, "readLevel": level}, progress))
    rows = table.group_by("topic").aggregate([("messages", "sum"), ("bytes", "sum"), ("largest", "max"), ("firstTimestamp", "min"),
                                              ("lastTimestamp", "max")]).to_pylist()
    topics = [TopicFigures(row["topic"], Count(row["messages_sum"], row["bytes_sum"]), row["largest_max"], row["firstTimestamp_min"],
                           row["lastTimestamp_max"]) for row in rows]
    topics.sort(key=lambda one: (-one.count.bytes, one.topic))
    apart = [one.topic for one in topics[:drawn]]
    names = table.column("topic")
    table = table.set_column(0, "topic", compute.if_else(compute.is_in(names, pyarrow.array(apart, names.type)), names, None))
    hours: dict[int, dict[str | None, Count]] = {}
    for row in table.group_by(["hour", "topic"]).aggregate([("messages", "sum"), ("bytes", "sum")]).to_pylist():
        hours.setdefault(row["hour"], {})[row["topic"]] = Count(row["messages_sum"], row["bytes_sum"])
    groups, notes = _groups(root, settings)
    return Figures(str(root), made_ms, level, topics, len(apart), dict(sorted(hours.items())), groups, notes)


def _groups(root: Path, settings: Mapping[str, Any]) -> tuple[list[GroupFigures], list[str]]:
    from pyengine.client.consumer_groups import ConsumerGroups

    found = ConsumerGroups(root, **settings)
    figures = []
    for state in found.groups():
        waiting = [queue.waiting_since_ms for queue in state.queues.values() if queue.waiting_since_ms]
        figures.append(GroupFigures(state.group, state.topic, len(state.queues), state.lag, state.lost, min(waiting, default=0)))
    figures.sort(key=lambda one: (-one.lag, one.group, one.topic))
    return figures, list(found.notes())


class Times(NamedTuple):
    """Bars of equal duration: the duration, the begin of each, and its counts by topic (None: all others)."""

    step_ms: int
    begins: list[int]
    counts: list[dict[str | None, Count]]


def page(figures: Figures, most_rows: int) -> str:
    """Return the HTML page. Tables of topics and groups have at most `most_rows` rows, then one for all others."""
    body = [_head(figures), _facts(figures), *(f'<p class="note">{escaped(note)}</p>' for note in figures.notes)]
    if figures.topics:
        times = in_steps(figures)
        body += [_rates(figures, times), _sizes(figures, times), _topics(figures, most_rows), _day(figures)]
    else:
        body.append("<p>There are no messages in the log.</p>")
    body.append(_lags(figures, most_rows))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'unsafe-inline\'; img-src data:">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escaped(figures.store)}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def in_steps(figures: Figures) -> Times:
    """Combine hours so that there are at most BARS_MAX bars; intervals without messages become empty bars."""
    first, last = min(figures.hours), max(figures.hours)
    step_ms = next((step for step in _STEPS_MS if last // step - first // step < BARS_MAX), 0)
    if not step_ms:  # clocks that were far off
        step_ms = -(-(last - first + HOUR_MS) // (BARS_MAX - 1))
    begin = first // step_ms
    counts: list[dict[str | None, Count]] = [{} for _ in range(last // step_ms - begin + 1)]
    for hour_ms, by_topic in figures.hours.items():
        cell = counts[hour_ms // step_ms - begin]
        for topic, count in by_topic.items():
            cell[topic] = cell.get(topic, NOTHING) + count
    return Times(step_ms, [(begin + at) * step_ms for at in range(len(counts))], counts)


def step_text(step_ms: int) -> str:
    """hour, 6 hours, day, 30 days."""
    number, unit = (step_ms / _DAY_MS, "day") if step_ms >= _DAY_MS else (step_ms / HOUR_MS, "hour")
    return unit if number == 1 else f"{number:,.0f} {unit}s"


def _head(figures: Figures) -> str:
    return (f"<h1>{escaped(figures.store)}</h1>"
            f'<p class="soft">Messages in the log as it was at {moment(figures.made_ms)} UTC, up to what was {escaped(figures.level)}. '
            "Times are the store's, UTC.</p>")


def _facts(figures: Figures) -> str:
    total = figures.total
    facts = [("messages", _whole(total.messages)), ("in records of", size_text(total.bytes)), ("topics", _whole(len(figures.topics)))]
    if figures.topics:
        busiest_ms, count = max(((hour_ms, sum(cells.values(), NOTHING)) for hour_ms, cells in figures.hours.items()),
                                key=lambda pair: pair[1].messages)
        facts += [
            ("mean record", size_text(total.bytes / total.messages)),
            ("longest record", size_text(max(topic.largest for topic in figures.topics))),
            ("first stored", moment(min(topic.first_ms for topic in figures.topics), HOUR_MS)),
            ("last stored", moment(max(topic.last_ms for topic in figures.topics), HOUR_MS)),
            (f"in the busiest hour, {moment(busiest_ms, HOUR_MS)}: {number_text(count.messages / 3600)} messages/s",
             _whole(count.messages)),
        ]
    facts += [("consumer groups' lags together", _whole(sum(group.lag for group in figures.groups)))]
    return '<div class="facts">' + "".join(f"<div><b>{escaped(value)}</b>{escaped(name)}</div>" for name, value in facts) + "</div>"


def _rates(figures: Figures, times: Times) -> str:
    labels = [moment(begin, times.step_ms) for begin in times.begins]
    layers = _layers(figures, times, lambda count: count.messages)
    title = f"Messages in each {step_text(times.step_ms)}"
    return f"<h2>{title}</h2>{_legend(layers)}{bars(labels, layers, number_text, title)}{_table_of_times(times, labels)}"


def _sizes(figures: Figures, times: Times) -> str:
    labels = [moment(begin, times.step_ms) for begin in times.begins]
    layers = _layers(figures, times, lambda count: count.bytes)
    totals = [sum(cell.values(), NOTHING) for cell in times.counts]
    means = [total.bytes / total.messages if total.messages else None for total in totals]
    title, mean_title = f"Bytes in each {step_text(times.step_ms)}", "Mean size of a record"
    return (f"<h2>{title}</h2>{_legend(layers)}{bars(labels, layers, size_text, title, 1024)}"
            f"<h2>{mean_title}</h2>{line(labels, means, size_text, mean_title, 1024)}")


def _day(figures: Figures) -> str:
    sums = [0] * 24
    for hour_ms, cells in figures.hours.items():
        sums[hour_ms // HOUR_MS % 24] += sum(count.messages for count in cells.values())
    title = "Messages by the hour of the day, UTC"
    return f"<h2>{title}</h2>" + bars([f"{hour:02d}" for hour in range(24)], [Layer("all", 0, sums)], number_text, title)


def _topics(figures: Figures, most_rows: int) -> str:
    shown, others = figures.topics[:most_rows], figures.topics[most_rows:]
    colour = {topic.topic: at for at, topic in enumerate(figures.topics[: figures.drawn])}
    most = max(topic.count.bytes for topic in figures.topics)
    rows = [_row([*_topic_cells(topic)], topic.topic, topic.count.bytes / most, colour.get(topic.topic, COLOURS - 1)) for topic in shown]
    if others:
        rest = TopicFigures("", sum((topic.count for topic in others), NOTHING), max(topic.largest for topic in others),
                            min(topic.first_ms for topic in others), max(topic.last_ms for topic in others))
        rows.append(_row([*_topic_cells(rest)], f"{len(others):,} other topics", None, 0))
    return "<h2>Topics by size</h2>" + _table(["topic", "", "messages", "bytes", "mean", "longest", "first", "last"], rows)


def _topic_cells(topic: TopicFigures) -> Iterable[str]:
    count = topic.count
    return (_whole(count.messages), size_text(count.bytes), size_text(count.bytes / max(1, count.messages)), size_text(topic.largest),
            moment(topic.first_ms, HOUR_MS), moment(topic.last_ms, HOUR_MS))


def _lags(figures: Figures, most_rows: int) -> str:
    title = "<h2>Consumer groups by lag</h2>"
    if not figures.groups:
        return title + '<p class="soft">No group has noted an offset.</p>'
    shown, others = figures.groups[:most_rows], figures.groups[most_rows:]
    most = max(1, *(group.lag for group in figures.groups))
    rows = [_row(_lag_cells(group), f"{group.group} on {group.topic}", group.lag / most, 1) for group in shown]
    if others:
        rest = GroupFigures("", "", sum(g.queues for g in others), sum(g.lag for g in others), sum(g.lost for g in others),
                            min((g.waiting_since_ms for g in others if g.waiting_since_ms), default=0))
        rows.append(_row(_lag_cells(rest), f"{len(others):,} others", None, 0))
    return title + _table(["group", "", "lag", "lost", "queues", "waiting since"], rows)


def _lag_cells(group: GroupFigures) -> list[str]:
    since = moment(group.waiting_since_ms) if group.waiting_since_ms else "-"
    return [_whole(group.lag), _whole(group.lost), _whole(group.queues), since]


def _layers(figures: Figures, times: Times, value: Callable[[Count], int]) -> list[Layer]:
    names: list[str | None] = [topic.topic for topic in figures.topics[: figures.drawn]]
    layers = [Layer(name or "", at, [value(cell.get(name, NOTHING)) for cell in times.counts]) for at, name in enumerate(names)]
    others = len(figures.topics) - figures.drawn
    if others:
        layers.append(Layer(f"{others:,} others", COLOURS - 1, [value(cell.get(None, NOTHING)) for cell in times.counts]))
    return layers


def _legend(layers: Sequence[Layer]) -> str:
    entries = (f'<span><i class="c{layer.colour}"></i>{escaped(layer.name)}</span>' for layer in layers)
    return f'<div class="legend">{"".join(entries)}</div>'


def _table_of_times(times: Times, labels: Sequence[str]) -> str:
    rows = []
    for label, cell in zip(labels, times.counts, strict=True):
        total = sum(cell.values(), NOTHING)
        if total.messages:
            rows.append(f'<tr><td class="name">{escaped(label)}</td><td>{_whole(total.messages)}</td>'
                        f'<td>{escaped(size_text(total.bytes))}</td></tr>')
    return f"<details><summary>as numbers</summary>{_table(['from', 'messages', 'bytes'], rows)}</details>"


def _table(columns: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th{_NAME if at == 0 else ''}>{escaped(name)}</th>" for at, name in enumerate(columns))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(cells: Iterable[str], name: str, share: float | None, colour: int) -> str:
    bar = "" if share is None else f'<i class="c{colour}" style="width:{100 * share:.2f}%"></i>'
    rest = ' class="rest"' if share is None else ""
    numbers = "".join(f"<td>{escaped(cell)}</td>" for cell in cells)
    return f'<tr{rest}><td class="name">{escaped(name)}</td><td class="bar">{bar}</td>{numbers}</tr>'


def _whole(number: int) -> str:
    return f"{number:,}"


@click.command()
@store_command
@click.option("--html", "file", type=click.Path(path_type=Path), required=True, help="The file to write, or replace.")
@click.option("--top", type=click.IntRange(min=1), default=25, show_default=True,
              help="Topics and groups with a row of their own.")
@master_option
@spark_level_option
def report(store: Path, settings: dict[str, str], file: Path, top: int, master: str | None, readLevel: str) -> Reply:
    """Write an HTML report of a store. It shows rates, sizes, topics, hours and lags, and loads no other file.

    It uses Spark (extra `spark`, Java 17 or later).

    \b
    Example:
      pyengine report STORE --html report.html
    """
    root = existing_store(store)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise UsageError(f"{file}: give a file in a folder that exists")
    options = size_options(root, settings)
    begun_s = time.monotonic()
    with spark_session("pyengine report", master) as spark, byte_bar("counting", None) as show:
        figures = collect(spark, root, options, settings, level=readLevel, drawn=DRAWN, progress=show)
    _write(file, page(figures, top))
    seconds = time.monotonic() - begun_s
    total = figures.total
    document = {"file": str(file), "messages": total.messages, "bytes": total.bytes, "seconds": seconds,
                "topics": [asdict(topic) for topic in figures.topics], "groups": [asdict(group) for group in figures.groups]}
    return Reply(document, f"{total.messages:,} messages of {len(figures.topics):,} topics ({size_text(total.bytes)}) in {seconds:.1f} s: "
                           f"{printable(str(file))}")


def _write(file: Path, text: str) -> None:
    """Write the file, or the one that a link points to, or into a device or a pipe; as root through no link of another user."""
    with disk_errors("write", file), open(open_output(file, os.O_WRONLY | os.O_CREAT), "wb") as opened:
        if file.is_file():
            opened.truncate()
        opened.write(text.encode())
