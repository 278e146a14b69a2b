"""The table of events: the code reports each, and each has a meaning and an action."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyengine.events import ERROR, INFO, NOTHING, WARNING, Event, HostLines
from reported import Reported

SOURCES = Path(__file__).parent.parent / "pyengine"


def test_the_code_uses_every_listed_event_and_no_other():
    said = {name for path in SOURCES.rglob("*.py") for name in re.findall(r"\bEvent\.([A-Z_]+)\b", path.read_text(encoding="utf-8"))}
    assert said == {event.name for event in Event}


@pytest.mark.parametrize("event", Event, ids=lambda event: event.name)
def test_an_event_has_a_meaning_and_a_warning_or_error_has_an_action(event):
    assert event.level in (ERROR, WARNING, INFO) and event.meaning.endswith(".")
    assert event.action.endswith((".", ").")) and (event.action != NOTHING or event.level == INFO)


def test_no_two_events_have_the_same_value():
    """An Enum takes a second member with the same value for the first."""
    assert len(Event.__members__) == len(list(Event))


def test_lines_are_few_however_many_hosts_there_are():
    reported = Reported()
    lines = HostLines(reported)
    for number in range(1000):
        lines.report(f"host-{number}", Event.SLAVE_GONE, "a line", 0)
    assert len(reported) == 64 + 6
    lines.tick(60 * 10**9)
    assert reported[70:] == ["other hosts: 930 more lines like those above within a minute"]


def test_lines_of_one_kind_leave_those_of_another_their_place():
    reported = Reported()
    lines = HostLines(reported)
    for _ in range(1000):
        lines.report("a", Event.CLIENT_REFUSED, "refused", 0)
        lines.report("b", Event.CLIENT_REFUSED, "refused", 0)
        lines.report("a", Event.CLIENT_FAILED, "failed", 0)
    assert {event: reported.events.count(event) for event in reported.events} == {Event.CLIENT_REFUSED: 12, Event.CLIENT_FAILED: 6}
    lines.tick(60 * 10**9)
    assert sorted(reported[18:]) == ["a: 994 more lines like those above within a minute"] * 2 + [
        "b: 994 more lines like those above within a minute"]
