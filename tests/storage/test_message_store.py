"""MessageStore: paths, sizes and state files of a store, as one value that can be sent to another process."""

from __future__ import annotations

import os
import pickle

import pytest

from pyengine.engine_config import Geometry
from pyengine.storage.message_store import DEFAULTS, MessageStore

SIZES = Geometry(mapped_file_size_commit_log_bytes=4096, mapped_file_size_consume_queue_bytes=2000)


def make_log(store: MessageStore, starts: tuple[int, ...]) -> None:
    store.commit_log.mkdir(parents=True)
    for start in starts:
        store.commit_log_segment(start).write_bytes(bytes(4096))


def test_sizes_come_from_the_configuration_or_from_the_files(tmp_path):
    make_log(MessageStore(tmp_path), (0, 4096))
    for store in (MessageStore(tmp_path, SIZES), MessageStore(str(tmp_path))):
        assert store.segment_bytes == 4096
        assert [segment.start_offset for segment in store.list_log()] == [0, 4096]
        assert [segment.start_offset for segment in store.list_complete_log()] == [0, 4096]
    assert MessageStore(tmp_path, SIZES).queue_file_bytes == 2000
    assert MessageStore(tmp_path).geometry.max_index_num == DEFAULTS.max_index_num


def test_it_is_a_value(tmp_path):
    store = MessageStore(tmp_path, SIZES)
    with pytest.raises(AttributeError):
        store.root = tmp_path / "other"
    again = pickle.loads(pickle.dumps(store))
    assert (again, again.geometry, hash(again)) == (store, SIZES, hash(store))
    assert MessageStore(store).root == tmp_path and os.fspath(store) == str(store) == str(tmp_path)
