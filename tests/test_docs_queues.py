"""The blocks of docs/queues.md run, one after the other."""

from __future__ import annotations

import pytest

from test_docs import Block, blocks_of, reader  # noqa: F401

PAGE = "docs/queues.md"
pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]


def block(first_word: str) -> Block:
    """The block that holds this line's beginning."""
    (found,) = [each for each in blocks_of(PAGE) if first_word in each.text]
    return found


def test_lost_queues_and_a_lost_index_are_found_and_rebuilt(reader):  # noqa: F811
    said = reader.run(block("pyengine rebuild my-store"))
    assert "to do: run `pyengine rebuild STORE --topic orders --queue-id 0`" in said
    assert "Rebuilt 1 queue from" in said and "Rebuilt 1 queue and the index from" in said
    assert "one apple" in said and "Nothing is wrong" in said


def test_a_message_reaches_light_queues(reader):  # noqa: F811
    said = reader.run(block("news-store"))
    assert said.count("for two readers") == 2 and said.count("for one") == 1 and "Nothing is wrong" in said
    assert reader.run(block("light-store")).splitlines() == ["['news', 'news']", "b'hello'"]


def test_entries_name_units_of_the_extension(reader):  # noqa: F811
    said = reader.run(block("ext-store"))
    assert "0" * 20 in said and "two nuts" in said and "one apple" not in said and "Nothing is wrong" in said


def test_a_log_lies_in_several_folders(reader):  # noqa: F811
    said = reader.run(block("wide-store"))
    assert said.count("Nothing is wrong") == 2 and "00000000000000065536" in said
