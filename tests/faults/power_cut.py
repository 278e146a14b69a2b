"""Power cuts under the strictest reading of POSIX, made from a journal of system calls.

journal.c writes down what a run does to the store's files. Here that journal becomes folders that a
power cut at some point of the run could have left: data is safe only once a sync of its file (or file system) that
began after it has returned; a name is safe only once its folder was synced. Everything else survives
in any subset, the last write perhaps torn at 512 bytes. No root, no special file system.

Stores through a mapping are no system calls. Files of the folders that are named as mapped are read page by page
before each sync (journal.c) and every few milliseconds between (mapped_pages.py), each page that has changed
being one more write that survives or not.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from faults.failing_calls import preload
from in_child import Unjudged

SOURCE = Path(__file__).with_name("journal.c")
SECTOR_BYTES = 512
FOLDER = 0  # in place of a file's number: the name is a folder
_HEAD = struct.Struct("=cIIQQ")


class Record(NamedTuple):
    """One line of the journal; kinds as in journal.c."""

    kind: str
    inode: int
    number: int
    a: bytes
    b: bytes


def build_shim(folder: Path) -> Path:
    """Compiles journal.c; CalledProcessError carries the compiler's words."""
    library = folder / "journal.so"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def shim_environment(library: Path, journal: Path, store: Path, acks: Path, mapped: Sequence[str] = ()) -> dict[str, str]:
    """What a process needs in its environment to be written down; creates the journal.

    `mapped`: the store's folders whose files are written through mappings.
    """
    journal.touch()
    return {
        **preload(library),
        "PYENGINE_JOURNAL": str(journal),
        "PYENGINE_JOURNAL_ROOT": str(store.resolve()),
        "PYENGINE_JOURNAL_ACKS": str(acks.resolve()),
        "PYENGINE_JOURNAL_MAPPED": f":{':'.join(mapped)}:" if mapped else "",
    }


def append_record(descriptor: int, record: Record) -> None:
    """Append one whole record, as journal.c does it; `descriptor` was opened with O_APPEND."""
    head = _HEAD.pack(record.kind.encode(), len(record.a), len(record.b), record.inode, record.number)
    os.writev(descriptor, (head, record.a, record.b))


def read_journal(path: Path) -> list[Record]:
    """All whole records; one that was cut by the end of the run is left out."""
    data = path.read_bytes()
    records = []
    at = 0
    while at + _HEAD.size <= len(data):
        kind, a_bytes, b_bytes, inode, number = _HEAD.unpack_from(data, at)
        a_at = at + _HEAD.size
        at = a_at + a_bytes + b_bytes
        if at > len(data):
            break
        records.append(Record(kind.decode(), inode, number, data[a_at : a_at + a_bytes], data[a_at + a_bytes : at]))
    return records


Change = tuple[int, int, bytes | None]  # (when, offset, bytes) of a write, (when, size, None) of a change of size


@dataclass
class _File:
    safe: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def keep_before(self, when: int) -> None:
        for change in self.pending:
            if change[0] < when:
                _apply(self.safe, change)
        self.pending = [change for change in self.pending if change[0] >= when]


class _NameChange(NamedTuple):
    when: int
    kind: str
    path: str
    life: int
    target: str = ""

    def folders(self) -> set[str]:
        return {str(PurePosixPath(path).parent) for path in (self.path, self.target) if path}

    def apply(self, names: dict[str, int]) -> None:
        if self.kind == "U":
            names.pop(self.path, None)
        elif self.kind == "R" and self.life == FOLDER:
            for path in [path for path in names if path == self.path or path.startswith(f"{self.path}/")]:
                names[self.target + path.removeprefix(self.path)] = names.pop(path)
        elif self.kind == "R":
            names.pop(self.path, None)
            names[self.target] = self.life
        else:
            names[self.path] = self.life


