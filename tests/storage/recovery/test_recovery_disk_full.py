"""Recovery on a full disk: it manages with the room that spare segments give, or says in a sentence what it needs."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace

import pytest

from fix_cli import run
from fix_small_disk import resize
from pyengine.engine_config import Geometry
from pyengine.errors import DiskFullError
from pyengine.storage.checkpoint import create_abort_file
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from pyengine.storage.store_reader import StoreReader

pytestmark = pytest.mark.root

LARGE_SEGMENTS = Geometry(
    mapped_file_size_commit_log_bytes=128 << 10, mapped_file_size_consume_queue_bytes=400, max_hash_slot_num=16, max_index_num=400
)


@pytest.fixture
def store_on_full_disk(build_store, make_small_disk):
    """store_on_full_disk(...) -> a killed store without queues on a disk that has no byte left, as build_store makes it."""

    def build(**how):
        built = build_store(400, **how)
        disk = make_small_disk("1m")
        shutil.copytree(built.root, disk / "store")
        store = replace(built, root=disk / "store")
        create_abort_file(store.root)
        with open(disk / "ballast", "wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        return disk, store

    return build


def log_of(store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.root / "commitlog").iterdir()}


def make_a_little_room(disk) -> None:
    """Enough for the marker, not for queues."""
    with open(disk / "ballast", "r+b") as ballast:
        ballast.truncate((disk / "ballast").stat().st_size - 4 * 4096)


def test_without_room_for_queues_it_says_so_and_the_log_stays(store_on_full_disk):
    disk, store = store_on_full_disk(spare=False)
    before = log_of(store)
    with pytest.raises(DiskFullError):  # not even the marker has room
        recover(MessageStore(store.root, store.geometry))
    make_a_little_room(disk)
    for _ in range(2):
        with pytest.raises(DiskFullError, match=f"whole up to offset {store.end}.*free some and recover again"):
            recover(MessageStore(store.root, store.geometry))
        assert log_of(store) == before
    resize(disk, "16m")
    report = recover(MessageStore(store.root, store.geometry))
    assert (report.end_offset, dict(report.queue_ends)) == (store.end, store.queue_ends(store.end))


def test_the_command_says_it_in_one_sentence(store_on_full_disk):
    disk, store = store_on_full_disk(spare=False)
    make_a_little_room(disk)
    ran = run("recover", store.root)
    assert ran.code == 1
    assert ran.stderr.count("\n") == 1 and "free some and recover again" in ran.stderr


def test_spare_segments_are_room_for_the_rest(store_on_full_disk):
    """The allocator's segment ahead goes first; here it is large enough for queues and index."""
    disk, store = store_on_full_disk(spare=True, geometry=LARGE_SEGMENTS)
    report = recover(MessageStore(store.root, store.geometry))
    assert (report.end_offset, dict(report.queue_ends)) == (store.end, store.queue_ends(store.end))
    with StoreReader(store.root) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                assert reader.get_message(topic, queue_id, 0, max_messages=1).messages


def test_blocks_that_were_reserved_after_the_end_make_room(store_on_full_disk):
    """A spare segment has none to give; the last segment has what was reserved ahead of the writer."""
    disk, store = store_on_full_disk(spare=False, geometry=replace(LARGE_SEGMENTS, mapped_file_size_commit_log_bytes=512 << 10))
    report = recover(MessageStore(store.root, store.geometry))
    assert (report.end_offset, dict(report.queue_ends)) == (store.end, store.queue_ends(store.end))
    (segment,) = (store.root / "commitlog").iterdir()
    assert segment.stat().st_size == 512 << 10 > segment.stat().st_blocks * 512 >= store.end
