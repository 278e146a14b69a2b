"""Stores that RocketMQ 5 has written to: told by their files, read as far as that goes, never written to."""

from __future__ import annotations

import os
import struct

import pytest

from fix_cli import changes, picture, run
from pyengine.errors import StoreRefusedError
from pyengine.formats.consume_queue import ENTRY
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.later_format import MESSAGE_MAGIC_V2, find_later_features

SLOTS, NOW_S = 2 * 60, 1_700_000_000
WRITING = (("start",), ("recover",), ("recover", "--accept-loss"), ("rebuild", "--queues"), ("clean", "--older-than", "1"),
           ("promote",), ("topics", "create", "T"), ("cancel", "7F00000100002A9F0000000000000000"), ("config set", "delete_when=03"),
           ("tables", "--to", "delta"), ("backup",))


def rocksdb(folder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "CURRENT").write_bytes(b"MANIFEST-000004\n")
    (folder / "MANIFEST-000004").write_bytes(b"\0" * 64)
    (folder / "000008.sst").write_bytes(b"\0" * 64)


def timer_wheel(root, *, slot_s: int, read_s: int, number: int = 3, taken: int = 0) -> None:
    """A wheel in which one slot holds messages, and the timer's own checkpoint."""
    wheel = bytearray(32 * SLOTS)
    struct.pack_into(">qqqii", wheel, slot_s % SLOTS * 32, slot_s, 52, 104, number, 0)
    (root / "timerwheel").write_bytes(wheel)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "timercheck").write_bytes(struct.pack(">qqq", read_s * 1000, 156, taken).ljust(4096, b"\0"))


def tiered(root) -> None:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "tieredStoreMetadata.json").write_text("{}")


def waiting_for_the_wheel(root) -> None:
    timer_wheel(root, slot_s=NOW_S - 60, read_s=NOW_S, taken=1)
    queue = root / "consumequeue" / "rmq_sys_wheel_timer" / "0"
    queue.mkdir(parents=True)
    (queue / f"{0:020d}").write_bytes((ENTRY.pack(0, 100, 0) * 3).ljust(1000, b"\0"))


def in_folder(name: str):
    def make(root) -> None:
        (root / name / "T" / "0").mkdir(parents=True)
        (root / name / "T" / "0" / f"{0:020d}").write_bytes(b"\0" * 64)
    return make


KINDS = {
    "consumequeue": lambda root: rocksdb(root / "consumequeue"),
    "config/topics": lambda root: rocksdb(root / "config" / "topics"),
    "kvStore": lambda root: rocksdb(root / "kvStore"),
    "timerwheel": lambda root: timer_wheel(root, slot_s=NOW_S + 5, read_s=NOW_S),
    "timerwheel, its queue": waiting_for_the_wheel,
    "compaction": in_folder("compaction/compactionLog"),
    "batchconsumequeue": in_folder("batchconsumequeue"),
    "config/tieredStoreMetadata.json": tiered,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_with_files_of_rocketmq_5_is_refused_with_their_names_and_not_written(golden, tmp_path, kind):
    store = golden("basic")
    (store.root / "abort").write_bytes(b"")  # there is something to recover
    KINDS[kind](store.root)
    path = kind.partition(",")[0]
    assert [one.path for one in find_later_features(store.root)] == [path]
    before = picture(store.root)
    for command in WRITING:
        ran = run(*command[0].split(), store.root, *command[1:], *([tmp_path / command[0]] if command[0] in ("tables", "backup") else ()))
        assert ran.code == 3 and "RocketMQ 5" in ran.stderr and path in ran.stderr, (command, ran)
    with pytest.raises(StoreRefusedError, match="RocketMQ 5"):
        ConsumerOffsets(store.root).commit("T", "g", {0: 1})
    assert changes(before, {name: state for name, state in picture(store.root).items() if "consumers" not in name
                            and not name.endswith(".lock")}) in ([], ["config"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "timerwheel, its queue"])  # its entries name no messages
def test_its_log_is_read_checked_and_carved_out_all_the_same(golden, tmp_path, kind):
    store = golden("basic")
    messages = sum(1 for record in store.verify["records"] if record.get("topic"))
    KINDS[kind](store.root)
    path = kind.partition(",")[0]
    checked = run("check", store.root, "--json")
    assert checked.code == 0 and checked.document["messages"] == messages
    assert (path, "later format") in {(one["file"], one["kind"]) for one in checked.document["findings"]}
    assert len([one for one in run("inspect", store.root, "--json").document["records"] if one.get("topic")]) == messages
    assert path in run("status", store.root, "--json").document["reason"]
    ran = run("salvage", store.root, tmp_path / "new", "--json")
    assert ran.code == 0 and ran.document["records"] == messages
    assert any(note.startswith(f"{path}: ") for note in ran.document["notes"])
    assert find_later_features(tmp_path / "new") == [] and run("check", tmp_path / "new").code == 0


def test_queues_in_rocksdb_are_not_missing_queues(golden):
    store = golden("basic")
    for folder in (store.root / "consumequeue").iterdir():
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
    rocksdb(store.root / "consumequeue")
    checked = run("check", store.root, "--json")
    assert checked.code == 0 and checked.document["grade"] == "notice"
    got = run("get", store.root, "--topic", "TopicA1", "--queue-id", "0", "--offset", "0")
    assert "in RocksDB" in got.stderr


def test_a_wheel_without_waiting_messages_keeps_nothing_from_its_store(golden):
    store = golden("basic")
    timer_wheel(store.root, slot_s=NOW_S - 60, read_s=NOW_S)
    assert find_later_features(store.root) == []
    assert run("recover", store.root).code == 0


@pytest.mark.parametrize("names", [("CURRENT",), ("topics.json", "MANIFEST-000004")])
def test_a_name_alone_is_no_database(golden, names):
    store = golden("basic")
    for name in names:
        (store.root / "consumequeue" / name).mkdir()
    assert find_later_features(store.root) == []


def test_a_record_of_rocketmq_5_is_not_cut_off(build_store):
    store = build_store(20, ours=False)
    store.poke(store.records[12].start + 4, MESSAGE_MAGIC_V2.to_bytes(4, "big"))
    (store.root / "abort").write_bytes(b"")
    before = picture(store.root)
    ran = run("recover", store.root)
    assert ran.code == 3 and f"the record at {store.records[12].start} is one of RocketMQ 5" in ran.stderr
    assert [name for name in changes(before, picture(store.root)) if name not in (".", "lock")] == []


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    timer_wheel(tmp_path, slot_s=NOW_S, read_s=NOW_S - 10)
    (tmp_path / "consumequeue").mkdir()
    (tmp_path / "config" / "timercheck").unlink()
    for name in ("consumequeue/CURRENT", "config/timercheck"):
        os.mkfifo(tmp_path / name)
    assert [found.path for found in find_later_features(tmp_path)] == ["timerwheel"]