class Disk:
    """What is safe and what is not, after the records fed so far.

    A file system gives the number of an inode again once its file is gone, so a file is known by its *life*: how many
    were made before it.
    """

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}  # by life; without those that no name can lead to any more
        self.names: dict[str, int] = {}    # path -> life, or FOLDER
        self.lives: dict[int, int] = {}   # inode -> the life that it has now
        self.pending_names: list[_NameChange] = []
        self.acks: list[bytes] = []
        self.begun: dict[tuple[int, int], tuple[int, int]] = {}
        self.births = 0
        self.now = 0

    def feed(self, record: Record) -> None:
        kind, inode, number, a, b = record
        now = self.now
        self.now += 1
        if kind in "WS":
            file = self.files.get(self.lives[inode])
            if file is not None:
                file.pending.append((now, number, a if kind == "W" else None))
        elif kind == "F":
            self.births += 1
            self.lives[inode] = self.births
            self.files[self.births] = _File()
        elif kind in "NMUR":
            life = self.lives[inode] if kind == "N" else self.lives.get(inode, FOLDER) if kind == "R" else FOLDER
            self.pending_names.append(_NameChange(now, kind, a.decode(), life, b.decode()))
        elif kind == "b":
            self.begun[inode, number] = now, self.lives.get(inode, FOLDER)
        elif kind == "e":
            self.synced(*self.begun.pop((inode, number)), a.decode())
        elif kind == "y":
            self.begun[inode, number] = now, FOLDER
        elif kind == "Y":
            begun, _ = self.begun.pop((inode, number))
            for file in self.files.values():
                file.keep_before(begun)
            self.names_synced(begun)
        elif kind == "A":
            self.acks.append(a)

    def synced(self, begun: int, life: int, folder: str) -> None:
        if folder:
            self.names_synced(begun, folder)
        elif life in self.files:
            self.files[life].keep_before(begun)

    def names_synced(self, begun: int, folder: str | None = None) -> None:
        """Of this folder, or of all."""
        before = set(self.names.values())
        left = []
        for change in self.pending_names:
            if change.when < begun and (folder is None or folder in change.folders()):
                change.apply(self.names)
            else:
                left.append(change)
        self.pending_names = left
        # A process that was killed between a rename and its record leaves a file that has a name here only by its next record.
        for life in before.difference(self.names.values(), (change.life for change in left), self.lives.values(), (FOLDER,)):
            self.files.pop(life, None)

    @property
    def clean(self) -> bool:
        """Whether nothing could be lost by a cut now."""
        return not self.pending_names and not any(file.pending for file in self.files.values())

    def cut(self, rng: random.Random, root: str, folder: Path) -> None:
        """Makes `folder` one of the trees that a cut now could leave of the tree at `root`."""
        share = rng.choice((0.0, 1.0, 0.5))
        names = dict(self.names)
        for change in self.pending_names:
            if rng.random() < share:
                change.apply(names)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in sorted(names):
            if path == root or not _reachable(path, names, root):
                continue  # the store's own folder is there in every state
            place = folder / PurePosixPath(path).relative_to(root)
            if names[path] == FOLDER:
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.write_bytes(_survivor(self.files[names[path]], rng))


def _reachable(path: str, names: dict[str, int], root: str) -> bool:
    """A file whose folder's name was lost is lost with it."""
    parents = [str(parent) for parent in PurePosixPath(path).parents]
    return all(names.get(parent) == FOLDER for parent in parents[: parents.index(root)])


def _survivor(file: _File, rng: random.Random) -> bytes:
    content = bytearray(file.safe)
    for change in survivors(file.pending, rng):
        _apply(content, change)
    return bytes(content)


