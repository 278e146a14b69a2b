"""The page of proofs says what the lines say, and only that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crash import proof as proofs

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
    summary = {"kind": "writer", "mode": "pool", "seed": 5, "rounds": 2, "kills": 2, "lost": 0, "seconds": 1.5, "failures": []}
    done = subprocess.run([sys.executable, "-P", "-m", "crash.proof", "add", str(records), "kills", "scripts/crash_writer.sh"],
                          input=f"seed=5\n{json.dumps(summary)}\n", text=True, capture_output=True,
                          env={"PYTHONPATH": str(CHECKOUT / "scripts"), "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    (line,) = proofs.read(records)
    assert (line["what"], line["held"], line["command"]) == ("writer, pool", True, "scripts/crash_writer.sh --seed 5")
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
