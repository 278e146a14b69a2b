"""A file system on a disk that writes down what reaches it (logged_disk.c), and the disk's states after a power cut.

A state is what had been flushed (a flush covers the writes that reached the disk before it began) and some of what
had not: none, all, a prefix, a subset, of writes or of their blocks, perhaps torn at 512 bytes. Each is mounted for real,
so the file system's own journal is replayed on it. Needs root (tests/needs.py, `block`); call it in
mounts.with_own_mounts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults.mounts import MountError, detach, mount
from faults.power_cut import SECTOR_BYTES, Change, Disk, Record, UnmountableError, read_journal, some

SOURCE = Path(__file__).with_suffix(".c")
FLUSH_US = 1000  # of a disk: a publication before the flush has ended is seen
BLOCK_BYTES = 4096
STORE = "store"
IMAGE_NAME = "power-cut-{}"  # of a state's disk, with the process that made it: how its loop device is known
JOURNAL_MAGIC = bytes.fromhex("c03b3998")  # how each block of JBD2's own begins
NO_WRITES = os.urandom(32)  # a text that no write holds
INODE = 1  # of the disk, in the journal; its life too, the only one


@dataclass(frozen=True)
class FileSystem:
    """`image_bytes`: as small as it goes, a state costs as much as there is to copy."""

    name: str
    command: tuple[str, ...]
    image_bytes: int


FILE_SYSTEMS = {
    one.name: one
    for one in (
        FileSystem("ext4", ("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-O", "^resize_inode", "-E",
                            "lazy_itable_init=0,lazy_journal_init=0,nodiscard"), 32 << 20),
        FileSystem("xfs", ("mkfs.xfs", "-q", "-f", "-K"), 300 << 20),
    )
}


def build_server(folder: Path) -> Path:
    """Compiles logged_disk.c; CalledProcessError carries the compiler's words."""
    program = folder / "logged_disk"
    command = [os.environ.get("CC", "cc"), "-O2", "-pthread", "-o", str(program), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@dataclass(frozen=True)
class LoggedDisk:
    """`store`: a folder on the file system; `acks`: what is appended there is written down among the writes.

    `image`: the disk itself, with every write that reached it.
    """

    kind: FileSystem
    store: Path
    acks: Path
    journal: Path
    image: Path
    base: bytes
    server_pid: int

    def snapshot(self) -> bytes:
        """The disk as it is at one moment. The server is stopped meanwhile: a file system that goes on writing would
        leave a picture that the disk never had, of old blocks and of a journal that does not repeat them any more."""
        os.kill(self.server_pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, self.server_pid, os.WSTOPPED)
            return self.image.read_bytes()
        finally:
            os.kill(self.server_pid, signal.SIGCONT)

    def fail_writes_with(self, text: bytes) -> None:
        """From now on each write to the disk that holds `text` fails with EIO; none with NO_WRITES."""
        with open(self.acks.with_name("fail"), "r+b", buffering=0) as file:
            file.write(text)

    def records(self) -> list[Record]:
        """Return what has reached the disk since its file system was made."""
        return read_journal(self.journal)


@contextmanager
def logged_disk(
    program: Path, folder: Path, kind: FileSystem = FILE_SYSTEMS["ext4"], flush_us: int = FLUSH_US
) -> Iterator[LoggedDisk]:
    """A new file system with an empty store, mounted for this block; `folder` keeps the journal."""
    image, server_folder, place = folder / "image", folder / "server", folder / "disk"
    server_folder.mkdir()
    place.mkdir()
    with open(image, "xb") as file:
        file.truncate(kind.image_bytes)
    subprocess.run([*kind.command, image], check=True, capture_output=True, text=True)
    with open(image, "rb+") as file, mount(file.fileno(), place, kind.name):
        (place / STORE).mkdir()
    base, journal = image.read_bytes(), folder / "journal"
    command = [program, image, journal, server_folder, str(flush_us)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as server:
        try:
            _await_ready(server)
            with open(server_folder / "disk", "rb+") as file, mount(file.fileno(), place, kind.name):
                yield LoggedDisk(kind, place / STORE, server_folder / "acks", journal, image, base, server.pid)
        finally:
            detach(server_folder)  # with which the server ends


def _await_ready(server: subprocess.Popen) -> None:
    try:
        if server.stdout.readline() != b"ready\n":
            raise OSError(f"logged_disk ended with {server.wait()}")
    except BaseException:  # it may not have mounted itself yet
        server.kill()
        server.wait()
        raise


class BlockDisk(Disk):
    """What is on the disk and what is in its cache, after the records fed so far."""

    def __init__(self, kind: FileSystem, base: bytes) -> None:
        super().__init__()
        self.kind = kind
        zeros = bytes(BLOCK_BYTES)
        self.used = {at for at in range(0, len(base), BLOCK_BYTES) if base[at : at + BLOCK_BYTES] != zeros}
        super().feed(Record("F", INODE, 0, b"", b""))
        self.file = self.files[INODE]
        self.file.safe[:] = base

    def feed(self, record: Record) -> None:
        if record.kind == "F":  # there before anything was fed
            return
        super().feed(record)
        if record.kind == "W":
            self.used.update(range(record.number - record.number % BLOCK_BYTES, record.number + len(record.a), BLOCK_BYTES))

    @contextmanager
    def state(self, rng: random.Random, folder: Path) -> Iterator[Path]:
        """The store on the disk as a cut now could leave it, mounted on `folder` for this block; may be changed."""
        image = os.memfd_create(IMAGE_NAME.format(os.getpid()))
        try:
            self.write(image, rng)
            with mount(image, folder, self.kind.name):
                yield folder / STORE
        except MountError as error:
            raise UnmountableError(f"the file system does not come up: {error}") from None
        finally:
            os.close(image)

    def write(self, image: int, rng: random.Random) -> None:
        """Makes an empty file the disk as a cut now could leave it."""
        os.ftruncate(image, len(self.file.safe))
        for at in self.used:
            os.pwrite(image, self.file.safe[at : at + BLOCK_BYTES], at)
        for _, at, data in some(_pieces(self.file.pending, rng), rng):
            os.pwrite(image, data, at)


def _pieces(pending: Sequence[Change], rng: random.Random) -> list[Change]:
    """All of the writes or the first ones, whole or block by block, one block perhaps in two parts of whole sectors.

    Each piece can survive without the others: a disk promises no more than a sector. What ext4 relies on to be more is
    left whole.
    """
    pieces = list(pending)
    if rng.random() < 0.5:
        pieces = [piece for change in pieces for piece in _blocks(change)]
    if rng.random() < 0.25:
        del pieces[rng.randint(0, len(pieces)) :]
    if pieces and rng.random() < 0.3:
        number = rng.randrange(len(pieces))
        blocks = _blocks(pieces[number])
        torn = rng.randrange(len(blocks))
        when, at, data = blocks[torn]
        if not _is_checked(at, data):
            middle = rng.randint(0, len(data) // SECTOR_BYTES) * SECTOR_BYTES
            blocks[torn : torn + 1] = (when, at, data[:middle]), (when, at + middle, data[middle:])
            pieces[number : number + 1] = blocks
    return pieces


def _blocks(change: Change) -> list[Change]:
    when, at, data = change
    return [(when, at + k, data[k : k + BLOCK_BYTES]) for k in range(0, len(data), BLOCK_BYTES)]


def _is_checked(at: int, data: bytes) -> bool:
    """Whether ext4 needs that block written at once: its superblock and the journal's blocks, each with a checksum of
    its own, without which it does not come up. What it writes elsewhere the journal holds too."""
    return at == 0 or data.startswith(JOURNAL_MAGIC)
