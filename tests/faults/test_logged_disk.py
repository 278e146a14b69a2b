"""The disk that writes down what reaches it: what a careless writer loses is found, and nothing wrong with a careful one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import select
import signal
import stat
import subprocess
import threading
from itertools import product
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from faults import mounts
from faults.logged_disk import BLOCK_BYTES, FILE_SYSTEMS, INODE, JOURNAL_MAGIC, BlockDisk, LoggedDisk, build_server, logged_disk
from faults.loop_device import attached_files
from faults.memory_folder import memory_folder
from faults.mounts import mount, with_own_mounts
from faults.power_cut import Outcome, Record, explore_states
from fix_golden import usual
from waiting import eventually

pytestmark = pytest.mark.block

LINES = 20
LINE_BYTES = 700
SLOW_FLUSH_US = 20_000


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build_server(tmp_path_factory.mktemp("server"))


def line(number: int) -> bytes:
    return b"%08d" % number + bytes([65 + number % 26]) * (LINE_BYTES - 8)


def put_lines(disk: LoggedDisk, forgets: str) -> None:
    """Numbered lines in a file, each acknowledged once it is safe, or sooner."""
    acks = os.open(disk.acks, os.O_WRONLY | os.O_APPEND)
    file = os.open(disk.store / "lines", os.O_CREAT | os.O_RDWR)
    try:
        for number in range(LINES):
            os.pwrite(file, line(number), number * LINE_BYTES)
            if forgets == "order":
                os.write(acks, b"%d\n" % number)
            if forgets != "sync":
                os.fdatasync(file)
            if forgets != "order":
                os.write(acks, b"%d\n" % number)
        if forgets == "sync":
            os.sync()  # so that there is anything on the disk at all
    finally:
        os.close(file)
        os.close(acks)


def check_lines(tree: Path, acks: list[bytes]) -> str | None:
    content = (tree / "lines").read_bytes() if (tree / "lines").exists() else b""
    for number in map(int, b"".join(acks).split()):
        if content[number * LINE_BYTES : (number + 1) * LINE_BYTES] != line(number):
            return f"line {number} is not what was acknowledged"
    return None


def record_lines(program: Path, scratch: Path, forgets: str) -> tuple[LoggedDisk, list[Record]]:
    with logged_disk(program, scratch) as disk:
        put_lines(disk, forgets)
        return disk, disk.records()


def cut_lines(program: Path, otherwise: Path, forgets: str, seed: str, states: int, stop_at: int) -> Outcome:
    with memory_folder(otherwise) as scratch:
        disk, records = record_lines(program, scratch, forgets)
        model, place = BlockDisk(disk.kind, disk.base), scratch / "state"
        place.mkdir()
        return explore_states(records, model, lambda rng: model.state(rng, place), check_lines, states=states, seed=seed,
                              stop_at=stop_at)


def test_a_careful_writer_loses_nothing_and_a_careless_one_is_found(program, tmp_path, seed):
    outcome = with_own_mounts(cut_lines, program, tmp_path, "nothing", seed, 10, 10)
    assert (outcome.bad, outcome.states, outcome.acknowledged) == ([], 10, LINES)
    for forgets in ("sync", "order"):
        outcome = with_own_mounts(cut_lines, program, tmp_path / forgets, forgets, seed, 200, 1)
        assert outcome.bad, f"forgetting {forgets} was not found"


def acknowledge_under_a_flush(program: Path, scratch: Path) -> str:
    """Kinds of the records of lines that are written and synced, until one was accepted in `acks` within a flush."""
    with logged_disk(program, scratch, flush_us=SLOW_FLUSH_US) as disk:
        acks = os.open(disk.acks, os.O_WRONLY | os.O_APPEND)
        file = os.open(disk.store / "lines", os.O_CREAT | os.O_RDWR)

        def sync_under_acknowledgements() -> str:
            os.pwrite(file, line(0), 0)
            syncing = threading.Thread(target=os.fsync, args=(file,))
            syncing.start()
            while syncing.is_alive():
                os.write(acks, b"0\n")
            syncing.join()
            kinds = "".join(record.kind for record in disk.records())
            return kinds if any("A" in part.partition("e")[0] for part in kinds.split("b")[1:]) else ""

        try:
            return eventually(sync_under_acknowledgements, "something is accepted within a flush")
        finally:
            os.close(acks)
            os.close(file)


def test_a_line_acknowledged_during_a_flush_is_recorded_before_the_end_of_the_flush(program, tmp_path):
    """A server that holds everything back meanwhile would hide a position that is moved before its sync."""
    kinds = with_own_mounts(acknowledge_under_a_flush, program, tmp_path)
    assert kinds.startswith("F") and kinds.count("b") == kinds.count("e") > 0


def fed(disk: BlockDisk) -> BlockDisk:
    for record in (Record("F", INODE, 0, b"", b""), Record("W", INODE, 0, b"a" * 512, b""), Record("b", INODE, 1, b"", b""),
                   Record("W", INODE, 512, b"b" * 512, b""), Record("e", INODE, 1, b"", b"")):
        disk.feed(record)
    return disk


def image_of(disk: BlockDisk, rng: random.Random) -> bytes:
    image = os.memfd_create("test")
    try:
        disk.write(image, rng)
        return os.pread(image, 1 << 20, 0)
    finally:
        os.close(image)


def test_a_flush_covers_writes_from_before_its_begin(rng):
    disk = fed(BlockDisk(FILE_SYSTEMS["ext4"], bytes(8192)))
    states = {image_of(disk, rng) for _ in range(100)}
    assert states == {b"a" * 512 + second * 512 + bytes(8192 - 1024) for second in (b"b", bytes(1))}


def test_a_cut_before_everything_changes_nothing_for_those_after_it(rng):
    disk = BlockDisk(FILE_SYSTEMS["ext4"], b"z" * 8192)
    assert image_of(disk, rng) == b"z" * 8192
    assert image_of(fed(disk), rng).startswith(b"a" * 512)


def test_a_write_of_many_blocks_survives_in_any_part_but_for_what_the_file_system_needs_whole(rng):
    journal = JOURNAL_MAGIC + b"j" * (BLOCK_BYTES - len(JOURNAL_MAGIC))
    disk = BlockDisk(FILE_SYSTEMS["ext4"], bytes(5 * BLOCK_BYTES))
    disk.feed(Record("W", INODE, BLOCK_BYTES, b"d" * (2 * BLOCK_BYTES) + journal, b""))
    images = [image_of(disk, rng) for _ in range(1000)]
    assert {image[3 * BLOCK_BYTES : 4 * BLOCK_BYTES] for image in images} == {journal, bytes(BLOCK_BYTES)}
    counts = {image.count(b"d") for image in images}
    assert {0, BLOCK_BYTES, 2 * BLOCK_BYTES} < counts and all(count % 512 == 0 for count in counts)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """A file with an empty file system."""
    path = tmp_path_factory.mktemp("image") / "image"
    with open(path, "wb") as file:
        file.truncate(FILE_SYSTEMS["ext4"].image_bytes)
    subprocess.run([*FILE_SYSTEMS["ext4"].command, path], check=True, capture_output=True)
    return path


@contextlib.contextmanager
def mounted(image: Path, folder: Path):
    with open(image, "rb+") as file, mount(file.fileno(), folder, "ext4"):
        yield


def hold_a_mount(image: Path, folder: Path, ready: int) -> None:
    with mounted(image, folder):
        os.write(ready, b"%d\n" % os.getpid())
        while True:  # a signal that comes just before signal.pause() would not end that
            select.select([], [], [], 0.05)


def wait_for_a_holder(image: Path, folder: Path, ready: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ran in the tests' own process may have left a handler
    with_own_mounts(hold_a_mount, image, folder, ready)


@pytest.mark.parametrize(("number", "whom"), usual(
    product([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ["itself", "who waits for it"]),
    [(signal.SIGTERM, "itself"), (signal.SIGKILL, "who waits for it")], pytest.mark.ci))
def test_a_signal_to_the_holder_of_a_disk_or_to_its_parent_leaves_no_loop_device(image, tmp_path, number, whom):
    came, ready = os.pipe()
    waiting = multiprocessing.get_context("fork").Process(target=wait_for_a_holder, args=(image, tmp_path, ready))
    waiting.start()
    os.close(ready)
    with open(came) as told:
        holder = psutil.Process(int(told.readline()))
    try:
        assert attached(image)
        os.kill(holder.pid if whom == "itself" else waiting.pid, number)
        waiting.join(30)
        assert waiting.exitcode
        eventually(lambda: not holder.is_running(), "the holder has ended")
        eventually(lambda: not attached(image), "the loop device has gone")
    finally:
        for process in (waiting, holder):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        waiting.join()


def interrupted(image: Path, folder: Path, name: str, *, is_done: bool) -> bool:
    """Whether something stays when a signal comes within that function of mounts.py, before or after it has done its work."""
    real = getattr(mounts, name)

    def struck(*arguments: object) -> None:
        if is_done:
            real(*arguments)
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with patch.object(mounts, name, struck), pytest.raises(KeyboardInterrupt), mounted(image, folder):
        pass
    return os.path.ismount(folder) or attached(image)


@pytest.mark.parametrize("name, is_done", [("_call", True), ("wait_for", False), ("wait_for", True)])
def test_an_interrupt_within_mount_or_unmount_leaves_nothing_mounted(image, tmp_path, name, is_done):
    assert not with_own_mounts(interrupted, image, tmp_path, name, is_done=is_done)


def leave_mounted(otherwise: Path) -> list[bool]:
    """Whether a folder in memory with a mount that is not undone is there: within its block, and after it."""
    with memory_folder(otherwise) as folder:
        place = folder / "a folder"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
        found = [os.path.ismount(place)]
    return [*found, folder.exists()]


def test_a_folder_in_memory_is_removed_with_the_mounts_in_it(tmp_path):
    assert with_own_mounts(leave_mounted, tmp_path) == [True, False]


def test_memory_folder_makes_the_other_folder_if_no_memory_is_writable(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with memory_folder(tmp_path / "a" / "b") as folder:
        assert folder == tmp_path / "a" / "b" and folder.is_dir()


def mount_with_static_nodes(image: Path, folder: Path) -> bool:
    """Return whether the disk is mounted on a system on which nothing creates the nodes of new devices."""
    number = os.stat("/dev/loop-control").st_rdev
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev"], check=True)
    os.mknod("/dev/loop-control", stat.S_IFCHR | 0o600, number)
    with mounted(image, folder):
        return os.path.ismount(folder)


def test_a_missing_node_of_a_loop_device_is_made(image, tmp_path):
    assert with_own_mounts(mount_with_static_nodes, image, tmp_path)


def error_of_a_state(folder: Path, *, has_devices: bool) -> str:
    if not has_devices:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev"], check=True)
    try:
        with BlockDisk(FILE_SYSTEMS["ext4"], bytes(1 << 20)).state(random.Random(), folder):
            return ""
    except Exception as error:
        return type(error).__name__


def test_only_an_unmountable_image_counts_as_lost(tmp_path):
    assert with_own_mounts(error_of_a_state, tmp_path, has_devices=True) == "UnmountableError"
    assert with_own_mounts(error_of_a_state, tmp_path, has_devices=False) == "FileNotFoundError"


def attached(image: Path) -> bool:
    return any(place == str(image) for place in attached_files())
