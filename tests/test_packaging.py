"""What a user installs: an sdist that builds, one wheel for every Python from 3.11 on, and programs that run from it.

The wheel is built from the unpacked sdist, as `python -m build` does, and installed into an environment
that has the packages it asks for and nothing else: no pyspark, no pyarrow, no checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "*.so", "_native.c", "_native.pyi", "_settings.pyi",
                                     "__pycache__", ".*_cache")
SMALL = ["--set", "mapped_file_size_commit_log_bytes=1MiB", "--set", "mapped_file_size_consume_queue_bytes=6000",
         "--set", "max_hash_slot_num=1000", "--set", "max_index_num=4000"]


@dataclass(frozen=True)
class Installed:
    sdist: list[str]     # names in it
    wheel: Path
    python: Path         # of an environment with the wheel in it

    def run(self, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """This Python in a folder of a user's, which the interpreter's options put in front of all others."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYENGINE_", "VIRTUAL_ENV"))}
        return subprocess.run([str(self.python), *map(str, arguments)], cwd=cwd, env=clean, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    folder = tmp_path_factory.mktemp("packaging")
    checkout = shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=NOT_SOURCES)
    sdist = build("sdist", checkout, folder)
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
        archive.extractall(folder)  # our own; Python 3.11.2 knows no filter
    wheel = build("wheel", folder / names[0].split("/")[0], folder)
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    quietly([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    link_requirements(wheel_metadata(wheel), next((folder / "env").glob("lib/python3*/site-packages")))
    return Installed(names, wheel, python)


def build(kind: str, source: Path, folder: Path) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder / kind)!r})"
    quietly([sys.executable, "-c", code], source)
    (made,) = (folder / kind).iterdir()
    return made


