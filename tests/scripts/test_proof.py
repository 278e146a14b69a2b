"""The page of proofs says what the lines say, and only that."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from crash import proof as proofs
from crash.report import finish
from crash.rounds import CrashRun, processes_of
from crash.watch import wait_for

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def records(tmp_path):
    return tmp_path / "proof.jsonl"


def test_a_run_becomes_a_row_with_its_command_and_a_rig_its_sum(records):
    for states in (10, 32_000):
        proofs.note(records, "power cut", "sync", {"states": states, "bad": 0}, held=True, seed="7", command="again | so", seconds=9)
    page = proofs.page(proofs.read(records))
    assert "| [power cut](#power-cut) | 2 | 2 | 32,010 states, 0 bad | 0.0 |" in page
    assert "| sync | 32,000 states, 0 bad | yes | " in page and "`again \\| so`" in page
    assert page.startswith("# What was proved") and "\n## Power cut\n" in page


def test_a_rig_with_a_comma_is_linked_as_its_heading_is(records):
    proofs.note(records, "failing disk, engine", "writer", {"bad": 0}, held=True, seed="7", command="c", seconds=1)
    assert "[failing disk, engine](#failing-disk-engine)" in proofs.page(proofs.read(records))


def test_what_did_not_hold_is_told(records):
    proofs.note(records, "kills", "writer, sync", {"rounds": 3, "lost": 1}, held=True, seed="7", command="c", seconds=1)
    assert "| writer, sync | 3 rounds, 1 lost | **no** |" in proofs.page(proofs.read(records))


def test_a_crash_script_speaks_for_itself(records):
    summary = {"kind": "writer", "mode": "pool", "seed": 5, "rounds": 2, "kills": 2, "lost": 0, "seconds": 1.5, "failures": [],
               "peer": "opens it"}
    done = subprocess.run([sys.executable, "-P", "-m", "crash.proof", "add", str(records), "kills", "scripts/crash_writer.sh"],
                          input=f"seed=5\n{json.dumps(summary)}\n", text=True, capture_output=True,
                          env={"PYTHONPATH": str(CHECKOUT / "scripts"), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    (line,) = proofs.read(records)
    assert (line["what"], line["held"], line["command"]) == ("writer, pool, RocketMQ opens it", True, "scripts/crash_writer.sh --seed 5")
    assert line["counts"] == {"rounds": 2, "kills": 2, "lost": 0, "bad": 0}


@pytest.mark.parametrize("text", ["no json", "{}", '{"rig": 5}'])
def test_a_line_that_no_tool_wrote_is_refused(records, text):
    records.write_text(text + "\n")
    with pytest.raises(ValueError, match="line 1"):
        proofs.read(records)


def test_the_page_is_made_of_its_records():
    """Written by hand it would differ."""
    records = CHECKOUT / "docs" / "proof.jsonl"
    assert (CHECKOUT / "docs" / "proof.md").read_text() == proofs.page(proofs.read(records))


def test_a_test_leaves_a_line_only_where_it_is_asked_to(proof, records, monkeypatch):
    monkeypatch.delenv("PYENGINE_PROOF", raising=False)
    proof("rig", "what", states=1)
    assert not records.exists()
    monkeypatch.setenv("PYENGINE_PROOF", str(records))
    proof("rig", "what", states=1)
    (line,) = proofs.read(records)
    assert line["counts"] == {"states": 1} and "test_a_test_leaves_a_line" in line["command"]


def add(records, output, command="scripts/x.sh"):
    proofs.add_summaries(records, "kills", command, output)
    return proofs.read(records)


def test_a_run_that_ended_without_a_summary_has_not_held(records):
    (line,) = add(records, "seed=5 kind=writer\n")
    assert not line["held"] and line["command"] == "scripts/x.sh"
    assert "| ended without a summary |  | **no** |" in proofs.page([line])


def test_what_was_struck_is_counted_and_what_was_given_is_not_summed(records):
    summary = {"kind": "failpoints", "mode": "sync", "seed": 5, "rounds": 2, "lost": 0, "seconds": 1, "failures": [], "scene": "puts",
               "struck": {"a": 2, "b": 3}, "unreached": ["c"], "left_out": 4, "depth": 3}
    (line,) = add(records, json.dumps(summary))
    assert line["what"] == "failpoints, sync, puts, depth 3, left out 4"
    assert line["counts"] == {"rounds": 2, "lost": 0, "struck": 5, "unreached": 1, "bad": 0}
    assert "depth" not in proofs.page([line | {"what": "older", "counts": {"depth": 3}}]).split("## Kills")[0]


def test_whatever_ends_a_run_becomes_a_failure_and_a_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Stumbling(CrashRun):
        left = None

        def start_engine(self):
            raise KeyError("what nobody thought of")

        def leave(self, *, held):
            self.left = held

    made = []
    arguments = argparse.Namespace(seed=5, json=True, peer=False)
    code = finish(arguments, lambda store, scratch: made.append(Stumbling(store, scratch, "writer", "async", 5)) or made[0],
                  lambda run: run.run(1))
    summary = json.loads(capsys.readouterr().out)
    assert code == 1 and made[0].left is False and "KeyError: 'what nobody thought of'" in summary["failures"][0]


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
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").touch()
    (tmp_path / "workers" / "supervisor.py").write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, "-m", "workers.supervisor", str(store), "--report-fd", "5"], cwd=tmp_path)
    run = CrashRun(store, tmp_path, "writer", "async", 5)
    wait_for("its command line", lambda: process.pid in processes_of(store, b"workers."))
    run.end_everything()
    assert process.wait(60) == -9 and run.summary.failures == []
