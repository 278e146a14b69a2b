"""The `judge` fixture: the real RocketMQ store 4.9.8 in one JVM for the whole run; and a skip where Maven cannot build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import needs
from interop.judge import Judge, JudgeUnavailableError


@contextlib.contextmanager
def available() -> Iterator[None]:
    """Skips what needs a build by Maven that cannot be had here."""
    try:
        yield
    except JudgeUnavailableError as error:
        pytest.skip(f"maven: {error}")


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Tests that use it carry the markers java and maven."""
    with available(), Judge(needs.java_command(), tmp_path_factory.mktemp("judge")) as running:
        yield running
