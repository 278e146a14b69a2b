"""The names of `pyengine.spark`."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fix_cli import environment
from fix_store_builder import StoreBuilder
from pyengine.spark import java, spark_session

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
        java.make_home(tmp_path / "home", tmp_path / "java")
    assert list(theirs.iterdir()) == [] and theirs.stat().st_mode & 0o777 == 0o700
    assert (java.make_home(tmp_path / "new", tmp_path / "java") / "bin" / "java").exists()


@pytest.fixture
def open_folder():
    """A folder that all users can reach, unlike tmp_path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.ci
@pytest.mark.java
@pytest.mark.spark
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can take another uid, by setpriv")
def test_a_uid_without_an_entry_in_the_system_has_a_session(open_folder):
    """As in a container whose uid is chosen by its platform."""
    builder = StoreBuilder(open_folder / "store")
    builder.put("orders", b"x")
    uid = next(uid for uid in range(54_321, 65_000) if not _is_known(uid))
    for path in (open_folder, builder.root, *builder.root.rglob("*")):
        path.chmod(0o777)
    as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=+dac_read_search",
               "--ambient-caps=+dac_read_search"]  # wherever the interpreter is
    command = [sys.executable, "-P", "-m", "pyengine", "export", str(builder.root), str(open_folder / "out"), "--json"]
    env = {name: value for name, value in environment().items() if name not in ("HOME", "USER", "LOGNAME")}
    done = subprocess.run([*as_user, *command], capture_output=True, text=True, env=env, cwd=open_folder)
    assert done.returncode == 0 and json.loads(done.stdout)["messages"] == 1, done.stderr


def _is_known(uid: int) -> bool:
    try:
        return bool(pwd.getpwuid(uid))
    except KeyError:
        return False


def test_the_jvm_gets_a_name_and_a_home_only_for_a_user_without_an_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Dx='a b' -Duser.home=/given")
    assert spark_session.environment_of_user() == {}
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    monkeypatch.delenv("SPARK_USER", raising=False)
    name = f"uid-{os.getuid()}"
    assert spark_session.environment_of_user() == {
        "SPARK_USER": name, "SPARK_SUBMIT_OPTS": f"-Duser.name={name} '-Dx=a b' -Duser.home=/given"}
    monkeypatch.delenv("SPARK_SUBMIT_OPTS")
    for home, taken in ((str(tmp_path), str(tmp_path)), ("/nonexistent", tempfile.gettempdir()), ("relative", tempfile.gettempdir())):
        monkeypatch.setenv("HOME", home)
        assert spark_session.environment_of_user()["SPARK_SUBMIT_OPTS"] == f"-Duser.name={name} -Duser.home={taken}"


@pytest.mark.parametrize(("master", "is_here"), [
    ("local[2]", True), ("local-cluster[2,1,1024]", True), ("spark://127.0.0.1:7077", True), ("spark://localhost:7077", True),
    ("spark://head.example:7077", False), ("yarn", False),
])
def test_only_executors_of_this_host_are_given_its_loopback_address(monkeypatch, tmp_path, master, is_here):
    monkeypatch.delenv("SPARK_LOCAL_IP", raising=False)
    monkeypatch.setattr(spark_session, "find_java_home", lambda: tmp_path)
    monkeypatch.setenv("PYENGINE_SPARK_MASTER", master)
    for settings in (spark_session.default_settings(), spark_session.default_settings(master=master)):
        assert settings["spark.master"] == master
        assert [settings.get(f"spark.driver.{name}") for name in ("host", "bindAddress")] == ["127.0.0.1" if is_here else None] * 2
    with spark_session._environment_of_jvm(master):
        assert os.environ.get("SPARK_LOCAL_IP") == ("127.0.0.1" if is_here else None)
