"""The page of `pyengine report`: nothing of a store can break it, nothing is left out of its sums, and it loads nothing."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.cli.report import (
    BARS_MAX,
    DRAWN,
    HOUR_MS,
    NOTHING,
    Count,
    Figures,
    GroupFigures,
    Layer,
    TopicFigures,
    _write,
    bars,
    in_steps,
    line,
    page,
    scale,
    step_text,
)
from pyengine.errors import DiskError

BASE_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
EVIL = ['<script>alert("x")</script>', "a&b", "\x07bell\x1b[31m", "\udcff not text", "订单", "'\" onload=x", "x" * 127]


def figures(names: list[str], hours: dict[int, int], groups: Sequence[GroupFigures] = (), store: str = "/a/store") -> Figures:
    """Each hour has so many messages of each topic, of 100 bytes and a byte more for each topic before it."""
    drawn = min(DRAWN, len(names))
    by_hour = {}
    for hour_ms, messages in sorted(hours.items()):
        cells: dict[str | None, Count] = {}
        for number, name in enumerate(names):
            key = name if number < drawn else None
            cells[key] = cells.get(key, NOTHING) + Count(messages, messages * (100 + number))
        by_hour[hour_ms] = cells
    total = sum(hours.values())
    topics = [TopicFigures(name, Count(total, total * (100 + number)), 500, min(hours), max(hours))
              for number, name in enumerate(names)]
    return Figures(store, BASE_MS, "flushed", topics, drawn, by_hour, groups)


class Reading(HTMLParser):
    """Reads a page; every element must be closed in its order, and nothing may be loaded."""

    VOID = {"meta", "link"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.rows: list[str] = []
        self.names: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert name not in ("src", "href") or value.startswith("data:"), value
        if tag == "tr":
            self.rows.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "tr" in self.open:
            self.rows[-1] += data + "|"


def test_texts_of_a_store_are_only_ever_text():
    groups = [GroupFigures(name, name, 1, 5, 0, BASE_MS) for name in EVIL]
    text = page(figures(EVIL, {BASE_MS: 3}, groups, store="/srv/<b>\udcfe store"), 25)
    reading = Reading(text.encode("utf-8").decode("utf-8"))
    assert not reading.names & {"script", "iframe", "img", "object", "b\udcfe"}
    shown = "".join(reading.texts)
    assert EVIL[0] in shown and "订单" in shown and "\\x07bell\\x1b[31m" in shown and "\\udcff not text" in shown
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_a_store_without_messages_and_groups():
    text = page(Figures("/a/store", BASE_MS, "flushed"), 25)
    assert "no messages" in text and "No group has noted an offset" in text and "<svg" not in text
    Reading(text)


def test_thousands_of_topics_and_groups_are_some_rows_and_one_for_the_rest():
    names = [f"topic-{number}" for number in range(5000)]
    groups = [GroupFigures(f"group-{number}", "t", 2, number, 1, 0) for number in range(3000, 0, -1)]
    made = figures(names, {BASE_MS + hour * HOUR_MS: 2 for hour in range(100)}, groups)
    text = page(made, 25)
    assert len(text) < 300_000
    rows = Reading(text).rows
    [rest] = [row for row in rows if "other topics" in row]
    assert rest.startswith("4,975 other topics|") and f"|{4975 * 200:,}|" in f"|{rest}"
    [rest] = [row for row in rows if "others|" in row]
    assert rest.startswith("2,975 others|") and f"{sum(range(2976)):,}|" in rest
    assert sum("topic-" in row for row in rows) == 25 and sum("group-" in row for row in rows) == 25
    assert "4,993 others" in text


def test_a_mean_is_of_all_and_the_busiest_hour_is_named():
    made = figures(["a", "b"], {BASE_MS: 36, BASE_MS + HOUR_MS: 7200, BASE_MS + 5 * HOUR_MS: 1})
    shown = "".join(Reading(page(made, 1)).texts)
    assert "2 messages/s".replace("2", "4") in shown and "14,400" in shown
    assert made.total == Count(2 * 7237, 7237 * 201)
    assert "1 other topics" in shown


@given(st.dictionaries(st.one_of(st.integers(0, 4000).map(lambda n: BASE_MS + n * HOUR_MS),
                                 st.integers(-(1 << 50) // HOUR_MS, (1 << 53) // HOUR_MS).map(lambda n: n * HOUR_MS)),
                       st.integers(1, 10**12), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_hours_are_put_together_without_losing_any(hours):
    made = figures(["a", "b"], hours)
    times = in_steps(made)
    assert len(times.begins) == len(times.counts) <= BARS_MAX
    assert sum((count for cell in times.counts for count in cell.values()), NOTHING) == made.total
    for begin, cell in zip(times.begins, times.counts, strict=True):
        inside = [messages for hour_ms, messages in hours.items() if begin <= hour_ms < begin + times.step_ms]
        assert sum(count.messages for count in cell.values()) == 2 * sum(inside)
    assert step_text(times.step_ms)
    Reading(page(made, 5))


@pytest.mark.parametrize(("hours", "step"), [(1, "hour"), (168, "hour"), (300, "2 hours"), (1000, "6 hours"), (4000, "day"),
                                             (10_000, "7 days"), (100_000, "30 days")])
def test_a_bar_is_an_hour_or_as_long_as_it_takes(hours, step):
    first = BASE_MS // (24 * HOUR_MS) * 24 * HOUR_MS
    assert step_text(in_steps(figures(["a"], {first: 1, first + (hours - 1) * HOUR_MS: 1})).step_ms) == step


@given(st.one_of(st.integers(0, 10**20), st.floats(0.01, 1e18)), st.sampled_from([10, 1024]))
def test_an_axis_reaches_the_highest_value_with_few_round_marks(most, base):
    top, ticks = scale(most, base)
    assert top >= most * (1 - 1e-9) and ticks[0] == 0 and len(ticks) <= 7
    assert ticks[-1] == pytest.approx(top) or most == 0
    assert all(tick == pytest.approx(round(tick)) for tick in ticks)


def test_a_bar_is_as_high_as_its_value():
    drawn = bars(["one", "two"], [Layer("a", 0, [10, 0]), Layer("b", 1, [30, 20])], str, "test")
    heights = {title: float(height) for height, title in re.findall(r'height="([\d.]+)" class="c\d"><title>([^<]*)', drawn)}
    assert list(heights) == ["one a: 10 of 40", "one b: 30 of 40", "two b: 20 of 20"]
    values = list(heights.values())
    assert values[1] == pytest.approx(3 * values[0], abs=0.02) and values[2] == pytest.approx(2 * values[0], abs=0.02)


def test_a_line_is_broken_where_there_is_nothing():
    drawn = line(["a", "b", "c", "d", "e"], [1, 2, None, 3, 4], str, "test")
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == 4


def test_a_page_is_written_into_a_pipe_and_replaces_the_target_of_a_link(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _write(pipe, "a page")
        assert os.read(reading, 100) == b"a page" and pipe.is_fifo()
    finally:
        os.close(reading)
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("older")
    link.symlink_to("file")
    _write(link, "a page")
    assert link.is_symlink() and file.read_text() == "a page"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_page_that_cannot_be_written_whole_is_an_error_with_its_name(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DiskError, match="page.html"):
            _write(tmp_path / "page.html", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
