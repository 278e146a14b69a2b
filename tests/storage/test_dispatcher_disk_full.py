"""A full disk is an error with a name, not a SIGBUS; the same call goes on once there is room."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fix_small_disk import resize
from logs import Log, LogBuilder, files_below, index_contents
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import DiskFullError
from pyengine.formats.constants import INDEX_ENTRY_BYTES
from pyengine.native.dispatch import INDEX_WINDOW_BYTES
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.index_file import first_bytes

pytestmark = pytest.mark.root

SEGMENT = 4 << 20
QUEUES_ONLY = Geometry(SEGMENT, mapped_file_size_consume_queue_bytes=400_000, max_hash_slot_num=64, max_index_num=500)
SMALL_QUEUES = Geometry(SEGMENT, mapped_file_size_consume_queue_bytes=4000, max_hash_slot_num=64, max_index_num=5000)


@pytest.fixture
def small_disk(make_small_disk):
    return make_small_disk("512k")


def outcome(root: Path) -> tuple[dict[str, bytes], list[bytes]]:
    return files_below(root / "consumequeue"), index_contents(root)


@pytest.mark.parametrize(
    ("geometry", "topics", "ballast_bytes"),
    [
        (QUEUES_ONLY, ["T"], 250_000),  # no room for a window in the middle of a queue file
        (QUEUES_ONLY, [f"t{number}" for number in range(30)], 0),  # none for one more queue
        (SMALL_QUEUES, ["T"], 350_000),  # none for an index file
    ],
)
def test_a_full_disk_stops_the_dispatch_and_room_lets_it_continue(geometry, topics, ballast_bytes, small_disk, tmp_path):
    builder = LogBuilder(SEGMENT)
    keys = geometry is SMALL_QUEUES
    for number in range(14_000):
        builder.append(topics[number % len(topics)], b"", properties=f"KEYS\x01k{number}" if keys else "")
    log = Log(builder.write(tmp_path / "log"), SEGMENT)
    with Dispatcher(tmp_path / "undisturbed", geometry, EngineConfig(message_index_enable=keys)) as dispatcher:
        log.dispatch(dispatcher)

    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * ballast_bytes)
    with Dispatcher(small_disk, geometry, EngineConfig(message_index_enable=keys)) as dispatcher:
        for _ in range(3):  # it stays an error as long as there is no room
            with pytest.raises(DiskFullError) as raised:
                log.dispatch(dispatcher)
            assert raised.value.errno == errno.ENOSPC
            assert str(small_disk) in str(raised.value)
        ballast.unlink()
        resize(small_disk, "64m")
        assert log.dispatch(dispatcher) == builder.end
    assert outcome(small_disk) == outcome(tmp_path / "undisturbed")


def test_an_index_file_gets_its_blocks_as_it_fills(make_small_disk, tmp_path):
    """Its length is there at once. Without room for the next window the key waits, and no store meets a hole."""
    geometry = Geometry(SEGMENT, mapped_file_size_consume_queue_bytes=4000, max_hash_slot_num=64, max_index_num=500_000)
    window_keys = INDEX_WINDOW_BYTES // INDEX_ENTRY_BYTES
    builder = LogBuilder(SEGMENT)
    for number in range(2 * window_keys // 1000):
        builder.append("T", b"", properties="KEYS\x01" + " ".join(f"{number:x}-{key:x}" for key in range(1000)))
    log = Log(builder.write(tmp_path / "log"), SEGMENT)
    with Dispatcher(tmp_path / "undisturbed", geometry) as dispatcher:
        log.dispatch(dispatcher)
    disk = make_small_disk("6m")
    with Dispatcher(disk, geometry) as dispatcher:
        for _ in range(3):
            with pytest.raises(DiskFullError):
                log.dispatch(dispatcher)
        (file,) = (disk / "index").iterdir()
        assert file.stat().st_size == geometry.index_layout.size_bytes
        assert file.stat().st_blocks * 512 == first_bytes(geometry.index_layout) == INDEX_WINDOW_BYTES
        resize(disk, "64m")
        assert log.dispatch(dispatcher) == builder.end
        assert INDEX_WINDOW_BYTES < file.stat().st_blocks * 512 < file.stat().st_size
    assert outcome(disk) == outcome(tmp_path / "undisturbed")
