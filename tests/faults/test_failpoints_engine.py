"""A process of a running engine is killed, or stopped for good, at its steps: a sample here, all of them in the long form."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from crash import failpoints
from crash.failpoint_rounds import PROMOTED, REPLICATED, SCENES, TABLES, points_of, ways_of
from crash.failpoints import main
from crash.steps import FAILPOINTS, OWN, PUTS, START, STOP
from faults.mutants import environment
from waiting import scaled_timeout_s

IN_LIFE = ("tail_record_encoded", "index_slot_written")


def rounds(broken_build, rng, scene: str, mode: str, names: tuple[str, ...], *more: str) -> dict:
    seed = rng.randrange(1 << 32)
    command = [sys.executable, "-P", "-m", "crash.failpoints", "--scene", scene, "--mode", mode, "--json", "--no-peer",
               "--seed", str(seed), *[word for name in names for word in ("--point", name)], *more]
    done = subprocess.run(command, env=environment(broken_build, None), capture_output=True, text=True, timeout=3000)
    print(done.stderr[-4000:])
    assert done.returncode == 0
    summary = json.loads(done.stdout)
    assert (summary["lost"], summary["left_out"], summary["failures"]) == (0, 0, [])
    assert set(summary["struck"]) == set(names) and summary["acknowledged"] > 0
    return summary


def test_each_step_has_a_scene():
    assert {point.scene for point in FAILPOINTS.values()} == {*SCENES, OWN}


@pytest.mark.ci
def test_a_worker_dies_at_a_step_and_alone_or_with_all_others_loses_nothing(broken_build, rng):
    summary = rounds(broken_build, rng, PUTS, "async", IN_LIFE, "--way", "restart", "--way", "crash")
    assert summary["kills"] == 2 * len(IN_LIFE)


@pytest.mark.ci
def test_a_slave_dies_between_its_append_and_its_report_in_part_or_whole_and_both_logs_are_equal(broken_build, rng):
    assert rounds(broken_build, rng, REPLICATED, "async", ("run_answered",), "--way", "restart", "--way", "crash")["kills"] == 2


def test_the_shares_of_a_scene_are_all_its_steps_once(monkeypatch):
    gone_through = []
    monkeypatch.setattr(failpoints, "is_built", lambda point: True)
    monkeypatch.setattr(failpoints, "finish", lambda arguments, make, go, words: go(Named(gone_through)))
    for number in (1, 2, 3):
        monkeypatch.setattr(sys, "argv", ["failpoints", "--share", f"{number}/3"])
        main()
    assert sorted(gone_through) == sorted(point.name for point in points_of(PUTS, "async"))


class Named:
    """A run that notes the steps it is to go through."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def go_through(self, points, ways, nth) -> None:
        self.names += [point.name for point in points]


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b"])
def test_a_wrong_share_is_refused(monkeypatch, capsys, text):
    monkeypatch.setattr(sys, "argv", ["failpoints", "--share", text])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "is not a share: give K/N" in capsys.readouterr().err


@pytest.mark.ci
def test_wrong_arguments_are_explained(broken_build):
    command = [sys.executable, "-P", "-m", "crash.failpoints", "--scene", START, "--point", "commit_point"]
    done = subprocess.run(command, env=environment(broken_build, None), capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.returncode == 2 and "none of these steps is in this scene, mode and build" in done.stderr


def test_a_way_that_a_scene_does_not_know_is_refused_or_said_to_be_left_out(monkeypatch, capsys):
    assert ways_of(PUTS, None) == (["restart", "crash", "hang"], "") and ways_of(PUTS, ["hang"]) == (["hang"], "")
    assert ways_of(PROMOTED, None) == ways_of(PROMOTED, ["restart"]) == (["restart"], "")
    ways, said = ways_of(STOP, ["crash", "restart"])
    assert ways == ["restart"] and "the scene stop" in said
    monkeypatch.setattr(sys, "argv", ["failpoint_rounds", "--scene", PROMOTED, "--way", "hang"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "has only --way restart" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["async", "pool", "sync"])
@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene != TABLES])
def test_each_step_of_each_scene(broken_build, rng, scene, mode):
    rounds(broken_build, rng, scene, mode, tuple(point.name for point in points_of(scene, mode)))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_slave_that_confirms_bytes_before_it_appends_them_is_caught(broken_build, tmp_path, rng):
    build = tmp_path / "build"
    shutil.copytree(broken_build, build)
    source = build / "pyengine/services/replication/ha_client.py"
    text, appended = source.read_text(), "return self._stream.own_end if self._stream.is_equal"
    assert appended in text
    source.write_text(text.replace(appended, "return self._stream.position if self._stream.is_equal"))
    command = [sys.executable, "-P", "-m", "crash.failpoints", "--scene", PROMOTED, "--no-peer", "--json",
               "--seed", str(rng.randrange(1 << 32))]
    command += [word for point in points_of(PROMOTED, "async")[:12] for word in ("--point", point.name)]
    done = subprocess.run(command, env=environment(build, None) | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
                          timeout=1100)
    print(done.stdout[-2000:], done.stderr[-4000:])
    assert done.returncode == 1
    failures = " ".join(json.loads(done.stdout)["failures"])
    assert "had confirmed its log up to" in failures or "LOST" in failures or "have confirmed this log up to" in failures


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [point.name for point in points_of(TABLES, "async")])
def test_each_step_of_a_growing_queue_table(broken_build, rng, name):
    rounds(broken_build, rng, TABLES, "async", (name,))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nth", [2, 7])
def test_later_passings_of_the_steps_of_puts(broken_build, rng, nth):
    names = tuple(point.name for point in points_of(PUTS, "async") if not point.after)
    rounds(broken_build, rng, PUTS, "async", names, "--nth", str(nth), "--way", "restart")
