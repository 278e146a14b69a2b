"""The build that can be broken on purpose (faults/mutants), made once for a run of the tests."""

from __future__ import annotations

import pytest

from faults.mutants import build


@pytest.fixture(scope="session")
def broken_build(tmp_path_factory):
    """Root of the build with all mutants in it; `faults.mutants.environment(root, mutant)` turns one on."""
    return build(tmp_path_factory.mktemp("broken"))
