"""The blocks of the pages on delayed messages, transactions and topics run, one after the other."""

from __future__ import annotations

import pytest
from test_docs import blocks_of, reader  # noqa: F401


@pytest.mark.timeout(300)
def test_a_delayed_message_arrives(reader):  # noqa: F811
    shell, program = blocks_of("docs/delayed.md")
    assert "pay reminder" in reader.run(shell)
    reader.run(program)
