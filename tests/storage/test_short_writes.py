"""A write that takes a part of its bytes is continued: in queues and index, and in what recovery writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.failing_calls import build_shim, preload
from logs import Log, LogBuilder, files_below
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.storage.dispatcher import Dispatcher
from waiting import scaled_timeout_s

SEGMENT = 16384
GEOMETRY = Geometry(mapped_file_size_commit_log_bytes=SEGMENT, mapped_file_size_consume_queue_bytes=4000)
SHORT = -1
# argv: folder, what. The n-th write of the folder's files takes half of its bytes, for each n in turn.
PROGRAM = f"""
import ctypes, os, sys
from pathlib import Path
from logs import Log
from pyengine.native import flush
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.durable_writes import write_at
from pyengine.engine_config import EngineConfig, Geometry
folder, what, shim = Path(sys.argv[1]), sys.argv[2], ctypes.CDLL(None)
shim.fail_count.restype = ctypes.c_long
geometry = Geometry(mapped_file_size_commit_log_bytes={SEGMENT}, mapped_file_size_consume_queue_bytes=4000)
bytes_ = bytes(range(1, 201))
for n in range(1, 100):
    root = folder / str(n)
    root.mkdir()
    (root / "file").write_bytes(bytes(300))
    log = Log(folder / "log", {SEGMENT})
    shim.fail_at(str(root).encode(), b"pwrite", ctypes.c_long(n), {SHORT})
    if what == "dispatch":
        with Dispatcher(root, geometry, EngineConfig(message_index_enable=False)) as dispatcher:
            log.dispatch(dispatcher)
    elif what == "log":
        descriptor = os.open(root / "file", os.O_RDWR)
        flush.pwrite_all(descriptor, bytes_, 50)
    else:
        write_at(root / "file", bytes_, 50)
    came = shim.fail_count() >= n
    shim.fail_at(str(folder).encode(), b"", ctypes.c_long(0), 0)
    if not came:
        break
print(n)
"""


@pytest.fixture
def run(tmp_path):
    """run(what) -> the folders of the runs, in each of which one more write was short; the last had no short one."""
    builder = LogBuilder(SEGMENT)
    for number in range(300):
        builder.append(f"topic-{number % 3}")
    builder.write(tmp_path / "log")

    def run(what: str) -> list[Path]:
        path = os.pathsep.join(str(Path(__file__).parents[up]) for up in (1, 2))
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), what], capture_output=True, text=True,
                              timeout=scaled_timeout_s(120),
                              env=os.environ | preload(build_shim(tmp_path)) | {"PYTHONPATH": path})
        assert done.returncode == 0, done.stderr[-3000:]
        return [tmp_path / str(number) for number in range(1, int(done.stdout) + 1)]

    return run


def test_each_queue_entry_is_there_whichever_write_was_short(run, tmp_path):
    with Dispatcher(tmp_path / "undisturbed", GEOMETRY, EngineConfig(message_index_enable=False)) as dispatcher:
        log = Log(tmp_path / "log", SEGMENT)
        log.dispatch(dispatcher)
    runs = run("dispatch")
    assert len(runs) > 3
    expected = files_below(tmp_path / "undisturbed" / "consumequeue")
    assert [root.name for root in runs if files_below(root / "consumequeue") != expected] == []


@pytest.mark.parametrize("what", ["log", "recovery"])
def test_all_bytes_of_a_short_write_arrive(run, what):
    runs = run(what)
    assert len(runs) > 1
    for root in runs:
        assert (root / "file").read_bytes() == bytes(50) + bytes(range(1, 201)) + bytes(50)
