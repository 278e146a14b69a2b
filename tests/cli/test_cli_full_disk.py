"""A full disk: puts are refused with a sentence, the store stays whole, and goes on once there is room."""

from __future__ import annotations

import pytest

from fix_cli import run
from waiting import eventually

SETTINGS = {"mapped_file_size_commit_log_bytes": 4 << 20, "mapped_file_size_consume_queue_bytes": 600_000}


@pytest.fixture
def small_disk(make_small_disk):
    return make_small_disk("48m")


@pytest.mark.root
def test_an_ingest_meets_a_full_disk(small_disk, make_engine, tmp_path):
    one = make_engine(**SETTINGS)
    one.root = small_disk / "store"
    one.start()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(24 << 20))
    path = tmp_path / "in.txt"
    path.write_bytes(b"%0100d\n" % 1 * 300_000)
    ran = run("ingest", one.root, "--topic", "t", path, "--json")
    assert ran.code == 1 and ran.document["exit_code"] == 1, ran
    assert f"{path}, line " in ran.stderr and ran.stderr.count("\n") == 1
    assert "not stored" in ran.stderr or "may or may not be stored" in ran.stderr
    document = run("status", one.root, "--json").document
    assert document["state"] in ("running", "read_only") and document["positions"]["wrote"] > 0
    assert run("check", one.root).code == 0
    ballast.unlink()
    eventually(lambda: run("put", one.root, "--topic", "t", "there is room again", "--timeout", 5).code == 0 or None,
               "the store resumes by itself", timeout_s=60)
    eventually(lambda: one.positions()["reput_from"] == one.positions()["wrote"], "queues resume by themselves", timeout_s=60)
    assert one.stop()
    checked = run("check", one.root, "--json")
    assert (checked.code, checked.document["findings"]) == (0, []), checked


@pytest.mark.root
def test_start_on_a_disk_without_room_makes_nothing(small_disk):
    ran = run("start", small_disk / "store", "--set", "mapped_file_size_commit_log_bytes=64MiB")
    assert ran.code == 1 and "2 segments of 64.0 MiB" in ran.stderr
    assert list(small_disk.iterdir()) == []
