"""Recovery's tables: exactly one row for every state, and no row that throws messages away unseen."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from pyengine.storage.recovery.log import (
    FILE_CASES,
    TAIL_CASES,
    Content,
    End,
    FileDecision,
    Owner,
    TailDecision,
    file_case,
    tail_case,
)


@pytest.mark.parametrize(("content", "owner", "end"), list(itertools.product(Content, Owner, End)))
def test_every_tail_has_exactly_one_case(content, owner, end):
    assert len([case for case in TAIL_CASES if case.matches(content, owner, end)]) == 1
    assert tail_case(content, owner, end).matches(content, owner, end)


@pytest.mark.parametrize(("is_zero", "end"), list(itertools.product([True, False], End)))
def test_every_segment_after_the_end_has_exactly_one_case(is_zero, end):
    assert len([case for case in FILE_CASES if case.matches(is_zero, end)]) == 1
    assert file_case(is_zero, end).matches(is_zero, end)


@pytest.mark.parametrize("case", TAIL_CASES)
def test_every_row_is_reached(case):
    assert any(tail_case(*state) is case for state in list(itertools.product(Content, Owner, End)))


@pytest.mark.parametrize("owner", Owner)
def test_what_may_hold_messages_is_kept_unless_the_slot_says_that_no_producer_was_told(owner):
    assert tail_case(Content.OTHER, owner, End.SCAN).decision is TailDecision.QUARANTINE
    assert file_case(False, End.SCAN).decision is FileDecision.QUARANTINE
    assert tail_case(Content.SPOILED_RECORD, Owner.ROCKETMQ, End.SCAN).decision is TailDecision.QUARANTINE


def test_the_page_about_recovery_names_every_row():
    page = (Path(__file__).parents[3] / "docs" / "recovery.md").read_text()
    for label in {case.label for case in (*TAIL_CASES, *FILE_CASES)}:
        assert f"| {label} |" in page
