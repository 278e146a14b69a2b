"""A store directory with an identity, and its shared folder, swept at the end."""

from __future__ import annotations

import pytest

from pyengine.ipc.shared_objects import SharedFolder
from pyengine.storage.engine_id import ensure_engine_id


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def engine_id(root):
    return ensure_engine_id(root)


@pytest.fixture
def folder(engine_id):
    shared = SharedFolder.of(engine_id)
    yield shared
    shared.sweep()
