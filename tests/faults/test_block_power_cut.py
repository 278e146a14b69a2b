"""Power cuts under a running engine on a real file system: what was promised is in every state (block_power_cut.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import pytest

from faults.block_power_cut import cut, tell_beginning
from faults.cut_judge import Promised
from faults.engine_power_cut import ACKS, COMPANY, SEGMENT_BYTES, here, words
from faults.logged_disk import IMAGE_NAME, build_server
from faults.loop_device import attached_files
from faults.mounts import mounted_below, with_own_mounts
from faults.mutants import FORGETS_TIMED_SYNC, NEVER_SYNCS, PUBLISHES_BEFORE_SYNC, Mutant, environment
from pyengine.engine_config import MODES
from pyengine.formats.paths import segment_name
from waiting import eventually, scaled_timeout_s

STATES = 10
ENOUGH = 60
TURNS = 5
STATES_LONG = int(os.environ.get("PYENGINE_STATES", "500"))
SCRIPT = Path(__file__).parents[2] / "scripts" / "power_cut.sh"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_server(tmp_path_factory.mktemp("server"))


@pytest.mark.block
def test_promised_data_is_on_the_disk_after_a_power_cut(program, tmp_path, seed, rng):
    """In one of the modes; in the long form in all."""
    outcome = with_own_mounts(cut, program, tmp_path, seed, rng.choice(list(MODES)), STATES, here(), enough=ENOUGH)
    assert (outcome.bad, outcome.states) == ([], STATES)
    assert outcome.acknowledged >= ENOUGH


@pytest.mark.block
def test_results_of_a_repair_or_read_after_a_kill_are_on_the_disk_after_a_power_cut(program, tmp_path, seed, rng):
    then = rng.choice(("recover", "rebuild", "cut", "read"))
    outcome = with_own_mounts(cut, program, tmp_path, seed, rng.choice(list(MODES)), STATES, here(), enough=ENOUGH, then=then)
    assert (outcome.bad, outcome.states) == ([], STATES)


@pytest.mark.long
@pytest.mark.block
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("company", [(), COMPANY], ids=("alone", "in company"))
@pytest.mark.parametrize("mode", MODES)
def test_promised_data_is_on_the_disk_in_many_states_after_a_power_cut(program, tmp_path, seed, proof, mode, company):
    outcome = with_own_mounts(cut, program, tmp_path, seed, mode, STATES_LONG, here(), company, enough=4 * ACKS)
    proof("power cut, blocks", words(mode, company), states=outcome.states, records=outcome.records,
          acknowledged=outcome.acknowledged, checked=outcome.checked, bad=len(outcome.bad))
    assert outcome.bad == []


@pytest.mark.long
@pytest.mark.block
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "mutant, mode",
    [(NEVER_SYNCS, "sync"), (PUBLISHES_BEFORE_SYNC, "sync"), (FORGETS_TIMED_SYNC, "async"), (FORGETS_TIMED_SYNC, "pool")],
    ids=lambda of: getattr(of, "id", str(of)),
)
def test_a_broken_engine_is_caught_on_the_disk(program, broken_build, tmp_path, seed, proof, mutant: Mutant, mode: str):
    states = 0
    for turn in range(TURNS):  # in some runs the kernel happens to write back soon what is not synced
        folder = tmp_path / str(turn)
        folder.mkdir()
        environ = environment(broken_build, mutant)
        outcome = with_own_mounts(cut, program, folder, f"{seed}/{turn}", mode, 300, environ, stop_at=1)
        states += outcome.states
        assert len(outcome.caught) == len(outcome.bad), outcome.bad
        if outcome.caught:
            break
    proof("broken builds", f"power cut, blocks: {mutant.breaks} ({mode})",
          **{"states until caught": states, "not caught": int(not outcome.caught)})
    assert outcome.caught, f"an engine that {mutant.breaks} was not noticed in {states} states"
    print(outcome.caught[0])


@pytest.mark.long
@pytest.mark.block
@pytest.mark.parametrize("broken", ["", "no-sync"])
def test_the_block_power_cut_script_reports_lost_data_only_of_a_broken_build(rng, broken):
    command = [SCRIPT, "--block", "--states", "60", "--seed", str(rng.randrange(1 << 32)), "--no-peer", "--json"]
    done = subprocess.run(command + ["--broken", broken] * bool(broken), capture_output=True, text=True, timeout=scaled_timeout_s(280),
                          env=os.environ | {"PYTHON": sys.executable})
    print(done.stderr)
    summary = json.loads(done.stdout)
    assert (done.returncode, bool(summary["lost"])) == ((1, True) if broken else (0, False))
    assert summary["acknowledged"] >= ACKS and (broken or summary["checked"] > 0)


def strike(folder: Path, number: int, moment: str, seed: str) -> list[str]:
    """Return what is left of a run of the script that gets that signal at that moment."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm"], check=True)  # so that all in it is the run's
    environ = os.environ | {"PYTHON": sys.executable, "TMPDIR": str(folder)}
    has_come, processes = MOMENTS[moment]
    with subprocess.Popen([SCRIPT, "--block", "--no-peer", "--mode", "sync", "--states", "100000", "--seed", seed], env=environ,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as script:
        try:
            eventually(lambda: has_come(script.pid), moment, 120)
            names = [f"/{name}/" for name in os.listdir("/dev/shm") if name.startswith("pyengine-test-")]
            children = psutil.Process(script.pid).children(recursive=True)
            seen = [process for name in names for process in processes_with(name, psutil.process_iter())]
        finally:
            os.killpg(script.pid, number)
        code = script.wait(60)
    for name in names:  # with the engine, which belongs to itself
        eventually(lambda: not processes_with(name, psutil.process_iter()), "all processes have ended")
    eventually(lambda: not any(process.is_running() for process in children), "all children have ended")
    eventually(lambda: not attached_as([IMAGE_NAME.format(script.pid), *names]), "all loop devices have gone")
    stays = [str(place) for place in mounted_below(Path("/dev/shm"))] + os.listdir("/dev/shm")
    is_seen = len(names) == 1 and len(seen) >= processes
    return stays + [f"exit code {code}"] * (code != 130) + [f"only {seen} were seen"] * (not is_seen)


def attached_as(names: Sequence[str]) -> list[str]:
    """Files of loop devices with one of the names in theirs."""
    return [file for file in attached_files() if any(name in file for name in names)]


def in_memory_of(pid: int, text: str) -> list[psutil.Process]:
    """Processes with it in their arguments, of the store on that script's disk."""
    servers = children_with(pid, "/journal")
    return processes_with(text, processes_with(os.path.dirname(servers[0].cmdline()[1]), psutil.process_iter())) if servers else []


def children_with(pid: int, text: str) -> list[psutil.Process]:
    return processes_with(text, psutil.Process(pid).children(recursive=True))


MOMENTS = {  # whether it has come; how many processes there are then at least, besides the script's own
    "the disk serves": (lambda pid: children_with(pid, "/server"), 1),
    "the engine starts": (lambda pid: in_memory_of(pid, "pyengine.workers.flusher"), 3),
    "messages are put": (lambda pid: children_with(pid, "crash.acked_producer"), 9),
    "a state is mounted": (lambda pid: attached_as([IMAGE_NAME.format(pid)]), 0),
}


@pytest.mark.long
@pytest.mark.block
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_no_disk_no_memory_and_no_process(tmp_path, seed, number, moment):
    assert with_own_mounts(strike, tmp_path, number, moment, seed) == []


def processes_with(text: str, among: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have it in their arguments."""
    found = []
    for process in among:
        with contextlib.suppress(psutil.Error):
            if any(text in word for word in process.cmdline()):
                found.append(process)
    return found


def test_block_power_cut_without_the_right_to_mount_exits_2_with_the_reason(tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    done = subprocess.run([sys.executable, "-P", "-m", "faults.block_power_cut"], capture_output=True, text=True,
                          timeout=scaled_timeout_s(120),
                          env=here() | {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 2 and done.stderr.startswith("no disk that writes down what reaches it can be made here: ")


def test_no_log_may_begin_beyond_where_it_did_at_the_end_of_the_run(tmp_path):
    (tmp_path / "commitlog").mkdir()
    for number in (4, 3, 0):
        (tmp_path / "commitlog" / segment_name(number * SEGMENT_BYTES)).touch()
        promised = Promised.of(record.a for record in tell_beginning([], tmp_path))
        assert promised.removing == ((number - 1) * SEGMENT_BYTES if number else -1)  # the last that may be gone
