"""A slave's recovery makes the queues of which only its master has told, and no others."""

from __future__ import annotations

import os

import pytest

from pyengine.errors import FormatError
from pyengine.formats.consume_queue import ENTRY
from pyengine.storage.config import EngineConfig
from pyengine.storage.consume_queue import find_queue_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.queue_ends import NAME, decode_queue_ends, encode_queue_ends, keep_queue_ends

GEOMETRY = EngineConfig(mapped_file_size_consume_queue_bytes=4000).geometry
MIN, END = 4096, 8192


def store_at(folder) -> MessageStore:
    (folder / "config").mkdir(parents=True)
    return MessageStore(folder, GEOMETRY)


def note(store: MessageStore, ends: dict, end: int = END) -> None:
    queues: dict = {}
    for (topic, queue_id), number in ends.items():
        queues.setdefault(topic, {})[str(queue_id)] = number
    (store.config / NAME).write_text(f'{{"end": {end}, "queues": {queues}}}'.replace("'", '"'))


def ends_of(store: MessageStore) -> dict:
    return decode_queue_ends(encode_queue_ends(store, lambda: END).decode())[1]


@pytest.mark.parametrize("count", [1, 40])
def test_queues_are_made_as_long_as_the_master_said(tmp_path, count):
    store = store_at(tmp_path)
    wanted = {("T", number): 1 + 99 * number for number in range(count)} | {("U", 7): 200, ("V", 0): 201}
    note(store, wanted)
    assert keep_queue_ends(store, MIN, END, {}) == wanted == ends_of(store)
    assert os.listdir(store.config) == []
    assert find_queue_end(store.queue_folder("U", 7), 4000) == (200, 1), "its last message is deleted: it is below the log"
    assert keep_queue_ends(store, MIN, END, {}) == {}


def test_a_run_that_was_killed_is_done_again(tmp_path):
    store = store_at(tmp_path)
    note(store, {("T", 0): 5, ("T", 1): 6, ("T", 2): 7})
    folder = store.queue_folder("T", 1)
    folder.mkdir(parents=True)
    (folder / f"{0:020d}").write_bytes(bytes(4000))
    keep_queue_ends(store, MIN, END, {("T", 1): 5})
    assert ends_of(store) == {("T", 0): 5, ("T", 1): 6, ("T", 2): 7}


def test_a_queue_that_goes_as_far_stays_as_it_is(tmp_path):
    store = store_at(tmp_path)
    folder = store.queue_folder("T", 0)
    folder.mkdir(parents=True)
    content = ENTRY.pack(MIN, 100, 0).ljust(4000, b"\0")
    (folder / f"{0:020d}").write_bytes(content)
    note(store, {("T", 0): 9, ("U", 0): 2})
    assert keep_queue_ends(store, MIN, END, {("T", 0): 9}) == {("U", 0): 2}
    assert (folder / f"{0:020d}").read_bytes() == content


@pytest.mark.parametrize(("min_offset", "end"), [(MIN, END - 1), (0, END)])
def test_a_log_that_lost_messages_or_that_begins_at_its_first_byte_takes_none(tmp_path, min_offset, end):
    """The first messages of these queues may come, or come again."""
    store = store_at(tmp_path)
    note(store, {("T", 0): 9})
    assert keep_queue_ends(store, min_offset, end, {}) == {} == ends_of(store)
    assert not (store.config / NAME).exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"end": 1}', '{"end": "x", "queues": {}}', '{"end": 1, "queues": {"T": {"0": -1}}}',
                                  '{"end": 1, "queues": {"T": {"0": 1e99}}}', '{"end": 1, "queues": {"T": 3}}'])
def test_a_note_of_another_shape_is_not_used(tmp_path, text):
    with pytest.raises(FormatError):
        decode_queue_ends(text)
    store = store_at(tmp_path)
    (store.config / NAME).write_text(text)
    assert keep_queue_ends(store, MIN, END, {}) == {}


def test_names_that_are_no_queues_are_left_out():
    assert decode_queue_ends('{"end": 1, "queues": {"../T": {"0": 1}, "T": {"-1": 1, "01": 1, "x": 1, "3": 4}}}') == (1, {("T", 3): 4})
