"""A disk that fails under a real file system: after a failed sync only what the disk has is used.

The kernel marks pages clean that it could not write. A reader that has them mapped keeps them in memory, so a
recovery that reads well and syncs again with success proves nothing: what counts is what is on the disk.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pyengine
from crash.board import Board
from faults.logged_disk import NO_WRITES, LoggedDisk, build_server, logged_disk
from faults.memory_folder import memory_folder
from faults.mounts import mount, with_own_mounts
from fix_golden import usual
from pyengine.cli.engine_status import engine_status
from pyengine.cli.torture import kill_engine, remove_memory
from pyengine.engine.embedded import start_engine, stop_engine
from pyengine.engine_config import MODES
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.paths import StorePaths
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.checkpoint import note_sync_failure, read_sync_failure
from pyengine.storage.mapped_file import used_end
from waiting import eventually, scaled_timeout_s

pytestmark = pytest.mark.block

GOOD, BAD = b"reaches the disk ", b"never reaches the disk "
MESSAGES = 40
BODY_BYTES = 1500
ZEROS_BYTES = 32768  # more than metadata have in a row
SETTINGS = {"mapped_file_size_commit_log_bytes": 1 << 20, "mapped_file_size_consume_queue_bytes": 1000 * CQ_ENTRY_BYTES,
            "max_hash_slot_num": 100, "max_index_num": 400, "flush_interval_commit_log_ms": 20,
            "flush_interval_consume_queue_ms": 20}
# So that the messages that fail go beyond them, and more zeros with them.
FEW_ZEROS = {"zero_ahead_bytes": 16384, "sync_flush_timeout_ms": 500}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_server(tmp_path_factory.mktemp("server"))


def put_all(root: Path, text: bytes) -> None:
    """Messages that say `text` all over, all of them in one pass of the writer."""
    with pyengine.connect(root, refusals="return") as producer:
        assert producer.put_many("T", [text * (BODY_BYTES // len(text))] * MESSAGES).stored


def read_all(reader: LiveStoreReader) -> int:
    """How many messages can be read, all of them through the reader's mapping."""
    at = count = 0
    while found := reader.get_message("T", 0, at, level="committed").messages:
        at = found[-1].queue_offset + 1
        count += len(found)
    return count


def worker(root: Path, kind: str) -> dict:
    return next(one for one in engine_status(root, {})["workers"] if one["kind"] == kind)


def recover(root: Path) -> tuple[int, dict]:
    done = subprocess.run([sys.executable, "-P", "-m", "pyengine", "recover", str(root), "--json"], capture_output=True, text=True,
                          timeout=scaled_timeout_s(120))
    print(done.returncode, done.stdout, done.stderr)
    return done.returncode, json.loads(done.stdout or "{}")


@contextlib.contextmanager
def restarted(disk: LoggedDisk, scratch: Path):
    """The store's folder on a machine that is started with the disk as it is now."""
    place, copy = scratch / "other", scratch / "copy"
    place.mkdir(exist_ok=True)
    copy.write_bytes(disk.snapshot())
    with open(copy, "rb+") as file, mount(file.fileno(), place, disk.kind.name):
        yield place / disk.store.name


def messages_on_the_disk(disk: LoggedDisk, scratch: Path) -> int:
    with restarted(disk, scratch) as root, pyengine.open_store(root) as reader:
        return read_all(reader)


@contextlib.contextmanager
def failing(program: Path, otherwise: Path, **settings: object):
    """(disk, scratch folder) of an engine whose messages are flushed and whose disk fails writes from here on; killed and removed after."""
    with memory_folder(otherwise) as scratch, logged_disk(program, scratch) as disk:
        root = disk.store
        start_engine(root, SETTINGS | settings | {"shm_directory": str(scratch)})
        try:
            put_all(root, GOOD)
            eventually(lambda: engine_status(root, {})["unflushed_bytes"] == 0, "all is flushed")
            disk.fail_writes_with(BAD)
            yield disk, scratch
        finally:
            kill_engine(root)
            remove_memory(root)


