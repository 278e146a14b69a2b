"""Each crash script in its short form: something was killed, something acknowledged, nothing lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from crash.disk_full_rounds import DiskFullRun, SmallDisk
from crash.peer import judge_answer
from crash.report import ended_in_order, finish
from crash.rounds import VICTIMS, CrashRun
from fix_golden import usual
from pyengine.cli.torture import processes_of
from pyengine.errors import EngineError
from pyengine.ipc.control_block import EngineMemory
from waiting import eventually, scaled_timeout_s

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Script, what makes it short, how often the long form goes round.
OTHERS = {
    "restart_loop": (("--rounds", "2"), 100),
    "kill_during_recovery": (("--rounds", "1"), 40),
    "hang_worker": (("--rounds", "1", "--kind", "writer", "--kind", "reputter"), 10),
}
SHORT = usual([("writer", "async"), ("everything", "pool"), ("scheduler", "async"), ("supervisor", "async"), ("producer", "async"),
               ("flusher", "sync"), ("committer", "pool"), ("grpc", "async")],
              [("writer", "async")], pytest.mark.ci)
LONG_ROUNDS = 60


def run_script(name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPTS / f"{name}.sh", *arguments],
        env=os.environ | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
        timeout=1700,
    )


def summary_of(name: str, seed: int, *arguments: str) -> dict:
    """Return what a script that held says it did."""
    done = run_script(name, *arguments, "--seed", str(seed), "--json")
    print(done.stderr, done.stdout)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["lost"], summary["failures"]) == (0, []) and f"seed={seed}" in done.stderr
    assert re.findall(r"^round (\d+): ", done.stderr, re.M) == [str(number) for number in range(1, summary["rounds"] + 1)]
    assert re.search(r"^round 1: \d+ kills? of .*; [\d,]+ messages acknowledged so far$", done.stderr, re.M)
    assert f"It held: after {summary['kills']:,} kills all {summary['acknowledged']:,} acknowledged" in done.stderr.splitlines()[-1]
    assert summary["acknowledged"] > 0 and summary["checked"] > 0 and summary["rounds"] > 0
    return summary


def held(kind: str, mode: str, rounds: int, seed: int, *more: str) -> None:
    summary = summary_of("crash", seed, kind, "--mode", mode, "--rounds", str(rounds), *more)
    assert summary["rounds"] == rounds and summary["kills"] >= rounds
    if (kind, mode) == ("everything", "pool"):
        assert summary["undrained_bytes"] > 0


@pytest.mark.parametrize("kind, mode", SHORT)
def test_acknowledged_messages_survive_kills(kind, mode, rng):
    held(kind, mode, 2, rng.randrange(1 << 32), *(["--no-peer"] if kind != "scheduler" else []))  # that one where it can


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind, mode", [(kind, mode) for kind, modes in VICTIMS.items() for mode in modes])
def test_acknowledged_messages_survive_kills_in_many_rounds(kind, mode, rng):
    held(kind, mode, LONG_ROUNDS, rng.randrange(1 << 32))


@pytest.mark.ci
@pytest.mark.parametrize("name", OTHERS)
def test_acknowledged_messages_survive_a_crash_script(name, rng):
    summary = summary_of(name, rng.randrange(1 << 32), *OTHERS[name][0], "--no-peer")
    if name == "kill_during_recovery":
        assert summary["recoveries_killed"] >= summary["rounds"]
    if name == "hang_worker":
        assert summary["stops"] == 4 and summary["went_on"] == 2  # puts do not need a reputter


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["member", "everything"])
def test_killed_members_lose_no_message_and_repeat_no_stored_acknowledgement(kind, rng):
    done = run_script("kill_members", kind, "--rounds", "4", "--seed", str(rng.randrange(1 << 32)), "--json")
    print(done.stderr, done.stdout)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["lost"], summary["failures"]) == (0, 0, [])
    assert summary["kills"] >= (4 if kind == "member" else 50) and summary["checked"] == 6000 and summary["acknowledged"] > 5000


@pytest.mark.ci
@pytest.mark.root
def test_a_full_disk_loses_nothing(rng):
    summary = summary_of("disk_full", rng.randrange(1 << 32), "--rounds", "1", "--no-peer")
    assert summary["times_full"] == 1 and summary["kills"] > 0


@pytest.mark.root
@pytest.mark.parametrize("end", [KeyboardInterrupt, KeyError, None])
def test_the_small_disk_goes_however_a_run_ends_and_its_store_stays_to_be_looked_at(tmp_path, monkeypatch, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = []

    def make(store, scratch):
        made.append(DiskFullRun(SmallDisk(scratch / "disk", 1 << 20), scratch, "async", 5))
        return made[0]

    def go(run):
        run.store.mkdir()
        (run.store / "here").touch()
        if end:
            raise end("so")

    assert finish(argparse.Namespace(seed=5, json=True, peer=False), make, go) == {None: 0, KeyError: 1}.get(end, 130)
    assert not os.path.ismount(made[0].disk.folder)
    assert (made[0].scratch / "store" / "here").exists() == bool(end) == made[0].scratch.exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.ci)])
def test_a_run_that_is_ended_from_outside_leaves_no_process(tmp_path, end):
    def engine() -> list[int]:
        return [pid for store in tmp_path.glob("pyengine-crash-*/store") for pid in processes_of(store, b"")]

    with subprocess.Popen([SCRIPTS / "crash.sh", "flusher", "--rounds", "100000"], text=True, stderr=subprocess.PIPE,
                          env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path)}) as script:
        try:
            eventually(lambda: len(engine()) > 6, "an engine under producers")
            script.send_signal(end)
            _, words = script.communicate(timeout=scaled_timeout_s(60))
        finally:
            script.terminate()  # it would go on for very many rounds
    assert script.returncode == 130 and "interrupted; kept: " in words and "Traceback" not in words
    assert engine() == []


def test_a_producer_whose_start_was_interrupted_is_killed_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS), prepend=os.pathsep)  # without it the producers end by themselves
    run = CrashRun(tmp_path / "store", tmp_path, "writer", "async", 5)
    run.make_producers()
    started, run.producers = run.producers, []
    eventually(lambda: len(processes_of(run.store, b"crash.acked_producer")) == len(started), "they have begun")
    run.clean_up()
    assert [process.wait(60) for process in started] == [-signal.SIGKILL] * len(started) and run.failures == []


# What is begun, and what is on its screen when a round is under way.
INTERRUPTED = {
    "crash": (("everything", "--mode", "pool"), "^round 1:"),
    "crash_all": (("--mode", "sync"), "^round 1:"),
    "restart_loop": ((), "^round 1:"),
    "kill_during_recovery": ((), "^round 1:"),
    "hang_worker": ((), "^round 1:"),
    "disk_full": ((), "^round 1:"),
    "failpoints": (("--scene", "puts", "--mode", "sync"), "an engine and its producers work on"),
    "failpoints-replicas": (("--scene", "replicated", "--mode", "async"), "an engine and its producers work on"),
    "power_cut": ((), "an engine and its producers work on"),
    "power_cut-block": (("--block", "--states", "3"), "^seed .* acknowledged, "),
    "prove_all": (("kills",), "^round 1:"),
}


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose TMPDIR is `folder`: the script and its descendants."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def attach_counts() -> set[int]:
    """Return the semaphores of all engines of this machine."""
    return {int(line.split()[1]) for line in Path("/proc/sysvipc/sem").read_text().splitlines()[1:]}


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.root] * (name in ("disk_full", "power_cut-block"))
                                               + [pytest.mark.block] * (name == "power_cut-block")) for name in INTERRUPTED])
def test_ctrl_c_in_the_middle_of_a_round_ends_a_script_with_all_that_it_began(tmp_path, name):
    arguments, begun = INTERRUPTED[name]
    log, scratch = tmp_path / "log", tmp_path / "scratch"
    scratch.mkdir()
    counts: set[int] = set()
    memory: set[Path] = set()

    def under_way() -> bool:
        """Whether it has said so and an engine is there; notes what the engines have outside of their stores."""
        is_begun = re.search(begun, log.read_text(), re.MULTILINE)
        for store in {path.parents[1] for path in scratch.rglob("config/engine-id")}:
            with contextlib.suppress(EngineError), EngineMemory.of(store) as found:
                memory.add(found.folder.path)
                counts.add(found.identity.sysv_semaphore_id)
        return bool(is_begun and (counts or name == "power_cut-block"))  # that one's store is on a disk of its own

    with log.open("wb") as file, subprocess.Popen([SCRIPTS / f"{name.partition('-')[0]}.sh", *arguments], stderr=file, stdout=file,
                                                  start_new_session=True,
                                                  env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(scratch)}) as script:
        try:
            eventually(lambda: script.poll() is not None or under_way(), "a round is under way", timeout_s=240)
            assert script.poll() is None, log.read_text()
            began_s = time.monotonic()
            os.killpg(script.pid, signal.SIGINT)  # as a terminal does
            assert script.wait(scaled_timeout_s(60)) in (130, -signal.SIGINT), log.read_text()  # to a shell both are 130
            print(f"{name}: ended {time.monotonic() - began_s:.2f} s after Ctrl-C")
        finally:
            script.terminate()
    said = log.read_text()
    assert "interrupted" in said and "Traceback" not in said, said
    if name.startswith("failpoints"):
        eventually(lambda: not list(scratch.glob("pyengine-failpoints-*")) and not processes_in(scratch), "its build is removed")
    assert processes_in(scratch) == []
    assert not [path for path in memory if path.exists()] and not counts & attach_counts()
    assert str(scratch) not in Path("/proc/self/mounts").read_text()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_before_it_is_made_leaves_nothing(tmp_path, monkeypatch, capsys, end):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(store, scratch):
        signal.raise_signal(end)

    @ended_in_order
    def main(rounds):
        with tempfile.TemporaryDirectory(prefix="pyengine-broken-"):
            return finish(argparse.Namespace(seed=5, json=True, peer=False), make, lambda run: run.run(rounds))

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(1) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == "interrupted\n"


def test_disk_full_without_the_right_to_mount_exits_2_with_the_reason(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "mount").write_text("#!/bin/sh\necho must be superuser >&2\nexit 32\n")
    (tmp_path / "mount").chmod(0o755)
    done = run_script("disk_full", "--rounds", "1", PATH=f"{tmp_path}:{os.environ['PATH']}", TMPDIR=str(tmp_path / "tmp"))
    assert done.returncode == 2 and "which takes root: must be superuser" in done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["async", "pool", "sync"])
@pytest.mark.parametrize("name", [*OTHERS, "disk_full"])
def test_acknowledged_messages_survive_a_crash_script_in_many_rounds(name, mode, rng):
    if name == "disk_full" and os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    rounds = OTHERS[name][1] if name in OTHERS else 30
    summary_of(name, rng.randrange(1 << 32), "--mode", mode, "--rounds", str(rounds))


@pytest.mark.long
@pytest.mark.java
@pytest.mark.maven
def test_the_real_rocketmq_opens_the_store_at_the_end(rng):
    summary = summary_of("crash", rng.randrange(1 << 32), "writer", "--rounds", "1", "--peer")
    assert summary["peer"] == "opens it"


def test_the_judge_reports_messages_that_rocketmq_does_not_return():
    row = {"topic": "T", "queue_id": 0, "queue_offset": 1, "physical_offset": 9, "body_sha256": "aa"}
    served = {"topic": "T", "queueId": 0, "queueOffset": 1, "phy": 9, "bodySha": "aa"}
    assert judge_answer({"loadOk": True, "messages": [served]}, [row]) == []
    assert "does not have what was acknowledged" in judge_answer({"loadOk": True, "messages": [served | {"bodySha": "bb"}]}, [row])[0]
    assert "(1 messages)" in judge_answer({"loadOk": True, "messages": []}, [row, row | {"queue_offset": None}])[0]
    assert judge_answer({"loadOk": False, "messages": []}, [row]) == ["RocketMQ refuses the store"]


def test_the_scripts_that_kill_every_kind_of_process_take_the_table_of_kinds():
    command = f'source {SCRIPTS}/lib.sh; use_project; list_victims; printf "%s\\n" "${{victims[@]}}"'
    listed = subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=os.environ | {"PYTHON": sys.executable}, capture_output=True,
                            text=True, check=True).stdout
    assert listed.splitlines() == [" ".join((kind, *modes)) for kind, modes in VICTIMS.items()]
    assert VICTIMS["committer"] == ["pool"] and {"async", "pool", "sync"} <= set(VICTIMS["writer"]) == set(VICTIMS["everything"])


def test_several_runs_of_a_script_end_with_it_and_with_the_first_that_is_interrupted(tmp_path):
    """Ctrl-C reaches the run alone, which ends in order: the script must not begin the next one."""
    lines = ["set -euo pipefail", f"source '{SCRIPTS}/lib.sh'", "run_part sh -c 'exit 1' || echo failed",
             "run_part sh -c 'exit 130' || echo no", "echo no"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert (done.returncode, done.stdout) == (130, "failed\n")
    lines = [*lines[:2], "run_part sh -c 'trap \"echo ended; exit 130\" TERM; echo begun; while :; do sleep 0.05; done'", "echo no"]
    with subprocess.Popen(["bash", "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout.readline() == "begun\n"
        script.terminate()
        assert (script.stdout.read(), script.wait(60)) == ("ended\n", 130)


def test_ctrl_c_does_not_wait_until_the_build_with_failpoints_is_removed_and_none_stays(tmp_path):
    """A disk on which removing takes its time: each rm waits for a line."""
    (tmp_path / "bin").mkdir()
    os.mkfifo(tmp_path / "gate")
    for name, words in (("rm", f"[ $1 != -rf ] || read line <'{tmp_path}/gate'; PATH=$OLD_PATH; exec rm \"$@\""),
                        ("python", f"[ \"$1\" != setup.py ] || exit 0; exec '{sys.executable}' \"$@\"")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    lines = ["set -euo pipefail", f"source '{SCRIPTS}/lib.sh'", "use_failpoint_build",
             "run_part sh -c \"trap 'exit 130' TERM; echo $failpoint_build/pyengine; while :; do sleep 0.05; done\""]
    environ = os.environ | {"PYTHON": str(tmp_path / "bin" / "python"), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
                            "OLD_PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    with subprocess.Popen(["bash", "-c", "\n".join(lines)], stdout=subprocess.PIPE, text=True, env=environ,
                          start_new_session=True) as script:
        made = Path(script.stdout.readline().strip()).parent
        os.killpg(script.pid, signal.SIGINT)
        try:
            assert script.wait(60) == 130 and made.parent == tmp_path and (made / "pyengine" / "__init__.py").exists()
        finally:
            script.kill()
    eventually(lambda: processes_in(tmp_path), "the removal has begun")
    (tmp_path / "gate").write_text("go on\n")
    eventually(lambda: not made.exists() and not processes_in(tmp_path), "nothing of it stays")


def test_the_scripts_run_in_the_environment_that_is_there(tmp_path):
    """They asked for a package that nothing needs any more, so each made an environment of its own."""
    done = subprocess.run(["bash", "-c", f"set -euo pipefail; source '{SCRIPTS}/lib.sh'; use_project; echo $PYTHON"], cwd=tmp_path,
                          env=os.environ | {"PYTHON": sys.executable, "PYENGINE_VENV": str(tmp_path / "none"), "PYENGINE_PYTHON": "none"},
                          capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.stdout.strip() == sys.executable, done.stderr
    assert not (tmp_path / "none").exists()


def test_a_script_explains_itself_by_its_own_name():
    done = run_script("crash", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: crash.sh [-h] [--rounds N]") and "KIND" in done.stdout
    assert run_script("crash_all", "--help").stdout.startswith("crash.sh with every kind")


def test_wrong_arguments_are_explained():
    assert "crash.sh: error: argument --rounds: 0: give 1 or more" in run_script("crash", "writer", "--rounds", "0").stderr
    assert run_script("crash_all", "--nonsense").returncode == 2
    assert "invalid choice: 'mapped'" in run_script("crash", "writer", "--mode", "mapped").stderr
    assert "a committer runs in mode pool only" in run_script("crash", "committer", "--mode", "sync").stderr
    assert "in mode async there are" in run_script("hang_worker", "--kind", "committer").stderr
