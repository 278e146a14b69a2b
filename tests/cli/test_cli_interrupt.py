"""Ctrl-C in the middle of long work: exit 130, one word, nothing left behind, and the same command finishes it later."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from fix_cli import changes, environment, picture, run
from fix_golden import usual
from waiting import scaled_timeout_s

# Runs a command that says "here" and waits when it comes to a certain function.
HELD = """
import sys, time
from importlib import import_module
module, name = sys.argv[1].split(":")
def held(*args, **kwargs):
    print("here", file=sys.stderr, flush=True)
    time.sleep(120)
setattr(import_module(module), name, held)
from pyengine.cli.main import main
main(sys.argv[2:], prog_name="pyengine")
"""


def interrupted(function: str, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command that got SIGINT inside `function`, given as module:name."""
    process = subprocess.Popen([sys.executable, "-c", HELD, function, *map(str, arguments)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True)
    try:
        lines = []
        while (line := process.stderr.readline()) not in ("here\n", ""):
            lines.append(line)
        assert line, f"it never came to {function}: {lines}"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=scaled_timeout_s(60))
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, "".join(lines) + err


@pytest.mark.parametrize("function", [
    "pyengine.storage.commit_log:walk_pieces", "pyengine.storage.recovery.log:sync_file",
    "pyengine.storage.recovery.derived:Dispatcher", "pyengine.storage.recovery.recover:remove_abort_file",
    *usual(["pyengine.storage.recovery.derived:write_marker", "pyengine.storage.recovery.log:sync_folder",
            "pyengine.storage.recovery.recover:write_checkpoint", "pyengine.storage.durable_file:sync_folder"], [], pytest.mark.ci),
])
def test_an_interrupted_recovery_is_finished_by_the_next(golden, function):
    whole, cut = golden("abnormal-indexloss"), golden("abnormal-indexloss")
    settings = [word for key, value in whole.manifest["config"].items() for word in ("--set", f"{key}={value}")]
    assert run("recover", whole.root, *settings).code == 0
    code, out, err = interrupted(function, "recover", cut.root, *settings)
    assert (code, out) == (130, "") and "Traceback" not in err and err.count("\n") <= 2
    again = run("recover", cut.root, *settings)
    assert again.code == 0, again.stderr
    expected, found = (run("inspect", one.root, "--json", *settings).document for one in (whole, cut))
    for part in ("records", "messages", "queries"):
        assert found[part] == expected[part]
    for fact in ("minPhy", "maxPhy", "queues"):
        assert found["facts"][fact] == expected["facts"][fact]
    assert run("check", cut.root, *settings).code == 0


@pytest.mark.parametrize(("command", "function"), [
    ("check", "pyengine.storage.check.parts:walk_pieces"), ("check", "pyengine.storage.check.check:check_queues"),
    ("check", "pyengine.storage.check.check:check_index"), ("inspect", "pyengine.storage.inspect:StoreReader"),
])
def test_an_interrupted_look_changes_nothing(golden, command, function):
    store = golden("basic")
    before = picture(store.root)
    code, out, err = interrupted(function, command, store.root, "--json")
    assert (code, out) == (130, "") and "Traceback" not in err and err.count("\n") <= 2
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize("function", ["pyengine.storage.salvage:carve", "pyengine.storage.salvage:recover"])
def test_an_interrupted_salvage_leaves_no_half_store(golden, tmp_path, function):
    store, made = golden("basic"), tmp_path / "made"
    before = picture(store.root)
    code, out, err = interrupted(function, "salvage", store.root, made)
    assert (code, out) == (130, "") and "Traceback" not in err
    assert not made.exists() and changes(before, picture(store.root)) == []
    assert run("salvage", store.root, made).code == 0


@pytest.mark.ci
@pytest.mark.spark
@pytest.mark.java
def test_an_interrupted_export_has_no_mark_of_success(golden, tmp_path):
    store, made = golden("basic"), tmp_path / "made"
    code, out, err = interrupted("pyengine.spark.jobs:collect_from_workers", "export", store.root, made)
    assert (code, out) == (130, "") and "Traceback" not in err
    assert not made.exists() or [path.name for path in made.iterdir()] == []
