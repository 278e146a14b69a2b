"""Sizes read off the files: every golden store, and stores of which the files tell little or wrong things."""

from __future__ import annotations

import dataclasses
import os
import random

import pytest

from fix_golden import RECIPES
from pyengine.engine_config import Geometry
from pyengine.formats import index_file
from pyengine.formats.index_file import IndexEntry, IndexHeader, IndexLayout
from pyengine.storage import index_file as index_module
from pyengine.storage.index_file import find_layout
from pyengine.storage.message_store import DEFAULTS, discover


@pytest.mark.parametrize("name", RECIPES)
def test_the_files_of_every_golden_store_tell_its_sizes(golden, name):
    store = golden(name)
    told = dataclasses.asdict(discover(store.root))
    has = {
        "mapped_file_size_commit_log_bytes": "commitlog/*",
        "mapped_file_size_consume_queue_bytes": "consumequeue/*/*/*",
        "mapped_file_size_consume_queue_ext_bytes": "consumequeue_ext/*/*/*",
        "max_hash_slot_num": "index/*",
        "max_index_num": "index/*",
    }
    for size, value in store.sizes.items():
        where_from = [path for path in store.root.glob(has[size]) if path.is_file()]
        assert told[size] == (value if where_from else getattr(DEFAULTS, size)), size


def test_sizes_that_no_file_tells_come_from_the_overrides(golden):
    store = golden("abnormal-multi-cqgone")
    found = discover(store.root, {"max_hash_slot_num": 16, "mapped_file_size_commit_log_bytes": 5})
    assert found == dataclasses.replace(DEFAULTS, mapped_file_size_commit_log_bytes=16384, max_hash_slot_num=16)


def test_no_store_at_all(tmp_path):
    assert discover(tmp_path / "nowhere") == DEFAULTS == Geometry()
    assert discover(tmp_path) == DEFAULTS


@pytest.mark.parametrize("place", ["consumequeue", "consumequeue_ext", "index", "commitlog", "consumequeue/topic-0"])
def test_a_file_in_a_folders_place_counts_as_an_empty_folder(tmp_path, place):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("a user's")
    assert discover(tmp_path) == DEFAULTS


def test_a_cut_file_does_not_decide(tmp_path):
    folder = tmp_path / "commitlog"
    folder.mkdir()
    for start, length in ((0, 4096), (4096, 100), (8192, 4096)):
        (folder / f"{start:020d}").write_bytes(bytes(length))
    assert discover(tmp_path).mapped_file_size_commit_log_bytes == 4096
    (folder / f"{8192:020d}").unlink()
    assert discover(tmp_path).mapped_file_size_commit_log_bytes == 4096  # by the names: one each


def only_segment(root, length: int, start: int = 0) -> None:
    (root / "commitlog").mkdir()
    with open(root / "commitlog" / f"{start:020d}", "wb") as file:
        file.truncate(length)


@pytest.mark.parametrize("start, length, told", [
    (0, 700_000_000, 1 << 30),             # cut short: no second name tells, and no one chooses such a size
    (0, 100 << 20, 1 << 30),               # perhaps chosen, perhaps the half of a copy: --set has to say it
    (0, 1 << 20, 1 << 20),
    (3 * (100 << 20), 100 << 20, 100 << 20),  # its name is a multiple of it
    (3 * (100 << 20), 70 << 20, 1 << 30),
])
def test_the_length_of_an_only_segment_is_believed_where_something_speaks_for_it(tmp_path, start, length, told):
    only_segment(tmp_path, length, start)
    assert discover(tmp_path).mapped_file_size_commit_log_bytes == told
    assert discover(tmp_path, {"mapped_file_size_commit_log_bytes": length}).mapped_file_size_commit_log_bytes == length


def test_a_longer_size_that_is_asked_for_makes_an_only_segment_one_that_was_cut(tmp_path):
    only_segment(tmp_path, 1 << 20)
    asked = {"mapped_file_size_commit_log_bytes": 1 << 30}
    assert discover(tmp_path, asked).mapped_file_size_commit_log_bytes == 1 << 30


def test_names_tell_the_size_when_every_segment_was_cut(tmp_path):
    folder = tmp_path / "commitlog"
    folder.mkdir()
    for start, length in ((0, 3000), (4096, 1000), (12288, 7)):
        (folder / f"{start:020d}").write_bytes(bytes(length))
    assert discover(tmp_path).mapped_file_size_commit_log_bytes == 4096


def test_a_segment_that_is_deleted_while_the_folder_is_read_hides_no_other(tmp_path, monkeypatch):
    log = tmp_path / "commitlog"
    log.mkdir()
    for start in (0, 4096, 8192):
        (log / f"{start:020d}").write_bytes(bytes(4096))

    def delete_first(entry):
        if entry.name == f"{0:020d}":
            os.unlink(entry.path)
        return True

    monkeypatch.setattr("pyengine.storage.message_store.is_plain_file", delete_first)
    assert discover(tmp_path).mapped_file_size_commit_log_bytes == 4096


