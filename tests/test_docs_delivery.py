"""The blocks of the pages on delayed messages, transactions and topics run, one after the other."""

from __future__ import annotations

import pytest

from test_docs import blocks_of, reader  # noqa: F401

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]


def test_a_delayed_message_arrives(reader):  # noqa: F811
    shell, program, at_a_time = blocks_of("docs/delayed.md")
    assert "pay reminder" in reader.run(shell)
    reader.run(program)
    assert reader.run(at_a_time) == "SCHEDULE_TOPIC_XXXX\nb'light the candles' True\n"


def test_a_transaction_is_committed(reader):  # noqa: F811
    block, prepared = blocks_of("docs/transactions.md")
    assert reader.run(block) == "['PUT_OK', 'PUT_OK']\n"
    assert reader.run(prepared) == "PUT_OK queue offset 1\n"


def test_topics_are_made_and_listed(reader):  # noqa: F811
    shell, program, choice = blocks_of("docs/topics.md")
    said = reader.run(shell)
    assert "4 queues to read, 8 to write, R--" in said and '"messages": 1' in said
    assert reader.run(program) == "['orders', 'payments']\n"
    assert reader.run(choice) == "{0}\n"
