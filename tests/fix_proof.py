"""Long runs leave a line for docs/proof.md where PYENGINE_PROOF names the file (scripts/crash/proof.py).

PYENGINE_SHARE=N shortens those that have many cases to an Nth of them.
"""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path

import pytest

from crash.proof import Trial, add

SHARE = int(os.environ.get("PYENGINE_SHARE", "1"))


@pytest.fixture
def proof(request):
    """proof(rig, what, held=True, **counts): called with what was counted, before the test judges it."""
    began_s = time.monotonic()
    seed = str(request.config.test_seed)

    def tell(rig: str, what: str, *, held: bool = True, **counts: int) -> None:
        records = os.environ.get("PYENGINE_PROOF")
        if records:
            shortened = f"PYENGINE_SHARE={SHARE} " if SHARE > 1 else ""
            command = f"{shortened}PYENGINE_SEED={seed} scripts/test --long '{request.node.nodeid}'"
            add(Path(records), Trial(rig, what, counts, held, seed, command, seconds=time.monotonic() - began_s))

    return tell


@pytest.fixture
def share(seed):
    """share(cases): as many of them as PYENGINE_SHARE asks for, at random and in their order; at least one."""
    def choose(cases):
        chosen = random.Random(seed).sample(range(len(cases)), math.ceil(len(cases) / SHARE))
        return [cases[number] for number in sorted(chosen)]

    return choose