def survivors(pending: Sequence[Change], rng: random.Random) -> list[Change]:
    """None, all or a part of what was not safe, in its order; the last perhaps torn."""
    chosen = some(pending, rng)
    if chosen and rng.random() < 0.3:
        when, at, data = chosen[-1]
        if data is not None:
            chosen[-1] = when, at, data[: rng.randint(0, len(data) // SECTOR_BYTES) * SECTOR_BYTES]
    return chosen


def some(pending: Sequence[Change], rng: random.Random) -> list[Change]:
    """None, all or a part, in its order."""
    share = rng.choice((0.0, 1.0, 0.5))
    return [change for change in pending if rng.random() < share]


def _apply(content: bytearray, change: Change) -> None:
    _, at, data = change
    if data is None:
        if at < len(content):
            del content[at:]
        else:
            content.extend(bytes(at - len(content)))
        return
    if len(content) < at:
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


class UnmountableError(Exception):
    """The file system does not come up in this state; the text says why."""


def cut_points(records: Sequence[Record], count: int, rng: random.Random, begin: int = 0) -> list[int]:
    """Return where to cut, none before `begin`, in equal shares.

    The shares: right after acknowledgements that were given while something was unsafe, right after any acknowledgement, after
    removals of names and after replacements of files (where there are any), and anywhere.
    """
    disk = Disk()
    acks, suspicious, removals, replacements = [], [], [], []
    for number, record in enumerate(records):
        disk.feed(record)
        if number < begin:
            continue
        if record.kind == "A":
            acks.append(number + 1)
            if not disk.clean:
                suspicious.append(number + 1)
        elif record.kind == "U":
            removals.append(number + 1)
        elif record.kind == "R":
            replacements.append(number + 1)
    anywhere = range(begin, len(records) + 1)
    shares = [suspicious or acks or anywhere, acks or anywhere, anywhere, *filter(None, (removals, replacements))]
    return sorted(rng.choice(rng.choice(shares)) for _ in range(count))


@dataclass
class Outcome:
    """`bad` holds (cut point, number of the state, sentence); `checked`, if the judge counts, the messages that it read.

    A sentence is Unjudged where the state was not judged at all: nothing holds, and nothing was caught either.
    """

    states: int = 0
    records: int = 0
    acknowledged: int = 0
    checked: int = 0
    bad: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def caught(self) -> list[str]:
        """What the judge found broken; without the states that it could not judge."""
        return [sentence for *_, sentence in self.bad if not isinstance(sentence, Unjudged)]


def explore(
    records: Sequence[Record],
    root: Path,
    check: Callable[[Path, list[bytes]], str | None],
    *,
    states: int,
    seed: str,
    scratch: Path,
    stop_at: int = 1_000_000,
    begin: int = 0,
) -> Outcome:
    """Builds `states` trees and lets `check(tree, acknowledged lines)` judge each: None, or what is wrong.

    Ends early once `stop_at` bad states were found. State k of a seed is the same in every run.
    """
    disk, tree, name = Disk(), scratch / "state", str(root.resolve())

    def state(rng: random.Random) -> AbstractContextManager[Path]:
        disk.cut(rng, name, tree)
        return nullcontext(tree)

    return explore_states(records, disk, state, check, states=states, seed=seed, stop_at=stop_at, begin=begin)


def explore_states(
    records: Sequence[Record],
    disk: Disk,
    state: Callable[[random.Random], AbstractContextManager[Path]],
    check: Callable[[Path, list[bytes]], str | None],
    *,
    states: int,
    seed: str,
    stop_at: int = 1_000_000,
    begin: int = 0,
) -> Outcome:
    """The same of any disk that is fed the records; `state` makes a tree of it as it then is, for as long as it is judged."""
    points, fed = cut_points(records, states, random.Random(seed), begin), 0
    outcome = Outcome(records=len(records), acknowledged=sum(record.kind == "A" for record in records))
    for number, point in enumerate(points):
        for record in records[fed:point]:
            disk.feed(record)
        fed = point
        outcome.states += 1
        try:
            with state(random.Random(f"{seed}/{number}")) as tree:
                sentence = check(tree, list(disk.acks))
        except UnmountableError as error:
            sentence = Unjudged(error)
        if sentence:
            outcome.bad.append((point, number, sentence))
            if len(outcome.bad) >= stop_at:
                break
    return outcome