def test_a_queue_file_that_ends_inside_an_entry_tells_nothing(tmp_path):
    queue = tmp_path / "consumequeue" / "T" / "0"
    queue.mkdir(parents=True)
    (queue / f"{0:020d}").write_bytes(bytes(4096))
    assert discover(tmp_path) == DEFAULTS


def test_foreign_names_are_not_looked_at(tmp_path):
    (tmp_path / "commitlog").mkdir()
    (tmp_path / "commitlog" / "x.tmp").write_bytes(bytes(7))
    (tmp_path / "consumequeue" / "T" / "notanumber").mkdir(parents=True)
    (tmp_path / "consumequeue" / "T" / "notanumber" / f"{0:020d}").write_bytes(bytes(60))
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "notes.txt").write_bytes(b"hello")
    assert discover(tmp_path) == DEFAULTS


def write_index(path, layout: IndexLayout, hashes: list[int], *, first_offset: int = 0) -> None:
    """An index file with one entry per hash, as RocketMQ would put them."""
    data = bytearray(layout.size_bytes)
    used = 0
    for number, key_hash in enumerate(hashes, start=1):
        at = layout.slot_at(layout.slot_of(key_hash))
        (previous,) = index_file.SLOT.unpack_from(data, at)
        used += previous == 0
        entry = IndexEntry(key_hash, first_offset + 100 * (number - 1), 0, previous)
        data[layout.entry_at(number) : layout.entry_at(number) + 20] = index_file.ENTRY.pack(*entry)
        index_file.SLOT.pack_into(data, at, number)
    end = first_offset + 100 * (len(hashes) - 1)
    data[:40] = index_file.HEADER.pack(*IndexHeader(1000, 1000, first_offset, end, used, len(hashes) + 1))
    path.write_bytes(data)


@pytest.mark.parametrize("first_offset", [0, 700])
def test_any_index_with_a_few_keys_tells_its_layout(tmp_path, rng: random.Random, first_offset):
    for trial in range(60):
        layout = IndexLayout(rng.randrange(1, 200), rng.randrange(12, 300))
        keys = rng.randrange(8, layout.max_index_num)
        path = tmp_path / f"{trial:017d}"
        write_index(path, layout, [rng.randrange(1 << 31) for _ in range(keys)], first_offset=first_offset)
        assert find_layout([path], DEFAULTS.index_layout) == layout


def test_an_index_of_one_key_tells_its_layout_without_a_walk_of_its_chain(tmp_path, monkeypatch):
    layout, read = IndexLayout(50, 4001), []
    write_index(tmp_path / ("0" * 17), layout, [12345] * 4000)
    real = index_module.unpack_entry
    monkeypatch.setattr(index_module, "unpack_entry", lambda view, at: read.append(at) or real(view, at))
    assert find_layout([tmp_path / ("0" * 17)], DEFAULTS.index_layout) == layout
    assert len(read) < 4000


def test_an_entry_of_zeros_only_does_not_mislead(tmp_path):
    layout = IndexLayout(16, 40)
    hashes = [0, 5, 21, 3, 37, 11]  # the first entry: hash 0, offset 0, time 0, no previous
    write_index(tmp_path / ("0" * 17), layout, hashes)
    assert find_layout([tmp_path / ("0" * 17)], DEFAULTS.index_layout) == layout


def test_an_index_without_keys_tells_nothing(tmp_path):
    path = tmp_path / ("0" * 17)
    path.write_bytes(bytes(IndexLayout(64, 400).size_bytes))
    assert find_layout([path], DEFAULTS.index_layout) is None


def test_damaged_and_short_index_files_tell_nothing(tmp_path):
    path = tmp_path / ("0" * 17)
    path.write_bytes(b"short")
    assert find_layout([path], DEFAULTS.index_layout) is None
    path.write_bytes(index_file.HEADER.pack(*IndexHeader(1, 1, 0, 500, 3, 9)) + bytes(1000))
    assert find_layout([path], DEFAULTS.index_layout) is None
    assert find_layout([tmp_path / ("1" * 17)], DEFAULTS.index_layout) is None


def test_a_default_sized_index_is_recognized_without_a_search(tmp_path):
    path = tmp_path / ("0" * 17)
    layout = DEFAULTS.index_layout
    with open(path, "wb") as file:
        file.truncate(layout.size_bytes)
        file.write(index_file.HEADER.pack(*IndexHeader(1000, 1000, 0, 0, 1, 2)))
        file.seek(layout.slot_at(layout.slot_of(77)))
        file.write(index_file.SLOT.pack(1))
        file.seek(layout.entry_at(1))
        file.write(index_file.ENTRY.pack(*IndexEntry(77, 0, 0, 0)))
    assert find_layout([path], layout) == layout
