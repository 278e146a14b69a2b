"""`pyengine quarantine`: what recovery moved aside is listed and read; `salvage` takes it, also alone."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest

import pyengine
from damage import flip
from fix_cli import changes, picture, run
from fix_engine import SMALL
from pyengine.formats.paths import StorePaths
from pyengine.storage.config import load_config
from pyengine.storage.mapped_file import MappedFile
from pyengine.storage.recovery.quarantine import copy_of_bytes


@pytest.fixture
def cut(golden):
    """The golden store `roll` after damage in its last but one segment and a recovery; (store, bodies by queue before it)."""
    store = golden("roll")
    before = messages(store.root)
    segments = sorted((store.root / "commitlog").iterdir())
    record = next(record for record in store.verify["records"] if record["phy"] > int(segments[-2].name) and record.get("topic"))
    flip(segments[-2], record["phy"] - int(segments[-2].name) + 4)
    assert run("recover", store.root).code == 4
    return store, before, record


def messages(root) -> Counter:
    """How often each (topic, queue, body) is in the queues."""
    document = run("inspect", root, "--json").document
    return Counter((one["topic"], one["queueId"], one["bodySha"]) for one in document["messages"])


def pieces(root) -> list[str]:
    return [piece["name"] for piece in run("quarantine", root, "--json").document["pieces"]]


def test_a_whole_store_has_an_empty_quarantine(golden):
    store = golden("basic")
    assert run("quarantine", store.root).stdout == "nothing is in quarantine\n"
    assert run("quarantine", store.root, "list", "--json").document == {"pieces": []}


def test_pieces_are_listed_with_their_origin_and_shown_with_their_messages(cut):
    store, before, record = cut
    picture_before = picture(store.root)
    listed = run("quarantine", store.root, "--json").document["pieces"]
    assert [piece["kind"] for piece in listed] == ["commitlog", "commitlog"]
    assert listed[0]["physical_offset"] == record["phy"] and "after the end of the log" in listed[0]["reason"]
    names = [piece["name"] for piece in listed]
    assert all(name in run("quarantine", store.root).stdout for name in names)
    shown = run("quarantine", store.root, "show", *names, "--max-messages", 1000, "--json").document["pieces"]
    found = [message for piece in shown for message in piece["messages"]]
    assert len(found) == sum(piece["message_count"] for piece in shown) == (before - messages(store.root)).total() - 1
    assert all(message["physical_offset"] > record["phy"] for message in found)
    text = run("quarantine", store.root, "show", names[1], "--max-messages", 2)
    assert text.code == 0 and "message count" in text.stdout and found[-1]["topic"] in text.stdout
    assert changes(picture_before, picture(store.root)) == []


def test_bytes_that_were_changed_since_are_told(cut):
    store, _, _ = cut
    (first, _) = pieces(store.root)
    flip(store.root / "quarantine" / first, 50)
    ran = run("quarantine", store.root, "show", first)
    assert ran.code == 1 and "SHA-256" in ran.stdout


@pytest.mark.parametrize(("what", "says"), [
    ("note", "note cannot be read"), ("content", "its content is not"), ("length", "bytes, and its")])
def test_a_quarantined_piece_that_a_crash_left_half_is_reported(cut, tmp_path, what, says):
    store, _, _ = cut
    (first, _) = pieces(store.root)
    path = store.root / "quarantine" / first
    if what == "note":
        path.with_name(f"{first}.json").write_text("{")
    elif what == "content":
        path.unlink()
    else:
        os.truncate(path, 10)
    assert any(says in piece["problem"] for piece in run("quarantine", store.root, "--json").document["pieces"])
    salvaged = run("salvage", store.root / "quarantine", tmp_path / "new", "--json")
    assert salvaged.code in (0, 4) and any(first in note and says in note for note in salvaged.document["notes"])


@pytest.mark.parametrize(("arguments", "says"), [
    (("list", "x"), "list takes no NAME"), (("show",), "show needs the name of a piece"), (("show", "x"), "holds no x"),
    (("restore", "x"), "not one of 'list', 'show'"),
])
def test_wrong_arguments_are_named(cut, arguments, says):
    ran = run("quarantine", cut[0].root, *arguments)
    assert ran.code == 2 and says in ran.stderr


def test_salvage_takes_what_ended_a_transaction_with_its_half_message(builder, tmp_path):
    half, op = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    builder.put("T", b"kept")
    cut = builder.end
    for topic, body in ((half, b"first"), (op, b"0"), (op, b"7")):
        builder.put(topic, body, tags="d" if topic == op else None, dispatch=False)
    (piece,) = copy_of_bytes(StorePaths(builder.root), MappedFile(builder.segment(0), 0), cut, builder.end, "a test")
    piece.keep()
    builder.write_log(bytes(builder.end - cut), at=cut)
    builder.end, builder.queue_offsets[half, 0] = cut, 0
    builder.put(half, b"since")
    sizes = [word for name in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
                               "max_index_num") for word in ("--set", f"{name}={getattr(builder.geometry, name)}")]
    assert run("salvage", builder.root, tmp_path / "new", "--json", *sizes).document["quarantined"] == 3
    with pyengine.open_store(tmp_path / "new") as store:
        found = {topic: [message.body for message in store.get_message(topic, 0, 0).messages] for topic in (half, op)}
    assert found == {half: [b"since", b"first"], op: [b"1", b"-"]}


def test_quarantined_files_derived_from_the_log_are_listed_and_not_salvaged(golden, tmp_path):
    store = golden("basic")
    assert run("rebuild", store.root).code == 0
    (piece,) = run("quarantine", store.root, "--json").document["pieces"]
    assert piece["kind"] == "rebuild" and piece["problem"] == "" and "consumequeue" in piece["origin"]
    refused = run("salvage", store.root / "quarantine", tmp_path / "new")
    assert refused.code == 2 and "holds no store" in refused.stderr and not (tmp_path / "new").exists()


def test_salvage_takes_the_messages_of_the_quarantine_after_those_of_the_log(cut, tmp_path):
    store, before, _ = cut
    kept = messages(store.root)
    took = run("salvage", store.root, tmp_path / "new", "--json").document
    assert took["quarantined"] == (before - kept).total() - 1
    there = messages(tmp_path / "new")
    assert (before - there).total() == 1 and (there - before).total() == 0
    assert run("check", tmp_path / "new").code == 0
    assert run("salvage", store.root, tmp_path / "without", "--no-quarantine", "--json").document["quarantined"] == 0
    assert messages(tmp_path / "without") == kept


def test_salvage_takes_a_piece_once_that_is_still_in_the_log(builder, tmp_path):
    """A recovery was killed after the copy and before the cut."""
    builder.put("T", b"first")
    second = builder.put("T", b"second")
    (piece,) = copy_of_bytes(StorePaths(builder.root), MappedFile(builder.segment(0), 0), second.physical_offset, builder.end, "a test")
    piece.keep()
    sizes = [word for name in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
                               "max_index_num") for word in ("--set", f"{name}={getattr(builder.geometry, name)}")]
    took = run("salvage", builder.root, tmp_path / "new", "--json", *sizes).document
    assert took["records"] == 2 and took["quarantined"] == 0


@pytest.mark.parametrize("is_copy", [False, True], ids=["in the store", "a copy elsewhere"])
def test_a_salvaged_quarantine_is_a_store_from_which_consumers_and_ingest_put_back_what_was_cut(cut, tmp_path, is_copy):
    store, before, record = cut
    lost = before - messages(store.root)
    folder, new = store.root / "quarantine", tmp_path / "new"
    if is_copy:
        folder = shutil.copytree(folder, tmp_path / "kept")
        sizes = ("--set", f"mapped_file_size_commit_log_bytes={load_config(store.root, {}).mapped_file_size_commit_log_bytes}")
    ran = run("salvage", folder, new, "--json", *(sizes if is_copy else ()))
    assert ran.code == 4 and [piece["start"] for piece in ran.document["skipped"]] == [record["phy"]], "the damaged one is named"
    assert ran.document["quarantined"] == ran.document["records"] == lost.total() - 1
    there = messages(new)
    assert (there - before).total() == 0 and (lost - there).total() == 1 and run("check", new).code == 0
    with pyengine.Engine(store.root):
        for topic in sorted({topic for topic, _, _ in there}):
            with pyengine.consume(new, topic, from_="first") as consumer:
                assert len(consumer.pull(1000, timeout_s=0)) == sum(count for (one, _, _), count in there.items() if one == topic)
            printed = run("tail", new, "--topic", topic, "--from", "first", "--no-follow", "--json").stdout
            (tmp_path / "found.jsonl").write_text(printed)
            assert run("ingest", store.root, "--topic", topic, "--format", "jsonl", tmp_path / "found.jsonl").code == 0
    again = messages(store.root)
    assert (again - before).total() == 0 and (before - again).total() == 1, "all but the damaged one, each once"


def test_a_salvaged_quarantine_has_half_and_delayed_messages_in_topics_of_their_own(tmp_path):
    root, half, waiting = tmp_path / "store", "RMQ_SYS_TRANS_HALF_TOPIC", "SCHEDULE_TOPIC_XXXX"
    with pyengine.Engine(root, message_delay_level="1h 2h", **SMALL) as engine, engine.connect() as producer:
        damaged = producer.put("T", b"damaged").physical_offset
        producer.put("T", b"later", delay_level=2), producer.put_raw(pyengine.RawMessage(half, b"undecided")), producer.put("T", b"sent")
    flip(root / "commitlog" / f"{0:020d}", damaged + 4)
    assert run("recover", root, "--accept-loss").code == 4
    assert run("salvage", root / "quarantine", tmp_path / "new").code == 4
    with pyengine.open_store(tmp_path / "new") as store:
        found = {where: [message.body for message in store.get_message(*where, store.queue_range(*where)[0]).messages]
                 for where in (("T", 0), (waiting, 1), (half, 0))}
    assert found == {("T", 0): [b"sent"], (waiting, 1): [b"later"], (half, 0): [b"undecided"]}
