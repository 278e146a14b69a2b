"""scripts/environment.sh says in one sentence what the machine lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def use_environment(tmp_path: Path, tools: dict[str, str], **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs use_environment where PATH holds a few system tools and `tools` (name -> shell text)."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "env", "cat", "cut", "sha256sum", "rm", "ls", "dirname", "tail"):
        (folder / name).symlink_to(next(Path(p, name) for p in ("/bin", "/usr/bin") if Path(p, name).exists()))
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYENGINE_") and k not in ("CC", "VIRTUAL_ENV")}
    kept |= {"PATH": str(folder), "PYENGINE_VENV": str(tmp_path / "an env"), **environ}
    script = f'set -euo pipefail; source "{SCRIPTS}/environment.sh"; use_environment test; echo ready'
    return subprocess.run(["bash", "-c", script], env=kept, capture_output=True, text=True, timeout=120, cwd=tmp_path)


@pytest.mark.parametrize("tools", [{}, {"python3": "exit 1"}])
def test_a_missing_python_is_reported_with_the_version_to_install(tmp_path, tools):
    done = use_environment(tmp_path, tools)
    assert done.returncode == 1
    assert "no Python 3.11 or later with the venv module was found: install one" in done.stderr


def test_a_missing_compiler_is_reported_before_an_environment_is_made(tmp_path):
    done = use_environment(tmp_path, {}, PYENGINE_PYTHON=sys.executable)
    assert done.returncode == 1
    assert "no C compiler was found: install one" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "an env").exists()


def python_without(tmp_path: Path, *modules: str, headers: bool) -> str:
    """A Python whose import of these modules fails, and whose headers are or are not there."""
    code = tmp_path / "site" / "sitecustomize.py"
    code.parent.mkdir(exist_ok=True)
    code.write_text("import sys, sysconfig\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in modules)
                    + ("" if headers else "sysconfig.get_path = lambda name: '/nonexistent'\n"))
    return f'PYTHONPATH="{code.parent}" exec "{sys.executable}" "$@"'


@pytest.mark.parametrize(("modules", "headers", "says"), [
    (("ensurepip",), True, "lacks its module venv with ensurepip (python{0}-venv): install what is in brackets"),
    (("venv",), True, "lacks its module venv with ensurepip (python{0}-venv): install"),
    ((), False, "lacks its headers, Python.h (python{0}-dev): install"),
    (("ensurepip",), False, "lacks its module venv with ensurepip (python{0}-venv) and its headers, Python.h (python{0}-dev): install"),
])
def test_what_a_python_lacks_is_named_with_its_package_before_anything_is_made(tmp_path, modules, headers, says):
    done = use_environment(tmp_path, {"python3": python_without(tmp_path, *modules, headers=headers)})
    assert done.returncode == 1 and not (tmp_path / "an env").exists()
    assert "python3 " + says.format("%d.%d" % sys.version_info[:2]) in done.stderr
    assert "no C compiler was found" in done.stderr and done.stderr.count("\n") == 2  # all at once


def test_a_python_that_lacks_nothing_is_taken_before_one_that_does(tmp_path):
    done = use_environment(tmp_path, {"python3.11": python_without(tmp_path, "ensurepip", headers=True),
                                      "python3": f'exec "{sys.executable}" "$@"'})
    assert "lacks" not in done.stderr and "no C compiler was found" in done.stderr


def test_a_failed_installation_shows_its_log(tmp_path):
    broken = tmp_path / "base"
    broken.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        # `venv --clear PLACE` makes a python that is this script; pip fails with a sentence of its own.
        '  *"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python";;\n'
        '  *"print(sys.executable)"*) echo "$0";;\n'
        '  *"pip install"*) echo "the registry does not answer"; exit 1;;\n'
        "esac\n"
    )
    broken.chmod(0o755)
    done = use_environment(tmp_path, {"cc": "exit 0", "mkdir": 'exec /bin/mkdir "$@"', "cp": 'exec /bin/cp "$@"'},
                           PYENGINE_PYTHON=str(broken))
    assert done.returncode == 1
    assert "the registry does not answer" in done.stderr
    assert "the lines above say why" in done.stderr
    assert "ready" not in done.stdout
