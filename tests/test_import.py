"""`import pyengine` stays light, and its public names are there."""

from __future__ import annotations

import subprocess
import sys
import typing

import pytest

import pyengine
import pyengine.spark

HEAVY = ("click", "rich", "pyarrow", "pyspark", "pandas", "numpy", "msgspec", "psutil", "cffi", "pyengine._native")


def test_importing_pyengine_loads_nothing_heavy():
    code = f"import sys, pyengine, pyengine.storage.config; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(pyengine, "no_such_name")


def test_exported_names_equal_the_lazily_loaded_names():
    assert sorted(pyengine.__all__) == sorted(["__version__", *pyengine._WHERE])
    assert sorted(pyengine.spark.__all__) == sorted(pyengine.spark._WHERE)


@pytest.mark.parametrize("name", pyengine.__all__)
def test_every_public_name_is_there_and_documented(name):
    """An alias of types (Start) has its documentation in the page's entry alone (tests/test_docs_api.py)."""
    value = getattr(pyengine, name)
    assert name == "__version__" or value.__doc__ or typing.get_origin(value)
