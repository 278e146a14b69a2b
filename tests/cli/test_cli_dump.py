"""`pyengine dump`: what the files hold, against what RocketMQ said it wrote."""

from __future__ import annotations

import shutil

import pytest

from fix_cli import picture, run
from fix_owner import identity_of
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import SharedFolder, note_run
from pyengine.native import control as native
from pyengine.storage.engine_id import ensure_engine_id

HEADER_NAMES = {"file": "name", "beginTs": "begin_timestamp_ms", "endTs": "end_timestamp_ms",
                "beginPhy": "begin_physical_offset", "endPhy": "end_physical_offset", "slotCount": "hash_slot_count",
                "indexCount": "index_count"}


def test_dump_shows_the_checkpoint_that_rocketmq_wrote(golden):
    store = golden("multi-index")
    before = picture(store.root)
    document = run("dump", "checkpoint", store.root, "--json").document
    raw = store.manifest["checkpointRaw"]
    assert (document["physic_msg_timestamp_ms"], document["logics_msg_timestamp_ms"], document["index_msg_timestamp_ms"],
            document["file_bytes"]) == (raw["physic"], raw["logics"], raw["index"], raw["len"])
    assert document["min_timestamp_ms"] == store.manifest["facts"]["checkpoint"]["min"]
    assert str(raw["physic"]) in run("dump", "checkpoint", store.root).stdout
    assert picture(store.root) == before


def test_dump_shows_the_index_headers_and_entries_that_rocketmq_wrote(golden):
    store = golden("multi-index")
    before = picture(store.root)
    document = run("dump", "index", store.root, "--json", "--entries", "--max", 100).document
    headers = store.manifest["indexHeaders"]
    assert [{theirs: one[ours] for theirs, ours in HEADER_NAMES.items()} for one in document["files"]] == headers
    logged = {record["phy"] for record in store.manifest["records"]}
    for one in document["files"]:
        assert [entry["number"] for entry in one["entries"]] == list(range(1, one["index_count"]))
        for entry in one["entries"]:
            assert entry["physical_offset"] in logged and entry["previous"] < entry["number"]
            assert entry["slot"] == entry["key_hash"] % document["max_hash_slot_num"]
    human = run("dump", "index", store.root, "--entries", "--file", headers[1]["file"]).stdout
    assert headers[1]["file"] in human and headers[0]["file"] not in human
    assert picture(store.root) == before


@pytest.mark.parametrize("recipe", ["basic", "prefill", "roll"])
def test_dump_shows_the_queue_entries_that_rocketmq_wrote(golden, recipe):
    store = golden(recipe)
    before = picture(store.root)
    for queue in store.manifest["facts"]["queues"]:
        document = run("dump", "queue", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"], "--json",
                       "--offset", queue["min"], "--max", 10_000).document
        entries = [[one["physical_offset"], one["size_bytes"], one["tags_code"]] for one in document["entries"]]
        assert entries == queue["entries"]
    assert picture(store.root) == before


def test_padding_in_front_of_a_queue_is_marked(golden):
    store = golden("prefill")
    queue = store.manifest["facts"]["queues"][0]
    entries = run("dump", "queue", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"],
                  "--json").document["entries"]
    padding = [one for one in entries if one["filler"]]
    assert padding and padding == entries[: len(padding)]
    assert {(one["physical_offset"], one["size_bytes"]) for one in padding} == {(0, 0x7FFFFFFF)}
    assert "filler" in run("dump", "queue", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"]).stdout


def test_a_part_of_a_queue(golden):
    store = golden("basic")
    queue = max(store.manifest["facts"]["queues"], key=lambda one: len(one["entries"]))
    arguments = ("dump", "queue", store.root, "--topic", queue["topic"], "--queue-id", queue["queueId"])
    document = run(*arguments, "--offset", 3, "--max", 2, "--json").document
    assert [one["queue_offset"] for one in document["entries"]] == [3, 4]
    assert [one["physical_offset"] for one in document["entries"]] == [entry[0] for entry in queue["entries"][3:5]]
    assert run(*arguments, "--offset", 10**9, "--json").document["entries"] == []
    assert f"{queue['entries'][3][0]:,}" in run(*arguments, "--offset", 3).stdout


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (["queue"], 2, "needs --topic and --queue-id"),
    (["queue", "--topic", "Nobody", "--queue-id", "0"], 1, "no queue 0 of topic Nobody"),
    (["queue", "--topic", "../config", "--queue-id", "0"], 2, "not a topic"),
    (["queue", "--topic", "a", "--queue-id", "-1"], 2, "-1"),
    (["index", "--file", "20200101000000000"], 1, "no index file 20200101000000000"),
    (["index", "--set", "maxIndexNum=77"], 2, "fixed at creation"),
    (["nothing"], 2, "checkpoint"),
])
def test_wrong_questions_get_a_sentence_and_change_nothing(golden, arguments, code, sentence):
    store = golden("multi-index")
    before = picture(store.root)
    ran = run("dump", store.root, *arguments)
    assert ran.code == code and sentence in ran.stderr and ran.stdout == ""
    assert picture(store.root) == before


