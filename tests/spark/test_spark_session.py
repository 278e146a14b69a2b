"""The names of `pyengine.spark`."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import pyengine.spark
for name in sorted(pyengine.spark.__all__, reverse={}):
    getattr(pyengine.spark, name)
print([name for name in pyengine.spark.__all__ if not callable(getattr(pyengine.spark, name))])
"""


def test_public_names_are_functions_in_any_order_of_use():
    """Importing a module sets its name in its package: no module may have the name of a public function."""
    for reverse in (False, True):
        found = subprocess.run([sys.executable, "-c", CODE.format(reverse)], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"