def quietly(command: list[object], cwd: Path) -> None:
    done = subprocess.run(list(map(str, command)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


def wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def requirements(lines: list[str], extra: str | None = None) -> set[str]:
    """Names of packages that these Requires-Dist lines ask for: always, or with that extra."""
    wanted = set()
    for line in lines:
        name, _, marker = line.partition(";")
        found = re.search(r"extra\s*==\s*[\"']([^\"']+)", marker)
        if (found[1] if found else None) == extra:
            wanted.add(re.match(r"[\w.-]+", name)[0].lower())
    return wanted


def link_requirements(document, site_packages: Path) -> None:
    """What the wheel asks for, and what that asks for, from the environment that runs the tests."""
    left, seen = requirements(document.get_all("Requires-Dist")), set()
    while left:
        name = left.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another system
            continue
        seen.add(name)
        left |= requirements(distribution.requires or []) - seen
        for top in {file.parts[0] for file in distribution.files if file.parts[0] != ".."}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(Path(distribution.locate_file(top)).resolve())


@pytest.fixture
def own_folder(tmp_path) -> Path:
    """A user's program with packages of its own, called like folders and modules of this project."""
    for package in ("workers", "tests", "scripts", "scripts/crash"):
        names = {path.name for path in (ROOT / package).glob("*.py")} | {"__init__.py"}
        (tmp_path / package).mkdir()
        for name in names:
            (tmp_path / package / name).write_text("MINE = True\n")
    return tmp_path


PROGRAM = """
import sys
from collections import Counter
from pathlib import Path

import pyengine
import psutil
import scripts.crash.rounds, tests.waiting, workers.flusher, workers.supervisor

if __name__ == "__main__":
    with pyengine.Engine("store", mapped_file_size_commit_log_bytes=1 << 20, mapped_file_size_consume_queue_bytes=6000,
                         max_hash_slot_num=1000, max_index_num=4000) as engine:
        with pyengine.connect("store") as producer, pyengine.open_store("store") as store:
            producer.put("orders", b"one apple")
            assert store.wait_for_message("orders", 0, 0, timeout_s=30)
            assert [message.body for message in store.get_message("orders", 0, 0).messages] == [b"one apple"]
        supervisor = psutil.Process(engine.pid)
        processes = [supervisor, *supervisor.children()]
        assert len(processes) > 5
        for process in processes:
            entries = process.environ().get("PYTHONPATH", "").split(":")
            assert not any(Path(entry, "errors.py").exists() for entry in entries), entries
    assert all(module.MINE for module in (workers, workers.supervisor, workers.flusher, tests.waiting, scripts.crash.rounds))
    ours = Path(pyengine.__file__).parent
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = Counter(file for file in loaded if file and ours in Path(file).parents)
    assert files and max(files.values()) == 1, files.most_common(3)
    print(pyengine.__file__)
"""


@pytest.mark.ci
def test_the_sdist_holds_what_a_build_needs_and_the_wheel_every_module(installed):
    inside = {name.partition("/")[2] for name in installed.sdist}
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.suffix in (".c", ".h", ".py")} <= inside
    assert {"LICENSE", "README.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "setup.py"} <= inside
    with zipfile.ZipFile(installed.wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for package in ("pyengine", "pyspark_pyengine")
               for path in (ROOT / package).rglob("*.py")}
    modules |= {"pyspark_pyengine_queue.py"} | {f"pyengine/workers/{path.name}" for path in (ROOT / "workers").glob("*.py")}
    beside = {"pyengine/_native.abi3.so", "pyengine/_native.pyi", "pyengine/_front.abi3.so", "pyengine/_front.pyi",
              "pyengine/_settings.pyi", "pyengine/py.typed", "pyengine/gateway/rocketmq_v2.textproto"}
    docs = {f"pyengine/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")}
    assert {name for name in names if ".dist-info/" not in name} == modules | beside | docs


@pytest.mark.ci
def test_one_wheel_is_for_every_python_from_3_11_on(installed):
    assert re.fullmatch(r"pyengine_store-[\d.]+(dev\d+)?-cp311-abi3-linux_\w+\.whl", installed.wheel.name)


@pytest.mark.ci
def test_spark_and_arrow_are_an_extra(installed):
    lines = wheel_metadata(installed.wheel).get_all("Requires-Dist")
    data = {"pyspark", "pyarrow", "pandas"}
    assert requirements(lines, "spark") == data and not requirements(lines) & data


@pytest.mark.ci
def test_a_program_with_packages_of_these_names_runs_from_the_wheel(installed, own_folder):
    (own_folder / "program.py").write_text(PROGRAM)
    done = installed.run("program.py", cwd=own_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed.python.parents[1])


@pytest.mark.ci
def test_commands_run_from_the_wheel_in_a_folder_with_packages_of_these_names(installed, own_folder):
    for arguments, says in (
            (["start", "store", *SMALL], "running"), (["put", "store", "--topic", "orders", "one apple"], "PUT_OK"),
            (["status", "store"], "running"), (["stop", "store"], ""), (["check", "store"], "")):
        done = installed.run("-m", "pyengine", *arguments, cwd=own_folder)
        assert done.returncode == 0 and says in done.stdout, (arguments, done.stdout, done.stderr)


@pytest.mark.ci
def test_strict_mypy_accepts_the_programs_of_the_readme_and_the_examples(installed, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        (tmp_path / f"readme_{number}.py").write_text(block)
    for path in (ROOT / "examples").glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "wrong.py").write_text("import pyengine\n\nwith pyengine.connect('s') as producer:\n    producer.put(7, 'text')\n"
                                       "pyengine.Engine('s', broker_role='MASTER')\npyengine.Engine('s', gateway_prot=1)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--python-executable", installed.python, "."]
    done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=200)
    found = {line.partition(": error:")[0] for line in done.stdout.splitlines() if ": error:" in line}
    assert blocks and found == {"wrong.py:4", "wrong.py:5", "wrong.py:6"}, done.stdout + done.stderr


@pytest.mark.ci
def test_without_the_extra_the_sentence_says_how_to_get_it(installed, tmp_path):
    assert installed.run("-m", "pyengine", "start", "store", *SMALL, cwd=tmp_path).returncode == 0
    assert installed.run("-m", "pyengine", "stop", "store", cwd=tmp_path).returncode == 0
    for code, extra in (("from pyengine.spark import session", "spark"), ("import pyengine.spark; pyengine.spark.export_parquet", "spark"),
                        ("import pyengine; pyengine.open_store('store').scan()", "arrow"),
                        ("import pyengine; pyengine.open_store('store').to_arrow()", "arrow")):
        done = installed.run("-c", code, cwd=tmp_path)
        assert "UsageError" in done.stderr and "is not installed" in done.stderr, done.stderr
        assert f"pip install 'pyengine-store[{extra}]'" in done.stderr, done.stderr
    done = installed.run("-m", "pyengine", "export", "store", "out", "--format", "parquet", cwd=tmp_path)
    assert done.returncode == 2 and "pip install 'pyengine-store[spark]'" in done.stderr and "Traceback" not in done.stderr


def test_a_plain_copy_of_the_checkout_runs(tmp_path):
    subprocess.run(["cp", "-r", *(ROOT / name for name in ("pyengine", "workers")), tmp_path], check=True)
    code = "import pyengine.workers.flusher as worker; print(worker.__file__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    assert Path(done.stdout.strip()) == tmp_path / "pyengine" / "workers" / "flusher.py", done.stderr