def test_damaged_files_are_corruption(golden):
    store = golden("multi-index")
    (store.root / "checkpoint").write_bytes(b"short")
    index = sorted((store.root / "index").iterdir())[0]
    index.write_bytes(index.read_bytes()[:-1])
    before = picture(store.root)
    assert run("dump", "checkpoint", store.root).code == 3
    ran = run("dump", "index", store.root)
    assert ran.code == 3 and index.name in ran.stderr
    assert picture(store.root) == before


def test_a_store_without_checkpoint_says_so(golden):
    store = golden("basic")
    (store.root / "checkpoint").unlink()
    ran = run("dump", "checkpoint", store.root)
    assert ran.code == 1 and "no checkpoint" in ran.stderr


def test_an_index_folder_may_be_missing(golden):
    store = golden("basic")
    shutil.rmtree(store.root / "index")
    assert run("dump", "index", store.root, "--json").document["files"] == []


@pytest.fixture
def engine_memory(tmp_path):
    """(root, memory): a store with the shared memory of an engine, published, no process running."""
    root = tmp_path / "store"
    engine_id = ensure_engine_id(root)
    note_run(root, tmp_path)
    folder = SharedFolder.of(engine_id, tmp_path)
    identity = identity_of(engine_id, boot_id=bytes(16), epoch=3, segment_bytes=65536, mode=native.MODE_POOL, pool_buffers=2)
    memory = EngineMemory.create(folder, identity)
    try:
        memory.publish()
        yield root, memory
    finally:
        memory.close()
        folder.sweep()


def test_control_shows_every_field_with_its_owner_and_value(engine_memory):
    root, memory = engine_memory
    native.store_position(memory.control.flushed, 4711)
    native.store(memory.control.workers[native.FLUSHER], "pid", 4242)
    native.store(memory.control.sessions[5], "state", native.SESSION_OPEN)
    document = run("dump", "control", root, "--json").document
    by_name = {field["field"]: field for field in document["fields"]}
    assert by_name["flushed.value"]["value"] == 4711 and by_name["flushed.value"]["owner"] == "flusher"
    assert by_name["workers[flusher].pid"]["value"] == 4242
    assert by_name["identity.epoch"]["value"] == 3
    assert by_name["sessions[5].state"]["value"] == native.SESSION_OPEN and "sessions[4].state" not in by_name
    assert {name for name in by_name if name.startswith("pool[")} == {"pool[0].segment_base", "pool[1].segment_base"}
    assert [name for name, field in by_name.items() if not field["owner"]] == []
    human = run("dump", "control", root).stdout
    assert "4711" in human and "workers[flusher].pid" in human


def test_control_offsets_are_those_of_the_memory(engine_memory):
    """The value at the printed offset of the raw mapping is the printed value."""
    root, memory = engine_memory
    native.store_position(memory.control.reput_from, 0x1122334455667788)
    field = next(one for one in run("dump", "control", root, "--json").document["fields"]
                 if one["field"] == "reput_from.value")
    raw = (memory.folder.path / "control").read_bytes()
    assert int.from_bytes(raw[field["offset"] : field["offset"] + field["size_bytes"]], "little") == 0x1122334455667788


def test_control_of_a_store_without_engine_says_so(golden):
    store = golden("basic")
    before = picture(store.root)
    ran = run("dump", "control", store.root)
    assert ran.code == 1 and "no engine has ever run" in ran.stderr
    assert picture(store.root) == before
