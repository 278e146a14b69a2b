"""`pyengine quarantine`: what recovery moved aside is listed, read and put back; `salvage` takes it too."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections import Counter

import pytest

import pyengine
from damage import flip
from fix_cli import changes, picture, run
from fix_engine import SMALL, RunningEngine, tail_of_ring
from pyengine.cli import repair as quarantine_module
from pyengine.cli.repair import restore
from pyengine.formats.paths import StorePaths
from pyengine.ipc import live_reader
from pyengine.storage.recovery.quarantine import Quarantine, list_quarantine
from waiting import eventually


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
    assert text.code == 0 and "whole messages" in text.stdout and found[-1]["topic"] in text.stdout
    assert changes(picture_before, picture(store.root)) == []


def test_bytes_that_were_changed_since_are_told(cut):
    store, _, _ = cut
    (first, _) = pieces(store.root)
    flip(store.root / "quarantine" / first, 50)
    ran = run("quarantine", store.root, "show", first)
    assert ran.code == 1 and "SHA-256" in ran.stdout


@pytest.mark.parametrize(("what", "says"), [
    ("note", "note cannot be read"), ("content", "its content is not"), ("length", "bytes, and its")])
def test_a_quarantined_piece_that_a_crash_left_half_is_reported_and_not_restored(cut, what, says):
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
    refused = run("quarantine", store.root, "restore", first)
    assert refused.code == 2 and refused.stdout == ""


def test_restored_messages_are_in_their_queues_again_once(cut, tmp_path):
    store, before, record = cut
    after_cut = messages(store.root)
    names = pieces(store.root)
    with pyengine.Engine(store.root):
        ran = run("quarantine", store.root, "restore", *names, "--json")
        assert ran.code == 0, ran
        again = run("quarantine", store.root, "restore", names[0])
        assert again.code == 2 and "restored already" in again.stderr
    lost = before - after_cut
    assert sum(ran.document["restored"].values()) == lost.total() - 1, "all but the damaged one"
    there = messages(store.root)
    missing = before - there
    assert missing.total() == 1 and (there - before).total() == 0
    assert run("check", store.root).code == 0
    listed = run("quarantine", store.root, "--json").document["pieces"]
    assert [piece["restored"] for piece in listed] == list(ran.document["restored"].values())
    salvaged = run("salvage", store.root, tmp_path / "new", "--json").document  # they are in the log: not a second time
    assert salvaged["quarantined"] == 0 and messages(tmp_path / "new") == there


def test_an_interrupted_restore_continues_without_doubles(cut, tmp_path, monkeypatch):
    store, before, _ = cut
    names = pieces(store.root)
    import pyengine.cli.repair as module

    put, left = module._put, [5]

    def fail_after(producer, message):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return put(producer, message)

    monkeypatch.setattr(module, "_put", fail_after)
    with pyengine.Engine(store.root):
        entries = [entry for entry in list_quarantine(store.root) if entry.name in names]
        with pytest.raises(KeyboardInterrupt):
            restore(store.root, entries, {})
    salvaged = run("salvage", store.root, tmp_path / "new", "--json").document
    assert salvaged["quarantined"] == (before - messages(store.root)).total() - 1
    assert (messages(tmp_path / "new") - before).total() == 0 and (before - messages(tmp_path / "new")).total() == 1
    monkeypatch.setattr(module, "_put", put)
    with pyengine.Engine(store.root):
        assert run("quarantine", store.root, "restore", *names).code == 0
    there = messages(store.root)
    assert (there - before).total() == 0 and (before - there).total() == 1


def test_a_second_restore_waits_for_the_puts_a_killed_restore_submitted(cut, monkeypatch):
    store, before, _ = cut
    names = pieces(store.root)
    entries = list_quarantine(store.root)
    engine = RunningEngine(store.root, {"os_page_cache_busy_timeout_ms": 60_000})
    try:
        engine.start()
        engine.kill("writer", signal.SIGSTOP)
        child = multiprocessing.get_context("fork").Process(target=restore, args=(store.root, entries, {}))
        child.start()
        eventually(lambda: tail_of_ring(engine, child.pid) > 0, "the restore has submitted puts")
        child.kill()
        child.join()
        outcome = []
        looks = threading.Event()
        is_drained = live_reader.is_drained
        monkeypatch.setattr(live_reader, "is_drained", lambda *session: looks.set() or is_drained(*session))
        second = threading.Thread(target=lambda: outcome.append(restore(store.root, list_quarantine(store.root), {})))
        second.start()
        eventually(lambda: looks.is_set() or tail_of_ring(engine, os.getpid()), "the second restore waits, or puts")
        engine.kill("writer", signal.SIGCONT)
        second.join(120)
    finally:
        engine.sweep()
    assert [list(counts) for counts in outcome] == [names]
    there = messages(store.root)
    assert (there - before).total() == 0 and (before - there).total() == 1


def test_a_restore_is_noted_once_it_is_durable(cut, monkeypatch):
    store, before, _ = cut
    names = pieces(store.root)
    long_enough_s = quarantine_module.FLUSH_WAIT_S
    monkeypatch.setattr(quarantine_module, "FLUSH_WAIT_S", 0.1)
    with pyengine.Engine(store.root, flush_interval_commit_log_ms=86_400_000):
        with pyengine.connect(store.root, refusals="return") as producer:
            assert producer.put("Other", b"not flushed").ok
        with pyengine.open_store(store.root) as reader:
            flushed, written = reader.max_physical_offset("flushed"), reader.max_physical_offset("written")
        assert flushed < written, "the test shows nothing"
        for _ in range(2):
            ran = run("quarantine", store.root, "restore", *names)
            assert ran.code != 0 and "not flushed yet" in ran.stderr and "run the command again" in ran.stderr
            assert [entry.restored for entry in list_quarantine(store.root)] == [None, None]
            assert list_quarantine(store.root)[0].restoring_from == flushed, "a power cut takes what is above it"
    monkeypatch.setattr(quarantine_module, "FLUSH_WAIT_S", long_enough_s)
    with pyengine.Engine(store.root):
        assert run("quarantine", store.root, "restore", *names).code == 0
    there = messages(store.root)
    del there[next(one for one in there if one[0] == "Other")]
    assert (there - before).total() == 0 and (before - there).total() == 1
    assert None not in [entry.restored for entry in list_quarantine(store.root)]


def test_two_restores_at_once_are_refused(cut):
    store, _, _ = cut
    held = os.open(store.root / "quarantine", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        ran = run("quarantine", store.root, "restore", *pieces(store.root))
    finally:
        os.close(held)
    assert ran.code == 5 and "another `quarantine restore`" in ran.stderr


@pytest.mark.parametrize(("arguments", "says"), [
    (("list", "x"), "list takes no NAME"), (("show",), "show needs the name of a piece"), (("restore", "x"), "holds no x"),
])
def test_wrong_arguments_are_named(cut, arguments, says):
    ran = run("quarantine", cut[0].root, *arguments)
    assert ran.code == 2 and says in ran.stderr


def test_a_restore_ends_no_transaction_that_has_come_since(tmp_path):
    """An op message ends a half message by its number, which another one has after the cut."""
    root, half, op = tmp_path / "store", "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    with pyengine.Engine(root, **SMALL) as engine, engine.connect(refusals="return") as producer:
        producer.put(half, b"kept")
        damaged = producer.put("T", b"damaged").physical_offset
        for topic, body in ((half, b"ended"), (op, b"1"), ("T", b"committed"), (half, b"undecided"), (op, b"0")):
            assert producer.put(topic, body, tags="d" if topic == op else None).ok
    flip(root / "commitlog" / f"{0:020d}", damaged + 4)
    assert run("recover", root, "--accept-loss").code == 4
    with pyengine.Engine(root) as engine, engine.connect(refusals="return") as producer:
        assert producer.put(half, b"since").queue_offset == 1
        assert run("quarantine", root, "restore", *pieces(root)).code == 0
        with engine.open_store() as store:
            end = store.max_physical_offset("committed")
            eventually(lambda: store.dispatched_offset("committed") >= end, "all is dispatched")
            found = {topic: [message.body for message in store.get_message(topic, 0, 0, level="committed").messages]
                     for topic in (half, op, "T")}
    assert found == {half: [b"kept", b"since", b"undecided"], op: [b"0"], "T": [b"committed"]}
    salvaged = tmp_path / "salvaged"
    assert run("salvage", root, salvaged).code in (0, 4)
    assert messages(salvaged) == messages(root)


def test_a_restore_puts_a_delayed_message_or_its_delivery(tmp_path):
    root, waiting = tmp_path / "store", "SCHEDULE_TOPIC_XXXX"
    with pyengine.Engine(root, message_delay_level="1s 1h", **SMALL) as engine, engine.connect() as producer:
        damaged = producer.put("T", b"damaged").physical_offset
        producer.put("T", b"due", delay_level=1), producer.put("T", b"later", delay_level=2)
        with engine.open_store() as store:
            assert store.wait_for_message("T", 0, 1, timeout_s=60, level="committed"), "it is delivered"
    flip(root / "commitlog" / f"{0:020d}", damaged + 4)
    assert run("recover", root, "--accept-loss").code == 4
    with pyengine.Engine(root) as engine:
        assert run("quarantine", root, "restore", *pieces(root)).code == 0
        with engine.open_store() as store:
            end = store.max_physical_offset("committed")
            eventually(lambda: store.dispatched_offset("committed") >= end, "all is dispatched")
            found = {where: [message.body for message in store.get_message(*where, 0, level="committed").messages]
                     for where in (("T", 0), (waiting, 0), (waiting, 1))}
    assert found == {("T", 0): [b"due"], (waiting, 0): [], (waiting, 1): [b"later"]}


def test_salvage_takes_what_ended_a_transaction_with_its_half_message(builder, tmp_path):
    half, op = "RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC"
    builder.put("T", b"kept")
    cut = builder.end
    for topic, body in ((half, b"first"), (op, b"0"), (op, b"7")):
        builder.put(topic, body, tags="d" if topic == op else None, dispatch=False)
    Quarantine(StorePaths(builder.root)).add_bytes(builder.segment(0), 0, cut, builder.end, "a test")
    builder.write_log(bytes(builder.end - cut), at=cut)
    builder.end, builder.queue_offsets[half, 0] = cut, 0
    builder.put(half, b"since")
    sizes = [word for name in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
                               "max_index_num") for word in ("--set", f"{name}={getattr(builder.geometry, name)}")]
    assert run("salvage", builder.root, tmp_path / "new", "--json", *sizes).document["quarantined"] == 3
    with pyengine.open_store(tmp_path / "new") as store:
        found = {topic: [message.body for message in store.get_message(topic, 0, 0).messages] for topic in (half, op)}
    assert found == {half: [b"since", b"first"], op: [b"1", b"-"]}


def test_quarantined_files_derived_from_the_log_are_listed_and_not_restored(golden):
    store = golden("basic")
    assert run("rebuild", store.root).code == 0
    (piece,) = run("quarantine", store.root, "--json").document["pieces"]
    assert piece["kind"] == "rebuild" and piece["problem"] == "" and "consumequeue" in piece["origin"]
    refused = run("quarantine", store.root, "restore", piece["name"])
    assert refused.code == 2 and "pyengine rebuild" in refused.stderr


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
    Quarantine(StorePaths(builder.root)).add_bytes(builder.segment(0), 0, second.physical_offset, builder.end, "a test")
    sizes = [word for name in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes", "max_hash_slot_num",
                               "max_index_num") for word in ("--set", f"{name}={getattr(builder.geometry, name)}")]
    took = run("salvage", builder.root, tmp_path / "new", "--json", *sizes).document
    assert took["records"] == 2 and took["quarantined"] == 0
