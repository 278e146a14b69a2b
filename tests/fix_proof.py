"""Long runs leave a line for docs/proof.md where PYENGINE_PROOF names the file (scripts/crash/proof.py)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from crash.proof import Trial, add


@pytest.fixture
def proof(request):
    """proof(rig, what, held=True, **counts): called with what was counted, before the test judges it."""
    began_s = time.monotonic()
    seed = str(request.config.test_seed)

    def tell(rig: str, what: str, *, held: bool = True, **counts: int) -> None:
        records = os.environ.get("PYENGINE_PROOF")
        if records:
            command = f"PYENGINE_SEED={seed} scripts/test --long '{request.node.nodeid}'"
            add(Path(records), Trial(rig, what, counts, held, seed, command, seconds=time.monotonic() - began_s))

    return tell
