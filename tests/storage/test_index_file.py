"""Queue extensions, and index files whose chains are damaged or many."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from fix_store_builder import SMALL, START_MS, StoreBuilder, queue_of
from pyengine.errors import FormatError
from pyengine.formats import index_file
from pyengine.formats.index_file import IndexEntry, IndexHeader, IndexLayout
from pyengine.formats.record import index_key_hash, string_hash
from pyengine.results import GetStatus
from pyengine.storage.index_file import IndexService, KeyQuery, query_raw
from pyengine.storage.store_reader import StoreReader
from record_bytes import encode_ext_address


def ext_unit(tags_code: int, bit_map: bytes) -> bytes:
    return struct.pack(">hqqh", 20 + len(bit_map), tags_code, START_MS, len(bit_map)) + bit_map


def test_tags_are_looked_up_in_the_extension(builder):
    first = builder.put("T", b"1", tags="a")
    second = builder.put("T", b"2", tags="b")
    lost = builder.put("T", b"3", tags="a")
    folder = builder.paths.queue_ext_folder("T", 0)
    folder.mkdir(parents=True)
    units = ext_unit(string_hash("a"), b"\1\2") + ext_unit(string_hash("b"), b"")
    (folder / f"{0:020d}").write_bytes((units + b"\xff\xff").ljust(512, b"\0"))
    for message, at in ((first, 0), (second, 22), (lost, 42)):  # 42: the end mark
        builder.write_entry("T", 0, message.queue_offset, message.physical_offset, message.size_bytes,
                            encode_ext_address(at))
    with StoreReader(builder.root) as store:
        assert [m.body for m in store.get_message("T", 0, 0, tags="b").messages] == [b"2"]
        # Without a unit the hash is not known; the text decides.
        assert [m.body for m in store.get_message("T", 0, 0, tags="a").messages] == [b"1", b"3"]
        queue = queue_of(store, "T", 0)
        assert queue.ext_unit(encode_ext_address(0)).filter_bit_map == b"\1\2"
        assert queue.ext_unit(encode_ext_address(42)) is None
        assert queue.ext_unit(encode_ext_address(512)) is None
        with pytest.raises(FormatError):
            queue.ext_unit(5)


def test_the_end_of_a_queue_for_limits_in_any_order(builder, rng):
    """The last answer is a hint for the next one, never more."""
    messages = [builder.put("T") for _ in range(37)]
    with StoreReader(builder.root) as store:
        queue = queue_of(store, "T", 0)
        for _ in range(300):
            limit = rng.randrange(builder.end + 100)
            expected = sum(message.physical_offset + message.size_bytes <= limit for message in messages)
            assert queue.max_offset(limit) == expected
        for left in (36, 31, 30, 29, 21, 1):  # entries are cut by a recovery
            for number in range(left, 37):
                builder.write_entry("T", 0, number, 0, 0, 0)
            assert queue.max_offset(builder.end) == left


LAYOUT = IndexLayout(4, 10)
HASH = index_key_hash("T", "k")


def index(tmp_path, *files: tuple[IndexHeader, dict[int, IndexEntry]], head: int = 0) -> IndexService:
    """Index files with these headers and entries; the slot of HASH holds `head`, or the newest entry."""
    for number, (header, entries) in enumerate(files):
        data = bytearray(LAYOUT.size_bytes)
        data[:40] = index_file.HEADER.pack(*header)
        index_file.SLOT.pack_into(data, LAYOUT.slot_at(LAYOUT.slot_of(HASH)), head or max(entries, default=0))
        for at, entry in entries.items():
            data[LAYOUT.entry_at(at) : LAYOUT.entry_at(at) + 20] = index_file.ENTRY.pack(*entry)
        (tmp_path / f"{number:017d}").write_bytes(data)
    return IndexService(tmp_path, LAYOUT)


def header(count: int, begin_s: int = 100, end_s: int = 200) -> IndexHeader:
    return IndexHeader(begin_s * 1000, end_s * 1000, 0, 0, 1, count)


def ask(reader: IndexService, begin_s: int = 0, end_s: int = 10**9) -> list[int]:
    return list(reader.hits(KeyQuery("T", "k", 64, begin_s * 1000, end_s * 1000)))


def chain(*offsets: int, time_s: int = 0) -> dict[int, IndexEntry]:
    return {number: IndexEntry(HASH, offset, time_s, number - 1) for number, offset in enumerate(offsets, start=1)}


def test_a_chain_is_walked_from_the_newest(tmp_path):
    assert ask(index(tmp_path, (header(4), chain(10, 20, 30)))) == [30, 20, 10]


def test_entries_of_other_hashes_are_skipped(tmp_path):
    entries = chain(10, 20, 30)
    entries[2] = entries[2]._replace(key_hash=HASH + 4)
    assert ask(index(tmp_path, (header(4), entries))) == [30, 10]


@pytest.mark.parametrize("previous", [3, 4, 7, -1, 0])
def test_a_previous_number_that_leads_nowhere_ends_the_chain(tmp_path, previous):
    entries = chain(10, 20, 30)
    entries[3] = entries[3]._replace(previous=previous)
    assert ask(index(tmp_path, (header(4), entries))) == [30]


def test_a_circle_ends(tmp_path):
    entries = chain(10, 20, 30)
    entries[1] = entries[1]._replace(previous=3)
    found = ask(index(tmp_path, (header(4), entries)))
    assert set(found) == {10, 20, 30} and len(found) <= 4


def test_a_negative_time_ends_the_chain(tmp_path):
    entries = chain(10, 20, 30)
    entries[2] = entries[2]._replace(time_diff_s=-1)
    assert ask(index(tmp_path, (header(4), entries))) == [30]


@pytest.mark.parametrize("head", [5, -1, 1 << 30])
def test_a_slot_out_of_range_is_empty(tmp_path, head):
    assert ask(index(tmp_path, (header(4), chain(10, 20, 30)), head=head)) == []


def test_a_count_beyond_the_file_is_survived(tmp_path):
    entries = chain(10, 20, 30)
    entries[3] = entries[3]._replace(previous=50)
    assert ask(index(tmp_path, (header(1000), entries))) == [30]


def test_files_from_the_newest_back_to_the_asked_begin(tmp_path):
    files = [(header(3, 100 * n, 100 * n + 50), chain(1000 * n, 1000 * n + 1)) for n in (1, 2, 3)]
    reader = index(tmp_path, *files)
    assert ask(reader) == [3001, 3000, 2001, 2000, 1001, 1000]
    assert query_raw(reader, lambda offset: offset, KeyQuery("T", "k", 3)) == [2001, 3000, 3001]
    assert ask(reader, begin_s=200) == [3001, 3000, 2001, 2000]
    assert ask(reader, begin_s=200, end_s=250) == [2001, 2000]
    assert ask(reader, begin_s=260, end_s=290) == []


def test_a_file_without_keys_gives_nothing_and_names_that_are_no_number_are_passed(tmp_path):
    reader = index(tmp_path, (header(3), chain(10, 20)), (IndexHeader(), {}))
    (tmp_path / "notes.txt").write_bytes(b"hello")
    assert ask(reader) == [20, 10]
    assert [name for name, _ in reader.headers()] == [f"{0:017d}", f"{1:017d}"]
    assert IndexService(tmp_path / "nowhere", LAYOUT).headers() == []


def test_a_replaced_index_file_is_read_again(tmp_path):
    reader = index(tmp_path, (header(3), chain(10, 20)))
    assert ask(reader) == [20, 10]
    (tmp_path / f"{0:017d}").unlink()
    index(tmp_path, (header(2), chain(70)))
    assert ask(reader) == [70]


def test_random_stores_read_like_a_plain_list(tmp_path, rng):
    """Any mix of topics, queues, tags, sizes and asked numbers: a queue read to its end is the list that was put."""
    builder = StoreBuilder(tmp_path / "store", dataclasses.replace(SMALL, max_index_num=4000))
    put: dict[tuple[str, int], list] = {}
    for _ in range(300):
        topic, queue_id = rng.choice("ABC"), rng.randrange(3)
        tags = rng.choice([None, "a", "b", "Aa", "BB"])
        message = builder.put(topic, rng.randbytes(rng.randrange(300)), queue_id=queue_id, tags=tags,
                              keys=rng.choice([None, "k", "k j"]))
        put.setdefault((topic, queue_id), []).append(message)
    end = rng.randrange(builder.end // 2, builder.end + 1)

    class Marks:
        def limit(self, level):
            return end

        queue_limit = limit

    with StoreReader(builder.root, watermark=Marks()) as store:
        for (topic, queue_id), messages in put.items():
            readable = [m for m in messages if m.physical_offset + m.size_bytes <= end]
            for wanted in (None, "a", "a || BB", "x"):
                offset, seen = 0, []
                while True:
                    result = store.get_message(topic, queue_id, offset, rng.randrange(1, 40), tags=wanted)
                    if result.status in (GetStatus.OFFSET_OVERFLOW_ONE, GetStatus.NO_MESSAGE_IN_QUEUE):
                        break
                    assert result.status in (GetStatus.FOUND, GetStatus.NO_MATCHED_MESSAGE)
                    assert result.next_begin_offset > offset
                    seen += result.messages
                    offset = result.next_begin_offset
                tags = None if wanted is None else {tag.strip() for tag in wanted.split("||")}
                assert seen == [m for m in readable if tags is None or m.tags in tags]
            assert store.queue_range(topic, queue_id) == ((0, len(readable)) if readable else (0, 0))
        for topic in "ABC":
            expected = [m for (name, _), messages in put.items() for m in messages if name == topic and m.keys == "k j"]
            expected = [m for m in expected if m.physical_offset + m.size_bytes <= end]
            found = store.query_message(topic, "j", max_messages=1000)
            assert found == sorted(expected, key=lambda m: m.physical_offset)
            assert store.query_message(topic, "j", max_messages=5) == found[-5:]
