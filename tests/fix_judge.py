"""The `judge` fixture: the real RocketMQ store 4.9.8 in one JVM for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import needs
from interop.judge import Judge, JudgeUnavailableError


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Tests that use it carry the markers java and maven."""
    try:
        running = Judge(needs.java_command(), tmp_path_factory.mktemp("judge"))
    except JudgeUnavailableError as error:
        pytest.skip(f"maven: {error}")
    with running:
        yield running
