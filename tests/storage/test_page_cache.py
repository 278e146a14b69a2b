"""What the kernel only remembers is dropped: log segments above `flushed`, and all derived files."""

from __future__ import annotations

import errno
import os

import pytest

from pyengine.formats.paths import StorePaths
from pyengine.storage.page_cache import forget_cached

SIZE = 1 << 20


def is_cached(path, at=0):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [bytearray(100)], at, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        pytest.skip(f"this file system does not tell what is cached ({error.strerror})")
    finally:
        os.close(descriptor)
    return True


def write(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())
    return path


def test_only_what_may_not_be_on_the_disk_is_dropped(tmp_path):
    paths = StorePaths(tmp_path)
    segments = [write(paths.commit_log_segment(start)) for start in (0, SIZE, 2 * SIZE)]
    queue = write(paths.queue_folder("T", 0) / ("0" * 20))
    index = write(paths.index / "20260101000000000")
    assert all(is_cached(path) for path in (*segments, queue, index))
    contents = [path.read_bytes() for path in (*segments, queue, index)]
    assert forget_cached(tmp_path, SIZE + SIZE // 2) == 4
    if is_cached(queue):
        pytest.skip("this file system keeps its files in memory")
    assert is_cached(segments[0])
    assert not is_cached(segments[1], SIZE - 4096) and not is_cached(segments[2]) and not is_cached(index)
    assert [path.read_bytes() for path in (*segments, queue, index)] == contents


def test_no_store_is_nothing_to_drop(tmp_path):
    assert forget_cached(tmp_path / "nothing", 0) == 0
