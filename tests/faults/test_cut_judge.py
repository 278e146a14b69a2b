"""The judge of power cuts misses none of what was promised."""

from __future__ import annotations

import json

import pytest

import pyengine
from crash.acked_consumer import ANY, FLUSHED, TOPIC
from crash.audit import still_kept
from faults.cut_judge import Promised, below, judge_tree

ROW = {"topic": "t", "queue_id": 0, "queue_offset": 0, "physical_offset": 0, "body_sha256": ""}


def promised(*lines: dict) -> Promised:
    return Promised.of([json.dumps(line).encode() + b"\n" for line in lines])


@pytest.mark.parametrize("mode, line, is_lost", [
    ("sync", ROW, True), ("async", ROW, False), ("async", {"flushed": 9}, True), ("async", {"read_to": 9}, True),
    ("async", {"group": ANY, "commits": {"0": 1}}, True), ("async", {"group": ANY, "asks": {"0": 1}}, False),
])
def test_a_tree_without_a_log_keeps_no_promise(tmp_path, mode, line, is_lost):
    wrong, _ = judge_tree(mode, tmp_path, promised(line))
    assert [sentence.startswith("LOST: ") for sentence in wrong] == [True] * is_lost


def test_the_judge_reports_an_offset_that_no_commit_asked_for(golden):
    tree = golden("basic").root
    (tree / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": {f"{TOPIC}@{FLUSHED}": {"0": 1, "1": 0}}}))
    wrong, _ = judge_tree("async", tree, promised({"group": FLUSHED, "asks": {"1": 0}}))
    assert [sentence for sentence in wrong if "asked for" in sentence] == [
        f"group {FLUSHED} is at 1 in queue 0, further than the 0 it asked for"]


def test_a_message_whose_place_in_the_log_is_not_known_counts_as_far_as_its_queue_reaches(golden):
    tree = golden("basic").root
    with pyengine.open_store(tree) as reader:
        (topic, (queue_id, *_)), *_ = reader.topics().items()
        end = reader.queue_range(topic, queue_id)[1]
    rows = [ROW | {"topic": topic, "queue_id": queue_id, "queue_offset": offset, "physical_offset": None} for offset in (end - 1, end)]
    assert below(tree, [*rows, ROW | {"topic": "unknown", "physical_offset": None}], 1 << 40) == rows[:1]
    assert below(tree, [ROW, ROW | {"physical_offset": 5}, ROW | {"waits_at": 4}], 5) == [ROW, ROW | {"waits_at": 4}]


def test_a_message_without_a_place_went_with_its_queue_unless_another_of_it_is_kept(golden):
    tree = golden("cleaned").root
    with pyengine.open_store(tree) as reader:
        log_min = reader.min_physical_offset
    assert log_min > 0
    without = ROW | {"topic": "gone", "physical_offset": None}
    deleted, kept = (ROW | {"topic": "gone", "queue_offset": 1, "physical_offset": at} for at in (log_min - 1, log_min))
    assert still_kept(tree, [without, deleted]) == []
    assert still_kept(tree, [without, kept]) == [without, kept]
    assert still_kept(golden("basic").root, [without]) == [without]