def fail_then_recover(program: Path, otherwise: Path, memory_stays: bool, mode: str, is_mapped: bool) -> dict:
    """The counts of what was readable; if `is_mapped` to a reader that has the log mapped from before the failure on.

    More messages are put when the store is recovered: `on_disk` counts them too.
    """
    settings = MODES[mode] | FEW_ZEROS
    with failing(program, otherwise, **settings) as (disk, scratch):
        root = disk.store
        with pyengine.open_store(root) as reader:
            eventually(lambda: read_all(reader) == MESSAGES, "all is dispatched")
            put_all(root, BAD)
            failure = eventually(lambda: read_sync_failure(root), "the failed sync is noted on the disk")
            is_frozen = engine_status(root, {})["read_only"]
            eventually(lambda: read_all(reader) == 2 * MESSAGES, "the reader has all of it mapped")
            kill_engine(root)
            if not is_mapped:
                reader.close()
            if not memory_stays:
                remove_memory(root)
            first, _ = recover(root)
            disk.fail_writes_with(NO_WRITES)
            second, report = recover(root)
            with pyengine.open_store(root) as another:
                readable = read_all(reader if is_mapped else another)
            start_engine(root, SETTINGS | settings | {"shm_directory": str(scratch)})
            put_all(root, GOOD)
            assert stop_engine(root)
        return {"flushed": failure.flushed, "frozen": is_frozen, "first": first, "second": second,
                "kept": report["messages"], "readable": readable, "on_disk": messages_on_the_disk(disk, scratch),
                "still_noted": read_sync_failure(root) is not None}


def store_zeros_that_fail(disk: LoggedDisk) -> None:
    """Store zeros into the pages after the log's end, as the writer does ahead of it, where no write reaches the disk."""
    path = StorePaths(disk.store).commit_log_segment(0)
    disk.fail_writes_with(bytes(ZEROS_BYTES))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for at in range(used_end(path) + mmap.PAGESIZE, len(memory), mmap.PAGESIZE):
            memory[at] = 0


def lose_who_saw_it_fail(program: Path, otherwise: Path, seen_by: str, mode: str, fails_on: str) -> int:
    """How many messages are on the disk, which works again, after flusher and writer died between a failed sync and its note.

    `seen_by`: whose sync failed, the flusher's or the writer's for a new flusher; `fails_on`: of messages, or of zeros alone. The other
    one is killed first, and its successor opens the log when the kernel has told of the failure. More messages are put after that.
    """
    board = Board(otherwise / "board")
    os.environ[VARIABLE] = str(board.path)
    with failing(program, otherwise, **MODES[mode], **FEW_ZEROS) as (disk, scratch):
        root = disk.store
        board.arm("sync_failed", action="stop", process=seen_by)
        flusher = worker(root, "flusher")["pid"]
        if seen_by == "writer":
            os.kill(flusher, signal.SIGSTOP)
        if fails_on == "messages":
            put_all(root, BAD)
        else:
            store_zeros_that_fail(disk)
        if seen_by == "writer":
            os.kill(flusher, signal.SIGKILL)
        struck = eventually(lambda: board.struck_pid, "a sync has failed")
        disk.fail_writes_with(NO_WRITES)
        other = "flusher" if seen_by == "writer" else "writer"
        pid = worker(root, other)["pid"]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: worker(root, other)["pid"] != pid and worker(root, other)["state"] == "ready", f"the next {other} is there")
        os.kill(struck, signal.SIGKILL)
        eventually(lambda: engine_status(root, {})["unflushed_bytes"] == 0, "all is flushed")
        put_all(root, GOOD)
        assert stop_engine(root)
        return messages_on_the_disk(disk, scratch)


@pytest.mark.parametrize("seen_by, mode, fails_on", [
    *usual([("flusher", "async", "messages"), ("writer", "async", "messages")], [], pytest.mark.ci),
    ("flusher", "sync", "messages"), ("writer", "sync", "zeros")])
