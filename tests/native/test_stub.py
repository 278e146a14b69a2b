"""The types of the C module are those of the declarations."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_stub_is_up_to_date():
    made = runpy.run_path(str(ROOT / "csrc" / "native_stub.py"))["stub"]()
    assert (ROOT / "pyengine" / "_native.pyi").read_text() == made, "run: python csrc/native_stub.py > pyengine/_native.pyi"
