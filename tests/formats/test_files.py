"""Queue entries, index files, checkpoint, names: the fixed-size formats."""

from __future__ import annotations

import pytest

from pyengine.errors import FormatError
from pyengine.formats import consume_queue, index_file
from pyengine.formats.consume_queue import (
    decode_ext_address,
    unpack_ext_unit,
)
from pyengine.formats.index_file import IndexEntry, IndexHeader, IndexLayout
from pyengine.formats.paths import StorePaths, is_index_name, parse_segment_name, segment_name, segment_start
from pyengine.formats.small_file import Checkpoint, pack_checkpoint, unpack_checkpoint


def test_a_queue_entry_has_rocketmqs_bytes():
    data = consume_queue.ENTRY.pack(0x123456789, 0x83, -2147483648)
    assert data.hex() == "0000000123456789" "00000083" "ffffffff80000000"
    assert consume_queue.unpack_entry(b"x" + data, 1) == (0x123456789, 0x83, -2147483648)
    with pytest.raises(FormatError):
        consume_queue.unpack_entry(data, 1)


def test_filler_and_live_entries():
    assert consume_queue.FILLER_BYTES.hex() == "0000000000000000" "7fffffff" "0000000000000000"
    filler = consume_queue.unpack_entry(consume_queue.FILLER_BYTES)
    assert consume_queue.is_filler(filler) and consume_queue.is_live(filler)
    assert not consume_queue.is_filler((0, 91, 0)) and consume_queue.is_live((0, 91, 0))
    assert not consume_queue.is_live((0, 0, 0))
    assert not consume_queue.is_live((-1, 91, 0))


def test_extension_addresses_never_clash_with_tag_hashes():
    assert consume_queue.is_ext_address(-2147483649)
    assert not consume_queue.is_ext_address(-2147483648)
    assert decode_ext_address(-9223372036854775780) == 28
    with pytest.raises(FormatError):
        decode_ext_address(5)


def test_an_extension_unit_is_read_and_half_of_one_is_refused():
    unit = bytes.fromhex("001c" "00000000000d1457" "0000018bd50bcf78" "0008" "539bcf5a20130d7b")
    found = unpack_ext_unit(b"xx" + unit, 2)
    assert found == (28, 857175, 1700086402936, bytes.fromhex("539bcf5a20130d7b"))
    assert unpack_ext_unit(b"\xff\xff") is None
    assert unpack_ext_unit(b"\0\0") is None
    assert unpack_ext_unit(unit, len(unit)) is None
    with pytest.raises(FormatError):
        unpack_ext_unit(unit[:-1])
    with pytest.raises(FormatError):
        unpack_ext_unit(unit[:18] + b"\x00\x09" + unit[20:])


def test_slots_and_entries_of_an_index_file_are_where_rocketmq_has_them():
    layout = IndexLayout(5000000, 20000000)
    assert layout.size_bytes == 420000040
    small = IndexLayout(16, 10)
    assert small.slot_at(0) == 40
    assert small.slot_at(15) == 100
    assert small.entry_at(1) == 40 + 64 + 20
    assert small.entry_at(9) + 20 == small.size_bytes
    assert small.slot_of(33) == 1
    assert not small.is_full(9) and small.is_full(10)


def test_an_index_header_has_rocketmqs_bytes():
    header = IndexHeader(1, 2, 3, 4, 5, 6)
    data = index_file.HEADER.pack(*header)
    assert data.hex() == "".join(f"{value:016x}" for value in (1, 2, 3, 4)) + "0000000500000006"
    assert index_file.unpack_header(data) == header
    assert index_file.unpack_header(bytes(40)).index_count == 1  # 0 on disk until the first key
    with pytest.raises(FormatError):
        index_file.unpack_header(bytes(39))


def test_index_entry_and_slot():
    entry = IndexEntry(2539445, 0x83, 7, 3)
    data = index_file.ENTRY.pack(*entry)
    assert data.hex() == "0026bfb5" "0000000000000083" "00000007" "00000003"
    assert index_file.unpack_entry(data) == entry
    assert index_file.unpack_slot(b"\0\0\0\x05", 0, 5) == 5
    for stored in (0, -1, 6):
        assert index_file.unpack_slot(index_file.SLOT.pack(stored), 0, 5) == 0
    with pytest.raises(FormatError):
        index_file.unpack_entry(data, 1)
    with pytest.raises(FormatError):
        index_file.unpack_slot(b"", 0, 5)


def test_a_checkpoint_has_three_times_in_rocketmqs_bytes():
    checkpoint = Checkpoint(10_000, 9_000, 5_000)
    data = pack_checkpoint(checkpoint)
    assert len(data) == 4096
    assert data[:24].hex() == f"{10_000:016x}{9_000:016x}{5_000:016x}"
    assert not any(data[24:])
    assert unpack_checkpoint(data) == checkpoint
    assert checkpoint.min_timestamp_ms == 6_000
    assert checkpoint.min_timestamp_index_ms == 5_000
    assert Checkpoint(2_000, 9_000, 5_000).min_timestamp_ms == 0
    with pytest.raises(FormatError):
        unpack_checkpoint(data[:23])


def test_a_segment_is_named_by_twenty_digits_of_its_offset():
    assert segment_name(1073741824) == "00000000001073741824"
    assert parse_segment_name("00000000001073741824") == 1073741824
    for name in ("0", "0000000000107374182x", "+0000000001073741824", "\u0660" * 20, "00000000001073741824.tmp",
                  "18446744073709551616", "09223372036854775807"):
        assert parse_segment_name(name) is None
    with pytest.raises(ValueError):
        segment_name(-1)
    assert [segment_start(offset, 4096) for offset in (0, 4095, 4096)] == [0, 0, 4096]
    assert is_index_name("20261121043414987") and not is_index_name("2026112104341498")


def test_the_files_of_a_store_are_where_rocketmq_has_them():
    paths = StorePaths("/store")
    assert str(paths.queue_folder("T", 3)) == "/store/consumequeue/T/3"
    assert str(paths.queue_ext_folder("T", 3)) == "/store/consumequeue_ext/T/3"
    assert str(paths.commit_log_segment(4096)) == "/store/commitlog/00000000000000004096"
    assert [str(path) for path in (paths.index, paths.config, paths.checkpoint, paths.abort, paths.lock, paths.quarantine)] == [
        f"/store/{name}" for name in ("index", "config", "checkpoint", "abort", "lock", "quarantine")
    ]
