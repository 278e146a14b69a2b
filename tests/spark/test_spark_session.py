"""The names of `pyengine.spark`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pyengine.spark import java

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


def test_spark_3_is_refused_with_the_remedy(tmp_path):
    """The stand-in for Spark's package has no data sources in Python."""
    package = tmp_path / "pyspark"
    (package / "sql").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "3.5.8"\n')
    (package / "sql" / "__init__.py").touch()
    code = "import pyengine.spark\npyengine.spark.session()"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert found.returncode == 1
    assert found.stderr.splitlines()[-1] == (
        "pyengine.errors.UsageError: Spark 3.5.8 has no data sources in Python: install Spark 4.0 or later, or let it read the Parquet "
        "files that `pyengine export` has written elsewhere")


def test_the_home_of_a_packaged_java_is_made_in_no_folder_that_another_user_chose(tmp_path):
    """Anyone may make a link of that name in the folder for temporary files."""
    theirs = tmp_path / "private"
    theirs.mkdir(mode=0o700)
    (tmp_path / "home").symlink_to(theirs)
    with pytest.raises(PermissionError):
        java._make_home(tmp_path / "home", tmp_path / "java")
    assert list(theirs.iterdir()) == [] and theirs.stat().st_mode & 0o777 == 0o700
    assert (java._make_home(tmp_path / "new", tmp_path / "java") / "bin" / "java").exists()
