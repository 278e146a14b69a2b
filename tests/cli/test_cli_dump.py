"""`pyengine dump`: what the files hold, against what RocketMQ said it wrote."""

from __future__ import annotations

import shutil

import pytest
from fix_cli import picture, run

HEADER_NAMES = {"file": "name", "beginTs": "begin_timestamp_ms", "endTs": "end_timestamp_ms",
                "beginPhy": "begin_physical_offset", "endPhy": "end_physical_offset", "slotCount": "hash_slot_count",
                "indexCount": "index_count"}


def test_checkpoint_is_what_rocketmq_wrote(golden):
    store = golden("multi-index")
    before = picture(store.root)
    document = run("dump", store.root, "checkpoint", "--json").document
    raw = store.manifest["checkpointRaw"]
    assert (document["physic_msg_timestamp_ms"], document["logics_msg_timestamp_ms"], document["index_msg_timestamp_ms"],
            document["file_bytes"]) == (raw["physic"], raw["logics"], raw["index"], raw["len"])
    assert document["min_timestamp_ms"] == store.manifest["facts"]["checkpoint"]["min"]
    assert str(raw["physic"]) in run("dump", store.root, "checkpoint").stdout
    assert picture(store.root) == before


def test_index_headers_and_entries_are_what_rocketmq_wrote(golden):
    store = golden("multi-index")
    before = picture(store.root)
    document = run("dump", store.root, "index", "--json", "--entries", "--max", 100).document
    headers = store.manifest["indexHeaders"]
    assert [{theirs: one[ours] for theirs, ours in HEADER_NAMES.items()} for one in document["files"]] == headers
    logged = {record["phy"] for record in store.manifest["records"]}
    for one in document["files"]:
        assert [entry["number"] for entry in one["entries"]] == list(range(1, one["index_count"]))
        for entry in one["entries"]:
            assert entry["physical_offset"] in logged and entry["previous"] < entry["number"]
            assert entry["slot"] == entry["key_hash"] % document["max_hash_slot_num"]
    human = run("dump", store.root, "index", "--entries", "--file", headers[1]["file"]).stdout
    assert headers[1]["file"] in human and headers[0]["file"] not in human
    assert picture(store.root) == before


@pytest.mark.parametrize("recipe", ["basic", "prefill", "roll"])
def test_queue_entries_are_what_rocketmq_wrote(golden, recipe):
    store = golden(recipe)
    before = picture(store.root)
    for queue in store.manifest["facts"]["queues"]:
        document = run("dump", store.root, "queue", "--topic", queue["topic"], "--queue-id", queue["queueId"], "--json",
                       "--offset", queue["min"], "--max", 10_000).document
        entries = [[one["physical_offset"], one["size_bytes"], one["tags_code"]] for one in document["entries"]]
        assert entries == queue["entries"]
    assert picture(store.root) == before


def test_padding_in_front_of_a_queue_is_marked(golden):
    store = golden("prefill")
    queue = store.manifest["facts"]["queues"][0]
    entries = run("dump", store.root, "queue", "--topic", queue["topic"], "--queue-id", queue["queueId"],
                  "--json").document["entries"]
    padding = [one for one in entries if one["filler"]]
    assert padding and padding == entries[: len(padding)]
    assert {(one["physical_offset"], one["size_bytes"]) for one in padding} == {(0, 0x7FFFFFFF)}
    assert "filler" in run("dump", store.root, "queue", "--topic", queue["topic"], "--queue-id", queue["queueId"]).stdout


def test_a_part_of_a_queue(golden):
    store = golden("basic")
    queue = max(store.manifest["facts"]["queues"], key=lambda one: len(one["entries"]))
    arguments = ("dump", store.root, "queue", "--topic", queue["topic"], "--queue-id", queue["queueId"])
    document = run(*arguments, "--offset", 3, "--max", 2, "--json").document
    assert [one["queue_offset"] for one in document["entries"]] == [3, 4]
    assert [one["physical_offset"] for one in document["entries"]] == [entry[0] for entry in queue["entries"][3:5]]
    assert run(*arguments, "--offset", 10**9, "--json").document["entries"] == []
    assert f"{queue['entries'][3][0]:,}" in run(*arguments, "--offset", 3).stdout


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (["queue"], 2, "needs --topic and --queue-id"),
    (["queue", "--topic", "Nobody", "--queue-id", "0"], 1, "no queue 0 of topic Nobody"),
    (["queue", "--topic", "../config", "--queue-id", "0"], 2, "no topic"),
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
    assert run("dump", store.root, "checkpoint").code == 3
    ran = run("dump", store.root, "index")
    assert ran.code == 3 and index.name in ran.stderr
    assert picture(store.root) == before


def test_a_store_without_checkpoint_says_so(golden):
    store = golden("basic")
    (store.root / "checkpoint").unlink()
    ran = run("dump", store.root, "checkpoint")
    assert ran.code == 1 and "no checkpoint" in ran.stderr


def test_an_index_folder_may_be_missing(golden):
    store = golden("basic")
    shutil.rmtree(store.root / "index")
    assert run("dump", store.root, "index", "--json").document["files"] == []