def test_flushed_messages_are_on_the_disk_after_flusher_and_writer_died_at_a_failed_sync(program, tmp_path, seen_by, mode, fails_on):
    """Also those in blocks that had only zeros when they could not be written (sync), or when all messages were flushed (zeros)."""
    count = with_own_mounts(lose_who_saw_it_fail, program, tmp_path, seen_by, mode, fails_on)
    assert count == (3 if fails_on == "messages" else 2) * MESSAGES


def write_after_recovery(program: Path, otherwise: Path, is_noted: bool) -> None:
    """Zeros after the log's end are stored, mapped by a reader and not written, for the disk fails; the engine dies, and has noted that or
    not (`is_noted`). After a recovery bytes are put in their place, and the machine restarts.
    """
    with failing(program, otherwise, **MODES["sync"], **FEW_ZEROS) as (disk, scratch):
        path = StorePaths(disk.store).commit_log_segment(0)
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            end = used_end(path)
            store_zeros_that_fail(disk)
            assert not any(memory[end:])
            kill_engine(disk.store)
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(file.fileno())
            disk.fail_writes_with(NO_WRITES)
            assert not is_noted or note_sync_failure(disk.store, end, str(path), "Input/output error")
            assert recover(disk.store)[0] == 0
            memory[end:] = b"x" * (len(memory) - end)
            os.fsync(file.fileno())
        with restarted(disk, scratch) as root:
            assert StorePaths(root).commit_log_segment(0).read_bytes()[end:].count(b"x") == path.stat().st_size - end


@pytest.mark.parametrize("is_noted", [False, True])
def test_what_is_written_after_a_recovery_is_on_disk_where_zeros_could_not_be_written(program, tmp_path, is_noted):
    """Whoever writes it: the engine's next writer gives zeros new pages, too, but only if the flusher has started before it."""
    with_own_mounts(write_after_recovery, program, tmp_path, is_noted)


@pytest.mark.parametrize("memory_stays, mode, is_mapped", usual(
    [(True, "async", True), (False, "sync", True), (False, "async", False)], [(False, "sync", True)], pytest.mark.ci))
def test_records_kept_by_recovery_after_a_failed_sync_and_later_ones_are_on_disk_also_if_a_reader_maps_them(
        program, tmp_path, memory_stays, mode, is_mapped):
    found = with_own_mounts(fail_then_recover, program, tmp_path, memory_stays, mode, is_mapped)
    print(found)
    assert found["frozen"] and found["flushed"]
    assert (found["first"], found["second"], found["still_noted"]) == (1, 0, False)
    assert 2 * MESSAGES == found["kept"] == found["readable"] == found["on_disk"] - MESSAGES


def kill_on_a_read_only_disk(folder: Path, kind: str) -> tuple[str, str]:
    """(status, reason) of a put after a worker was killed on a disk that became read-only; that worker is back."""
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with open(image, "wb+") as file:
        file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        with mount(file.fileno(), disk, "ext4"):
            root = disk / "store"
            start_engine(root, SETTINGS | {"shm_directory": str(folder)})
            try:
                with pyengine.connect(root, refusals="return") as producer:
                    assert producer.put("T", b"x").ok
                    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
                    pid = worker(root, kind)["pid"]
                    os.kill(pid, signal.SIGKILL)
                    eventually(lambda: worker(root, kind)["pid"] != pid and worker(root, kind)["state"] == "ready", "the next one is there")
                    eventually(lambda: engine_status(root, {})["state"] == "read_only", "the store is read-only")
                    result = producer.put("T", b"x", timeout_s=60)
                    return result.status.name, result.reason
            finally:
                kill_engine(root)
                remove_memory(root)


@pytest.mark.parametrize("kind", ["writer", pytest.param("flusher", marks=pytest.mark.ci)])
def test_a_worker_returns_on_a_disk_that_became_read_only_and_puts_are_refused(tmp_path, kind):
    status, reason = with_own_mounts(kill_on_a_read_only_disk, tmp_path, kind)
    assert status == "SERVICE_NOT_AVAILABLE" and "read-only" in reason
