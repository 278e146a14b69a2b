"""scripts/systemd_drills.sh: what can happen to an engine of units, in a systemd that is booted for it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from crash.systemd_drills import DRILLS
from waiting import eventually, scaled_timeout_s

SOURCES = Path(__file__).parents[2]
SCRIPT = SOURCES / "scripts" / "systemd_drills.sh"


def environment(scratch: Path, **more: str) -> dict[str, str]:
    return os.environ | {"PYTHON": sys.executable, "TMPDIR": str(scratch)} | more


def run_drills(scratch: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True, env=environment(scratch, **more),
                          timeout=scaled_timeout_s(1700))


def held(scratch: Path, names: tuple[str, ...], seed: int, *more: str) -> str:
    """Return the output of a run of these drills, all of which passed."""
    done = run_drills(scratch, "--json", "--seed", seed, *more, *(word for name in names for word in ("--drill", name)))
    assert done.returncode == 0, done.stderr + done.stdout
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [summary["kind"] for summary in summaries] == list(names)
    for summary in summaries:
        assert summary["acknowledged"] > 0 and summary["checked"] > 0 and (summary["lost"], summary["failures"]) == (0, []), summary
        assert f"drill {summary['kind']}: {DRILLS[summary['kind']].DOES}\n" in done.stderr
    kills = sum(summary["kills"] for summary in summaries)
    assert re.search(rf"^(All {len(names)} drills|The drill) held: {kills:,} kills, and all [\d,]+ acknowledged messages are there\.$",
                     done.stderr, re.MULTILINE), done.stderr
    assert list(scratch.iterdir()) == [], "nothing is left"
    return done.stderr


@pytest.mark.long
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(600)
def test_a_restore_over_a_store_is_refused_and_one_in_its_place_loses_nothing(tmp_path, rng):
    told = held(tmp_path, ("restore",), rng.randrange(1 << 32))
    assert told.count("is refused: error: ") == 2 and "units run on it, puts go on" in told


@pytest.mark.long
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["async", "pool", "sync"])
def test_every_drill_holds(tmp_path, rng, mode):
    told = held(tmp_path, tuple(DRILLS), rng.randrange(1 << 32), "--mode", mode)
    for what in ("killed: replaced by", "ended: replaced", "the watchdog replaced it by", "for want of memory"):
        assert sum(f" {what}" in line for line in told.splitlines()) >= 8, what
    assert "the start says: cannot open " in told and "the start says: no room in " in told


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_run_that_is_interrupted_leaves_no_guest_and_no_folder(tmp_path, number):
    log = tmp_path / "log"
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def guest() -> list[bytes]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(scratch).encode() in _read(path)]

    with log.open("wb") as file, subprocess.Popen([SCRIPT, "--drill", "term", "--rounds", "1000"], stderr=file, stdout=file,
                                                  env=environment(scratch)) as script:
        try:
            eventually(lambda: b"ended: replaced" in log.read_bytes(), "a drill is under way", timeout_s=120)
            assert guest()
            script.send_signal(number)
            assert script.wait(scaled_timeout_s(60)) == 130, log.read_text()
        finally:
            script.terminate()
    eventually(lambda: not guest(), "no process of it lives")
    assert list(scratch.iterdir()) == [] and b"Traceback" not in log.read_bytes()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_systemd_drills_refuse_a_user_other_than_root(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "bin" / "id").chmod(0o755)
    done = run_drills(tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 2 and done.stderr == "systemd_drills.sh: only root may boot a systemd\n"


@pytest.mark.parametrize("below", ["/tmp", "/var/tmp"])
def test_a_checkout_that_units_cannot_see_is_refused_before_anything_is_booted(tmp_path, below):
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "id").chmod(0o755)
    with tempfile.TemporaryDirectory(dir=below) as checkout:
        shutil.copytree(SCRIPT.parent, f"{checkout}/scripts", ignore=shutil.ignore_patterns("__pycache__"))
        done = subprocess.run([f"{checkout}/scripts/{SCRIPT.name}", "--drill", "term"], capture_output=True, text=True,
                              timeout=scaled_timeout_s(60), env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 2 and f"the units cannot see {checkout} (PrivateTmp=yes)" in done.stderr


def test_without_units_this_machine_is_left_alone(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    done = run_drills(tmp_path, "--here", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 2 and "the units are not installed: scripts/install-systemd.sh" in done.stderr


def test_each_drill_is_listed_with_what_it_does(tmp_path):
    done = run_drills(tmp_path, "--list")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == len(DRILLS)
    for name, drill in DRILLS.items():
        assert re.search(rf"^{name} +{re.escape(drill.DOES)}$", done.stdout, re.MULTILINE), name
