"""`pyengine recover`: its outcome, its exit codes, and stores that it refuses or leaves unchanged."""

from __future__ import annotations

import re
import shutil

import pytest

from broker_lock import held_by_a_broker
from damage import flip
from fix_cli import changes, picture, run, spawn, without_override
from fix_engine import put_numbers
from fix_golden import compare_inspect
from fix_owner import eventually
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.engine_id import read_epoch


def settings_of(store) -> list[str]:
    return [word for key, value in store.manifest["config"].items() for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize(("recipe", "code"), [("roll", 0), ("abnormal", 0), ("abnormal-cqgone", 0), ("abnormal-garbled", 4)])
def test_recover_then_inspect_is_what_the_real_store_reads(golden, recipe, code):
    store = golden(recipe)
    ran = run("recover", store.root, "--json", *settings_of(store))
    assert ran.code == code, ran
    document = ran.document
    assert document["state"] == "recovered" and document["end_offset"] == store.verify["facts"]["maxPhy"]
    assert document["path"] == store.verify["path"]
    assert (document["quarantined"] != []) == (code == 4)
    inspected = run("inspect", store.root, "--json", *settings_of(store)).document
    assert compare_inspect(inspected, store.verify, ignore=() if recipe == "roll" else ("byTime",)) == []
    assert run("status", store.root, "--json").document["unclean"] is False


def test_the_text_output_says_what_recover_did(golden):
    store = golden("abnormal-garbled")
    ran = run("recover", store.root)
    assert ran.code == 4 and "Recovered by the abnormal path" in ran.stdout
    assert re.search(r"^cut bytes +[0-9,]+$", ran.stdout, re.MULTILINE) and str(store.root / "quarantine") in ran.stdout


def test_a_whole_store_is_left_as_it_is(golden):
    store = golden("basic")
    before = picture(store.root)
    ran = run("recover", store.root, "--json")
    assert ran.code == 0 and ran.document["changed"] is False
    assert changes(before, picture(store.root)) == []


def test_damage_below_our_watermark_is_refused_until_the_loss_is_accepted(golden):
    store = golden("basic")
    end = store.verify["facts"]["maxPhy"]
    WATERMARK.write(store.root, DurableWatermark("6f1c7b0e-0000-4000-8000-000000000001", 1, end))
    damaged = store.verify["records"][50]
    segment = store.root / "commitlog" / ("0" * 20)
    flip(segment, damaged["phy"] + 4)
    before = picture(store.root)
    ran = run("recover", store.root, "--json")
    assert ran.code == 3 and ran.document["state"] == "degraded" and ran.document["damage_offset"] == damaged["phy"]
    assert "--accept-loss" in ran.stderr
    assert changes(before, picture(store.root)) == []
    ran = run("recover", store.root, "--accept-loss", "--json")
    assert ran.code == 4 and ran.document["end_offset"] == damaged["phy"] and ran.document["quarantined"]


def test_a_segment_of_wrong_length_is_refused(golden):
    store = golden("abnormal-shortfile")
    before = picture(store.root)
    ran = run("recover", store.root, *settings_of(store))
    assert ran.code == 3 and ran.stdout == "" and "00000000000000000000" in ran.stderr
    assert changes(before, picture(store.root)) == []


def test_a_store_that_a_broker_has_open_is_busy(golden):
    store = golden("abnormal")
    before = picture(store.root)
    with held_by_a_broker(store.root) as pid:
        ran = run("recover", store.root, "--json")
        assert ran.code == 5 and ran.document["exit_code"] == 5 and f"pid {pid}" in ran.stderr
    assert changes(before, picture(store.root)) == []


def test_a_store_with_a_living_supervisor_or_worker_is_busy(golden):
    store = golden("abnormal")
    before = picture(store.root)
    with StoreLock(store.root) as supervisor:
        supervisor.own()
        supervisor.share()
        ran = run("recover", store.root)
        assert ran.code == 5 and "is in use by another engine" in ran.stderr
    with StoreLock(store.root) as worker:
        worker.share()
        worker.take_kind(native.WRITER)
        ran = run("recover", store.root)
        assert ran.code == 5 and "living workers" in ran.stderr
    assert changes(before, picture(store.root)) == []


def test_without_permission_nothing_happens(golden):
    store = golden("abnormal-torn")
    paths = [store.root, *store.root.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & 0o555)
    before = picture(store.root)
    try:
        ran = spawn("recover", store.root, preexec_fn=without_override)
        assert changes(before, picture(store.root)) == []
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | 0o200)
    assert ran.code == 1 and ran.stdout == "" and "ermission denied" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("some_committed", [True, False])
