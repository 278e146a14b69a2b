"""`pyengine check`: exit codes and grades; the store is never changed."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import replace

import pytest

import pyengine
from broker_lock import held_by_a_broker
from damage import flip
from fix_cli import changes, picture, run, spawn
from pyengine.ipc.store_lock import StoreLock
from pyengine.storage.checkpoint import read_checkpoint, write_checkpoint
from waiting import eventually


@pytest.mark.parametrize("recipe", ["basic", "roll", "tx", "multi-index"])
def test_a_whole_store_has_no_findings(golden, recipe):
    store = golden(recipe)
    before = picture(store.root)
    ran = run("check", store.root, "--json")
    assert (ran.code, ran.document["findings"]) == (0, [])
    assert ran.document["messages"] == sum(1 for record in store.verify["records"] if record.get("topic"))
    assert "Nothing is wrong" in run("check", store.root).stdout
    assert changes(before, picture(store.root)) == []


def test_a_damaged_body_is_an_error_and_the_exit_code_3(golden):
    store = golden("basic")
    record = store.verify["records"][30]
    segment = store.root / "commitlog" / ("0" * 20)
    flip(segment, record["phy"] + 95)
    before = picture(store.root)
    ran = run("check", store.root, "--json")
    assert ran.code == 3
    assert any(one["severity"] == "error" and one["offset"] == record["phy"] for one in ran.document["findings"])
    human = run("check", store.root)
    assert human.code == 3 and "error" in human.stdout and f"{record['phy']:,}" in human.stdout
    assert changes(before, picture(store.root)) == []


def test_a_segment_of_wrong_length_is_a_finding_wherever_the_store_is_named_from(golden, monkeypatch):
    store = golden("abnormal-shortfile")
    ran = run("check", store.root, "--json")
    assert ran.code == 3 and "refuse the store as it is" in ran.document["findings"][0]["text"]
    assert ran.document["findings"][0]["file"].startswith("commitlog/")
    monkeypatch.chdir(store.root)
    assert run("check", ".", "--json").document["findings"] == ran.document["findings"]


def acks(store) -> list[dict]:
    """Acknowledgements of every message of the golden store `basic`, as a producer would have kept them."""
    found = []
    for queue in store.verify["facts"]["queues"]:
        ran = run("get", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--offset", 0, "--json")
        for message in ran.document["messages"]:
            if "body" in message:
                found.append({name: message[name] for name in ("topic", "queue_id", "queue_offset", "physical_offset")}
                             | {"body_sha256": hashlib.sha256(message["body"].encode()).hexdigest()})
    return found


@pytest.mark.parametrize("spoil", [None, "body_sha256", "queue_offset", "physical_offset"])
def test_acknowledged_messages_are_looked_for(golden, tmp_path, spoil):
    store = golden("bigmsg")
    lines = acks(store)
    assert lines
    if spoil:
        lines[-1][spoil] = "0" * 64 if spoil == "body_sha256" else lines[-1][spoil] + 7
    path = tmp_path / "acks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run("check", store.root, "--acked", path, "--json")
    assert (ran.document["acked"], ran.document["acked_missing"]) == (len(lines), 1 if spoil else 0)
    assert ran.code == (3 if spoil else 0)


@pytest.mark.parametrize("spoil", [None, "body_sha256", "queue_offset"])
def test_an_acknowledgement_without_a_physical_offset_is_looked_for_by_its_queue(golden, tmp_path, spoil):
    store = golden("bigmsg")
    lines = [line | {"physical_offset": None} for line in acks(store)]
    if spoil:
        lines[-1][spoil] = "0" * 64 if spoil == "body_sha256" else lines[-1][spoil] + 7
    path = tmp_path / "acks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run("check", store.root, "--acked", path, "--json")
    assert (ran.document["acked"], ran.document["acked_missing"]) == (len(lines), 1 if spoil else 0)
    assert ran.code == (3 if spoil else 0)


@pytest.mark.parametrize("text", ["{", '{"topic": "t"}', "[1]"])
def test_a_wrong_list_of_acknowledgements_is_a_usage_error(golden, tmp_path, text):
    path = tmp_path / "acks.jsonl"
    path.write_text(text + "\n")
    ran = run("check", golden("basic").root, "--acked", path)
    assert ran.code == 2 and "line 1" in ran.stderr
    assert run("check", golden("basic").root, "--acked", tmp_path / "gone").code == 2


INDEXED = {"max_index_num": 20_000, "max_hash_slot_num": 50, "mapped_file_size_commit_log_bytes": 1 << 22}


def test_the_newest_index_file_is_checked_beside_an_engine(tmp_path):
    with pyengine.Engine(tmp_path / "store", **INDEXED) as engine, engine.connect() as producer:
        for number in range(100):
            producer.put("T", b"x", keys=f"k{number}")
        eventually(lambda: run("check", engine.path, "--json").document["index_keys"] == 100, "all keys are in the index")
        [file] = (engine.path / "index").iterdir()
        with open(file, "r+b") as index:
            index.seek(40)
            index.write(bytes(4 * 50))
        ran = run("check", engine.path, "--json")
        assert ran.code == 3 and [(one["file"], one["kind"]) for one in ran.document["findings"]] == [(f"index/{file.name}", "index chain")]


def test_keys_that_are_put_during_a_check_are_no_findings(request, tmp_path):
    checks = 30 if request.config.run_ci else 8
    with pyengine.Engine(tmp_path / "store", **INDEXED) as engine:
        over, put = threading.Event(), threading.Event()

        def fill():
            with engine.connect() as producer:
                while not over.is_set():
                    producer.put_many("T", [b"x"] * 20, keys=["one", "two", "three"])
                    put.set()

        filling = threading.Thread(target=fill)
        filling.start()
        try:
            assert put.wait(60)
            found = [run("check", engine.path, "--json").document]
            while len(found) < checks or found[-1]["index_keys"] == found[0]["index_keys"]:
                found.append(run("check", engine.path, "--json").document)
        finally:
            over.set()
            filling.join()
        assert next((one["findings"] for one in found if one["findings"]), []) == []


def test_beside_a_broker_what_its_checkpoint_calls_flushed_is_checked(golden):
    store = golden("roll")
    whole = run("check", store.root, "--json").document
    (store.root / "abort").touch()
    with held_by_a_broker(store.root) as pid:
        before = picture(store.root)
        ran = run("check", store.root, "--json")
        assert ran.code == 0 and (ran.document["messages"], ran.document["queue_entries"]) == (whole["messages"], whole["queue_entries"])
        assert f"pid {pid}" in ran.document["findings"][0]["text"] and len(ran.document["findings"]) == 1
        assert run("check", store.root).code == 0
        assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize("name", ["physic", "logics"])
def test_beside_a_broker_nothing_younger_than_its_checkpoint_is_judged(golden, name):
    store = golden("roll")
    records = [one for one in store.verify["records"] if one.get("topic")]
    last = records[len(records) // 2]
    until_ms = last["storeTs"]
    later = next(one for one in records if one["storeTs"] > until_ms)
    checkpoint = read_checkpoint(store.root)
    write_checkpoint(store.root, replace(checkpoint, **{f"{name}_msg_timestamp_ms": until_ms}))
    segment = store.root / "commitlog" / f"{later['phy'] - later['phy'] % 16384:020d}"
    flip(segment, later["phy"] % 16384 + 4)  # half written, for all that is known
    with held_by_a_broker(store.root):
        ran = run("check", store.root, "--json").document
        assert ran["end_offset"] == later["phy"] and ran["exit_code"] == 0, ran
        before = records[len(records) // 2 - 9]["phy"]
        flip(store.root / "commitlog" / f"{before - before % 16384:020d}", before % 16384 + 4)
        assert run("check", store.root).code == 3, "damage below it is damage"


def test_a_store_that_its_owner_recovers_is_busy(golden):
    store = golden("basic")
    with StoreLock(store.root) as lock:
        lock.own()
        ran = spawn("check", store.root)
        assert ran.code == 5 and "its owner" in ran.stderr


def test_check_beside_a_running_engine_covers_only_dispatched_messages(make_parts):
    """No reputter runs: nothing is dispatched, so nothing is missing."""
    parts = make_parts()
    with parts.producer() as producer:
        assert producer.put("T", b"x").ok
    ran = run("check", parts.owner.root, "--json")
    assert (ran.code, ran.document["messages"], ran.document["end_offset"]) == (0, 0, 0), ran
