"""`pyengine prove`: it kills for real, finds what is lost, and leaves nothing behind when all held."""

from __future__ import annotations

import signal

import pytest

from fix_cli import run
from pyengine.cli import ingest, prove
from pyengine.cli.ingest import AckedList
from pyengine.cli.prove import DURABLE_SYNC_US_MIN, EVERYTHING, DiskMeasure, ModeRun, measure_disk
from pyengine.errors import DiskError
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.storage.file_system import file_system_of

SECONDS = 0.1  # one round of each mode


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_every_mode_is_tortured_and_nothing_stays(tmp_path):
    done = run("prove", tmp_path, "--minutes", SECONDS / 60, "--json")
    document = done.document
    assert done.code == 0 and document["held"] and document["stores"] is None, document
    assert [proof["mode"] for proof in document["modes"]] == ["async", "pool", "sync"]
    for proof in document["modes"]:
        assert proof["stalls"]["threshold_ms"] == 5 and proof["stalls"]["waits"] >= 0
        assert proof["kills_total"] >= 1 and proof["checked"] == proof["acknowledged"] > 0 and proof["lost"] == 0
    assert document["disk"]["syncs"] > 0 and document["disk"]["verdict"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("again", [False, True], ids=["once", "also-while-it-cleans-up"])
def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch, again):
    memory = []
    kill_remaining = ModeRun.kill_remaining

    def interrupt(torture):
        memory.append(find_folder(torture.store).path)
        signal.raise_signal(signal.SIGINT)

    def interrupt_again(torture):
        if again:
            signal.raise_signal(signal.SIGINT)
        kill_remaining(torture)

    monkeypatch.setattr(ModeRun, "strike", interrupt)
    monkeypatch.setattr(ModeRun, "kill_remaining", interrupt_again)
    assert run("prove", tmp_path, "--minutes", SECONDS / 60, "--mode", "async").code == 130
    assert list(tmp_path.iterdir()) == [] and not memory[0].exists()


@pytest.mark.timeout(300)
def test_a_run_that_ends_with_an_error_leaves_its_store_and_no_process(tmp_path, monkeypatch):
    def fail(acked):
        raise DiskError("the disk is full")

    monkeypatch.setattr(AckedList, "write", fail)
    monkeypatch.setattr(ingest, "ROWS_AT_ONCE", 1)  # it fails in a producer's thread
    monkeypatch.setattr(prove, "HANG_S", 3600.0)
    done = run("prove", tmp_path, "--minutes", SECONDS / 60, "--mode", "async")
    (kept,) = tmp_path.iterdir()
    assert done.code not in (0, 130) and "HANG" not in done.stdout + done.stderr and f"the stores are kept in {kept}" in done.stderr
    assert (kept / "async" / "commitlog").is_dir() and not living_kinds(kept / "async")


@pytest.mark.timeout(300)
def test_a_lost_message_is_found_named_and_the_store_kept(tmp_path, monkeypatch):
    note = ModeRun._note

    def also_note_what_was_never_put(torture, result, body):
        note(torture, result, body)
        if result.ok and torture.proof.acknowledged == 1:
            note(torture, result, body + b"another")

    monkeypatch.setattr(ModeRun, "_note", also_note_what_was_never_put)
    done = run("prove", tmp_path, "--minutes", SECONDS / 60, "--mode", "async", "--seed", 7)
    assert done.code == 1 and "did NOT hold" in done.stdout and "(seed 7)" in done.stdout
    assert "acknowledged message" in done.stdout
    (kept,) = tmp_path.iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["async", "async.acked"]


@pytest.mark.timeout(300)
def test_everything_is_killed_at_once_and_recovered(tmp_path):
    torture = ModeRun(tmp_path, "pool", 1, lambda proof: None, {})
    torture.rng.choice = lambda victims: EVERYTHING
    proof = torture.run(SECONDS)
    assert proof.failures == [] and proof.kills == {"everything": proof.recoveries} and proof.recoveries >= 1
    assert proof.recovery_s_max > 0 and proof.checked == proof.acknowledged > 0


@pytest.mark.timeout(300)
def test_a_proof_counts_the_waits_of_puts_by_cause(tmp_path):
    for attempt in range(10):  # a producer that has no processor while the writer is dead does not wait for it
        (folder := tmp_path / str(attempt)).mkdir()
        torture = ModeRun(folder, "async", 1, lambda proof: None, {})
        torture.rng.choice = lambda victims: "writer"
        proof = torture.run(SECONDS)
        assert proof.failures == []
        if "restart" in [cause["cause"] for cause in proof.stalls["causes"] if cause["waits"]]:
            break
    else:
        pytest.fail(f"no put waited for a restart: {proof.stalls}")
    assert proof.stalls["longest_ms"] >= 5


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    done = run("prove", tmp_path / "missing")
    assert done.code == 2 and "is not a directory" in done.stderr


def test_the_disk_is_measured_and_judged(tmp_path):
    found = measure_disk(tmp_path, 0.05)
    assert found.syncs >= 1 and 0 < found.sync_p50_us <= found.sync_p99_us and found.file_system == file_system_of(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert file_system_of("/proc/self") == "proc"
    for kind, p50_us, says in (("tmpfs", 1.0, "is memory"), ("ext4", DURABLE_SYNC_US_MIN / 2, "may not wait"), ("ext4", 90.0, "waits for")):
        assert says in DiskMeasure(kind, 1, 1.0, p50_us, p50_us).verdict
