"""The page of proofs says what the lines say, and only that."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import fix_proof
from crash import proof as proofs
from crash.report import finish
from crash.rounds import CrashRun
from faults.engine_power_cut import PowerCutSummary
from pyengine.cli.torture import processes_of, wait_for

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def records(tmp_path):
    return tmp_path / "proof.jsonl"


def tell(records, rig="power cut", what="sync", command="c", **counts):
    proofs.add(records, proofs.Trial(rig, what, counts, held=True, seed="7", command=command, seconds=9))


def test_a_class_is_one_row_with_the_sum_of_the_last_runs_of_all_that_is_in_it(records):
    tell(records, what="sync", states=10, bad=0)
    tell(records, what="sync", states=32_000, bad=0)
    tell(records, what="async", states=1, bad=0)
    page = proofs.page(proofs.read(records), since=lambda commit: 3)
    (row,) = [line for line in page.splitlines() if line.startswith("| power cut")]
    assert row.startswith("| power cut | yes, 2 of 2 | 32,001 states, 0 bad | 0.0 | ") and " | 3 | " in row
    assert row.endswith("| powercut |") and page.startswith("# What was proved")


def test_a_failed_run_is_listed_until_the_same_run_holds(records):
    tell(records, rig="kills", what="flusher, sync", rounds=3, lost=0)
    tell(records, rig="kills", what="writer, sync", rounds=3, lost=1, command="again so")
    page = proofs.page(proofs.read(records))
    assert "| kills | **no**, 1 of 2 | 6 rounds, 1 lost |" in page
    assert "- kills: writer, sync: 3 rounds, 1 lost, on " in page and "again: `again so`" in page
    tell(records, rig="kills", what="writer, sync", rounds=3, lost=0)
    page = proofs.page(proofs.read(records))
    assert "| kills | yes, 2 of 2 | 6 rounds, 0 lost |" in page and "did not hold" not in page


def test_a_row_is_as_old_as_its_oldest_run_and_unknown_is_older_than_all(records):
    ages = {"a": 2, "b": 9, "c+": None}
    for what, commit in enumerate("ab"):
        tell(records, what=str(what))
    trials = [replace(trial, commit=commit) for trial, commit in zip(proofs.read(records), ages, strict=False)]
    assert "| b | 9 |" in proofs.page(trials, since=ages.get)
    assert "| c+ | ? |" in proofs.page([*trials, replace(trials[0], commit="c+")], since=ages.get)


def test_only_commits_to_the_engine_count(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for path in ("csrc/a.c", "docs/a", "pyengine/a.py", "csrc/a.c"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        with open(tmp_path / path, "a") as file:
            file.write("x")
        git("add", ".")
        git("commit", "-qm", path)
    first = git("rev-list", "--max-parents=0", "HEAD")
    assert proofs.engine_commits_since(f"{first[:10]}+", tmp_path) == 2
    assert proofs.engine_commits_since("unknown", tmp_path) is None


def test_a_run_replaces_the_rows_of_its_classes_and_what_did_not_hold_in_them(records, tmp_path):
    target = tmp_path / "page.md"
    tell(records, rig="kills", what="writer", rounds=3, lost=1)
    tell(records, rig="kills, twice", what="writer", rounds=4, lost=2)
    assert proofs.main(["page", str(records), str(target)]) == 0
    assert "| kills | **no**, 0 of 1 | 3 rounds, 1 lost |" in target.read_text() and target.read_text().count("\n- kills") == 2
    records.write_text("")
    tell(records, rig="kills", what="flusher", rounds=5, lost=0)
    for _ in range(2):
        assert proofs.main(["page", str(records), str(target)]) == 0
        page = target.read_text()
        assert "| kills | yes, 1 of 1 | 5 rounds, 0 lost |" in page and "| kills, twice | **no**, 0 of 1 | 4 rounds, 2 lost |" in page
        assert page.count("\n- kills") == 1 and "- kills, twice: writer: 4 rounds, 2 lost, on " in page


def test_without_a_run_only_the_age_is_counted_anew(records):
    tell(records, states=1)
    before = proofs.page(proofs.read(records), since=lambda commit: 3)
    assert proofs.page([], before, since=lambda commit: 3) == before
    assert proofs.page([], before, since=lambda commit: 4) == before.replace(" | 3 | ", " | 4 | ")


def test_a_page_that_something_else_has_written_is_refused():
    with pytest.raises(ValueError, match="no table"):
        proofs.page([], "# Something else\n")
    with pytest.raises(ValueError, match="a row of 2 cells"):
        proofs.page([], "\n".join([*proofs.HEADER, "| kills | yes |"]))


def test_each_class_names_the_part_that_tries_it():
    script = (CHECKOUT / "scripts" / "prove_all.sh").read_text()
    assert all(f"{part})" in script for part in proofs.PARTS.values())
    assert proofs.read_page((CHECKOUT / "docs" / "proof.md").read_text()).keys() <= set(proofs.PARTS)


def test_a_share_of_a_long_form_is_chosen_at_random_in_order_and_is_never_empty(share, monkeypatch):
    monkeypatch.setattr(fix_proof, "SHARE", 1)
    assert share(range(30)) == [*range(30)]
    monkeypatch.setattr(fix_proof, "SHARE", 12)
    assert share(range(30)) == sorted({*share(range(30))}) and len(share(range(30))) == 3
    assert (share([["writer", "open"]]), share([])) == ([["writer", "open"]], [])


def test_a_crash_script_speaks_for_itself(records):
    summary = {"kind": "writer", "mode": "pool", "seed": 5, "rounds": 2, "kills": 2, "lost": 0, "seconds": 1.5, "failures": [],
               "peer": "opens it"}
    done = subprocess.run([sys.executable, "-P", "-m", "crash.proof", "add", str(records), "kills", "scripts/crash.sh writer"],
                          input=f"seed=5\n{json.dumps(summary)}\n", text=True, capture_output=True,
                          env={"PYTHONPATH": str(CHECKOUT / "scripts"), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    (line,) = proofs.read(records)
    assert (line.what, line.held, line.command) == ("writer, pool", True, "scripts/crash.sh writer --seed 5")
    assert line.counts == {"rounds": 2, "kills": 2, "lost": 0, "bad": 0, "opened by RocketMQ": 1}


@pytest.mark.parametrize("text", ["no json", "{}", '{"rig": 5}'])
def test_a_line_that_no_tool_wrote_is_refused(records, text):
    records.write_text(text + "\n")
    with pytest.raises(ValueError, match="line 1"):
        proofs.read(records)


def test_the_page_of_the_tree_is_the_tools_own():
    """How old a row is depends on the commit on which the page was made."""
    age = re.compile(r"\| [0-9a-f]+\+? \| (\d+|\?) \|")
    page = (CHECKOUT / "docs" / "proof.md").read_text()
    assert age.sub("", page) == age.sub("", proofs.page([], page)) and len(proofs.read_page(page)) > 5


def test_a_test_leaves_a_line_only_where_it_is_asked_to(proof, records, monkeypatch):
    monkeypatch.delenv("PYENGINE_PROOF", raising=False)
    proof("rig", "what", states=1)
    assert not records.exists()
    monkeypatch.setenv("PYENGINE_PROOF", str(records))
    proof("rig", "what", states=1)
    (line,) = proofs.read(records)
    assert line.counts == {"states": 1} and "test_a_test_leaves_a_line" in line.command


def add(records, output, command="scripts/x.sh"):
    proofs.add_summaries(records, "kills", command, output)
    return proofs.read(records)


def test_a_run_that_ended_without_a_summary_has_not_held_until_its_command_gives_one(records):
    (line,) = add(records, "seed=5 kind=writer\n")
    assert not line.held and line.command == "scripts/x.sh"
    assert "- kills: ended without a summary: scripts/x.sh: nothing counted" in proofs.page([line])
    summary = {"kind": "writer", "mode": "sync", "seed": 5, "rounds": 2, "seconds": 1, "failures": []}
    (line,) = add(records, json.dumps(summary))
    assert line.held and line.what == "writer, sync"


def test_struck_and_left_out_failpoints_are_counted_and_not_part_of_the_runs_name(records):
    summary = {"kind": "failpoints", "mode": "sync", "seed": 5, "rounds": 2, "lost": 0, "seconds": 1, "failures": [], "scene": "puts",
               "struck": {"a": 2, "b": 3}, "unreached": ["c"], "left_out": 4, "depth": 3}
    (line,) = add(records, json.dumps(summary))
    assert line.what == "failpoints, sync, puts"
    assert line.counts == {"rounds": 2, "lost": 0, "struck": 5, "unreached": 1, "left_out": 4, "bad": 0}


def test_the_scene_of_a_power_cut_is_part_of_the_runs_name(records):
    for then in ("", "salvage"):
        *_, line = add(records, json.dumps(asdict(PowerCutSummary("power cut", "sync", 5, scene=then))))
    assert [line.what for line in proofs.read(records)] == ["power cut, sync", "power cut, sync, salvage"]


def test_each_part_of_a_scene_counts(records):
    """Another run of the same part takes its place."""
    summary = {"kind": "failpoints", "mode": "sync", "seed": 5, "rounds": 2, "seconds": 1, "failures": [], "scene": "puts"}
    for part in ("share 1/2", "share 2/2", "share 2/2"):
        *_, line = add(records, json.dumps(summary | {"part": part}))
        assert line.what == f"failpoints, sync, puts, {part}"
    assert "| kills | yes, 2 of 2 | 4 rounds," in proofs.page(add(records, json.dumps(summary | {"part": "share 1/2"})))


def test_an_unforeseen_exception_in_a_run_becomes_a_failure_in_its_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Stumbling(CrashRun):
        left = None

        def start_engine(self):
            raise KeyError("what was not foreseen")

        def leave(self, *, held):
            self.left = held

    made = []
    arguments = argparse.Namespace(seed=5, json=True, peer=False)
    code = finish(arguments, lambda store, scratch: made.append(Stumbling(store, scratch, "writer", "async", 5)) or made[0],
                  lambda run: run.run(1))
    summary = json.loads(capsys.readouterr().out)
    assert code == 1 and made[0].left is False and "KeyError: 'what was not foreseen'" in summary["failures"][0]


def test_a_run_that_cannot_be_made_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(store, scratch):
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        finish(argparse.Namespace(seed=5, json=True, peer=False), make, lambda run: run.run(1))
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_is_only_starting_is_found_and_ended(tmp_path):
    """It has no control block yet, and is told by what it was started as."""
    store = tmp_path / "store"
    store.mkdir()
    package = tmp_path / "pyengine" / "workers"
    package.mkdir(parents=True)
    (package / "supervisor.py").write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-m", "pyengine.workers.supervisor", str(store), "--report-fd", "5"], cwd=tmp_path)
    run = CrashRun(store, tmp_path, "writer", "async", 5)
    wait_for("its command line", lambda: process.pid in processes_of(store, b"pyengine.workers."))
    run.clean_up()
    assert process.wait(60) == -9 and run.summary.failures == []