def test_pool_bytes_are_drained_after_all_processes_were_killed(make_parts, some_committed):
    """The committer is killed first, puts fill the pool, then all processes are killed: every acknowledged body is recovered."""
    parts = make_parts(mode=native.MODE_POOL, pool_buffers=3)
    owner = parts.owner
    bodies = [b"%03d in the pool" % number for number in range(50)]
    with parts.producer() as producer:
        if not some_committed:
            parts.kill(native.COMMITTER)
        assert producer.put("T", b"first").ok
        if some_committed:
            eventually(lambda: native.load_position(parts.control.committed) > 0, "the first message is committed")
            parts.kill(native.COMMITTER)
        for body in bodies:
            assert producer.put("T", body).ok
        wrote, committed = (native.load_position(getattr(parts.control, name)) for name in ("wrote", "committed"))
        assert committed < wrote, "the pool must hold bytes that are not committed"
        parts.kill(native.WRITER)
        parts.kill(native.FLUSHER)
        parts.kill(native.ALLOCATOR)
    epoch = read_epoch(owner.root)
    owner.lock.close()
    assert run("get", owner.root, "--topic", "T", "--queue-id", 0, "--offset", 0).code == 0
    before = picture(owner.root)
    dry = run("recover", owner.root, "--dry-run", "--json").document
    assert changes(before, picture(owner.root)) == [] and owner.control.state.retired == 0
    ran = run("recover", owner.root, "--json")
    assert ran.code == 0, ran
    for told in ("shared_state", "drained_bytes", "end_offset", "cut_bytes", "quarantined"):
        assert dry[told] == ran.document[told], told
    assert ran.document["shared_state"] == "used"
    assert ran.document["drained_bytes"] == wrote - committed and ran.document["end_offset"] == wrote
    messages = run("get", owner.root, "--topic", "T", "--queue-id", 0, "--offset", 1, "--max-messages", 32, "--json").document
    assert [message["body"].encode() for message in messages["messages"]] == bodies[: len(messages["messages"])]
    assert messages["max_offset"] == 51 and len(messages["messages"]) == 32
    assert owner.folder.names() == [] and read_epoch(owner.root) == epoch + 1
    again = run("recover", owner.root, "--json").document
    assert (again["shared_state"], again["drained_bytes"], again["end_offset"]) == ("none", 0, wrote)


@pytest.mark.parametrize("what", ["epoch", "copy", "lock"])
def test_shared_memory_of_another_epoch_or_copy_is_discarded(make_parts, what):
    """Undrained bytes of another epoch, or from before another program opened the store, do not come back."""
    parts = make_parts(mode=native.MODE_POOL, pool_buffers=3)
    owner = parts.owner
    with parts.producer() as producer:
        parts.kill(native.COMMITTER)
        assert producer.put("T", b"only in the pool").ok
        for kind in (native.WRITER, native.FLUSHER, native.ALLOCATOR):
            parts.kill(kind)
    owner.lock.close()
    if what == "epoch":
        (owner.root / "config" / "epoch").write_text("99\n")
    elif what == "lock":
        owner.control.identity.lock_modified_ns = 1
    else:
        owner.control.identity.engine_id_inode += 1
    document = run("recover", owner.root, "--json").document
    assert document["shared_state"].startswith("discarded: ") and document["drained_bytes"] == 0
    assert document["end_offset"] == 0 and owner.folder.names() == []


@pytest.mark.parametrize("number", [1, -2])
def test_a_segment_that_is_missing_from_a_brokers_log_is_refused_with_a_plan(golden, tmp_path, number):
    store = golden("roll")
    segments = sorted((store.root / "commitlog").iterdir())
    gone = segments[number]
    gone.rename(tmp_path / gone.name)
    before = picture(store.root)
    for command in (("start",), ("recover",), ("rebuild", "--queues")):
        ran = run(command[0], store.root, *command[1:])
        assert ran.code == 3, (command, ran)
        assert "16,384 bytes of the log are missing" in ran.stderr and f"ends at {int(gone.name)}" in ran.stderr
        assert "pyengine salvage" in ran.stderr and "--accept-loss" in ran.stderr
    assert changes(before, picture(store.root)) == []
    assert run("salvage", store.root, tmp_path / "new", "--json").document["missing_segments"] == [int(gone.name)]
    assert run("check", tmp_path / "new").code == 0
    (tmp_path / gone.name).rename(gone)  # the plan's first way
    assert run("recover", store.root).code == 0
    gone.rename(tmp_path / gone.name)
    accepted = run("recover", store.root, "--accept-loss", "--json")  # and its last
    assert accepted.code == 4 and int(gone.name) - 16384 < accepted.document["end_offset"] <= int(gone.name)
    assert accepted.document["kept_bytes"] == accepted.document["end_offset"] - int(segments[0].name)
    assert len(accepted.document["quarantined"]) == len([one for one in segments if one > gone])
    assert run("check", store.root).code == 0 and run("recover", store.root).code == 0


def test_a_dry_run_says_what_the_run_then_does_and_changes_nothing(golden):
    store = golden("abnormal-garbled")
    before = picture(store.root)
    dry = run("recover", store.root, "--dry-run")
    assert dry.code == 4 and "Nothing was changed" in dry.stdout
    told = run("recover", store.root, "--dry-run", "--json").document
    assert changes(before, picture(store.root)) == []
    done = run("recover", store.root, "--json").document
    assert told["is_dry_run"] and not done["is_dry_run"]
    for name in ("end_offset", "cut_bytes", "kept_bytes", "quarantined", "removed_files", "cut_queues", "deleted_index_files"):
        assert told[name] == done[name], name
    assert told["quarantined"][0]["path"] in dry.stdout
    again = run("recover", store.root, "--dry-run")
    assert again.code == 0 and "would change nothing" in again.stdout


def test_a_dry_run_of_a_copy_tells_of_the_copy(make_engine, tmp_path):
    engine = make_engine()
    engine.start()
    put_numbers(engine, 0, 5)
    busy = run("recover", engine.root, "--dry-run")
    assert busy.code == 5 and "stop it first" in busy.stderr
    engine.kill_all()
    copy = tmp_path / "copy"
    shutil.copytree(engine.root, copy)
    told = run("recover", copy, "--dry-run", "--json").document
    done = run("recover", copy, "--json").document
    assert told["is_copy"] and told["path"] == "abnormal"
    assert {**told, "queue_ends": 0, "seconds": 0, "sentence": 0, "is_dry_run": 0, "notes": 0, "gigabytes_per_second": 0} == {
        **done, "queue_ends": 0, "seconds": 0, "sentence": 0, "is_dry_run": 0, "notes": 0, "gigabytes_per_second": 0}
