"""Fixtures of the command tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_settings_from_the_environment(monkeypatch):
    """A developer's own PYENGINE_ variables must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("PYENGINE_"):
            monkeypatch.delenv(name)
