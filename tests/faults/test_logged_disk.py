"""The disk that writes down what reaches it: what a careless writer loses is found, and nothing wrong with a careful one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from faults.logged_disk import BLOCK_BYTES, FILE_SYSTEMS, INODE, JOURNAL_MAGIC, BlockDisk, LoggedDisk, build_server, logged_disk
from faults.memory_folder import memory_folder
from faults.mounts import mount, own_mounts, with_own_mounts
from faults.power_cut import Outcome, Record, explore_states
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
        assert with_own_mounts(cut_lines, program, tmp_path / forgets, forgets, seed, 200, 1).bad, f"forgetting {forgets} was not found"


def acknowledge_under_a_flush(program: Path, scratch: Path) -> list[Record]:
    """One line written and synced while others are written to `acks`; until one was accepted within the flush."""
    with logged_disk(program, scratch, flush_us=SLOW_FLUSH_US) as disk:
        acks = os.open(disk.acks, os.O_WRONLY | os.O_APPEND)
        file = os.open(disk.store / "lines", os.O_CREAT | os.O_RDWR)
        os.pwrite(file, line(0), 0)
        syncing = threading.Thread(target=os.fsync, args=(file,))
        syncing.start()
        while syncing.is_alive():
            os.write(acks, b"0\n")
        syncing.join()
        os.close(acks)
        os.close(file)
        return disk.records()


def test_what_is_acknowledged_under_a_flush_stands_before_its_end(program, tmp_path):
    """A server that holds everything back meanwhile would hide a position that is moved before its sync."""
    kinds = "".join(record.kind for record in with_own_mounts(acknowledge_under_a_flush, program, tmp_path))
    assert kinds.startswith("F") and kinds.count("b") == kinds.count("e") > 0
    assert any("A" in part.partition("e")[0] for part in kinds.split("b")[1:])


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


def test_a_flush_covers_what_was_written_before_it_began(rng):
    disk = fed(BlockDisk(FILE_SYSTEMS["ext4"], bytes(8192)))
    states = {image_of(disk, rng) for _ in range(100)}
    assert states == {b"a" * 512 + second * 512 + bytes(8192 - 1024) for second in (b"b", bytes(1))}


def test_a_cut_before_everything_changes_nothing_for_those_behind_it(rng):
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


def hold_a_mount(image: Path, folder: Path, ready: int) -> None:
    own_mounts()
    with open(image, "rb+") as file, mount(file.fileno(), folder, "ext4"):
        os.write(ready, b"1")
        signal.pause()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_mounted_or_attached_whatever_ends_it(tmp_path, number):
    image, folder = tmp_path / "image", tmp_path / "folder"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(FILE_SYSTEMS["ext4"].image_bytes)
    subprocess.run([*FILE_SYSTEMS["ext4"].command, image], check=True, capture_output=True)
    came, ready = os.pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold_a_mount, args=(image, folder, ready))
    holder.start()
    os.close(ready)
    assert os.read(came, 1) == b"1" and attached(image)
    os.close(came)
    os.kill(holder.pid, number)
    holder.join(30)
    eventually(lambda: not attached(image), "the loop device has gone")
    assert not os.path.ismount(folder)


def attached(image: Path) -> bool:
    """Whether a loop device has that file."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return str(image) in found
