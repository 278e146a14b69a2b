"""Damage of every sort to a small store, and what must hold whatever is damaged.

    detected or harmless   what differs from the undamaged store is told by `check`, by recovery or by an error;
                           only header fields that no checksum covers may differ in a damaged record itself
    never                  a crash, a hang, a traceback, another message than was put, a cut in the middle without a word

A damage is a name and the files that it changes. `judge` looks at the damaged store as a reader, with check and
inspect; recovers a copy, and looks again. `sweep` runs many of them in forked children, so that a crash or a
hang is one more finding.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import select
import shutil
import signal
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyengine
from pyengine.errors import EngineError, ExitCode
from pyengine.formats.record import Message
from pyengine.ipc.shared_objects import find_folder
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import abort_file_exists
from pyengine.storage.config import load_config
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.engine_id import read_engine_id, read_epoch
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState
from waiting import scaled_timeout_s

Files = Mapping[str, bytes]
Truth = Mapping[tuple[str, int, int], Message]
# Of one record: nothing in the format covers these.
UNCOVERED = {"flag", "sys_flag", "born_timestamp_ms", "born_host", "store_timestamp_ms", "store_host", "reconsume_times",
             "prepared_transaction_offset", "raw_properties"}
PAGE_BYTES = 512
TIMEOUT_S = scaled_timeout_s(20.0)
NASTY = (0, 1, -1, 7, 8, 19, 20, 21, 90, 91, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, -0x80000000,
         0x7FFFFFF0, 1 << 24)


@dataclass(frozen=True)
class Damage:
    """`changes`: the new content by path below the root, None for one that is gone; or `do` changes the tree itself."""

    name: str
    changes: Mapping[str, bytes | None] = field(default_factory=dict)
    do: Callable[[Path], None] | None = None

    def apply(self, root: Path) -> None:
        for name, content in self.changes.items():
            path = root / name
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)
        if self.do is not None:
            self.do(root)


# ---- what is damaged -------------------------------------------------------------------------


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def flip(files: Files, name: str, bit: int) -> Damage:
    content = bytearray(files[name])
    content[bit // 8] ^= 1 << bit % 8
    return Damage(f"bit {bit % 8} of byte {bit // 8} of {name}", {name: bytes(content)})


def every_flip(files: Files, rng: random.Random) -> Iterator[Damage]:
    """In random order, so that a time limit leaves out a random part."""
    places = [(name, bit) for name, content in files.items() for bit in range(8 * len(content))]
    rng.shuffle(places)
    return (flip(files, name, bit) for name, bit in places)


def random_flips(files: Files, count: int, rng: random.Random) -> Iterator[Damage]:
    """Any bit of any file, each file as often as any other."""
    names = [name for name, content in files.items() if content]
    for _ in range(count):
        name = rng.choice(names)
        yield flip(files, name, rng.randrange(8 * len(files[name])))


def random_scribbles(files: Files, count: int, rng: random.Random) -> Iterator[Damage]:
    """Up to a hundred random bytes somewhere, or a stretch of equal ones."""
    names = [name for name, content in files.items() if content]
    for _ in range(count):
        name = rng.choice(names)
        content = bytearray(files[name])
        at, size = rng.randrange(len(content)), rng.randrange(1, 100)
        content[at : at + size] = (rng.randbytes(size) if rng.random() < 0.5 else rng.randbytes(1) * size)[: len(content) - at]
        yield Damage(f"{size} bytes at {at} of {name}", {name: bytes(content)})


def pages(files: Files) -> Iterator[Damage]:
    """Each page zeroed, and swapped with the next one of its kind of file."""
    by_folder: dict[str, list[tuple[str, int]]] = {}
    for name, content in files.items():
        for at in range(0, len(content), PAGE_BYTES):
            by_folder.setdefault(name.partition("/")[0], []).append((name, at))
            zeroed = content[:at] + bytes(len(content[at : at + PAGE_BYTES])) + content[at + PAGE_BYTES :]
            if zeroed != content:
                yield Damage(f"page at {at} of {name} zeroed", {name: zeroed})
    for places in by_folder.values():
        for (one, at), (other, there) in itertools.pairwise(places):
            mine, its = files[one][at : at + PAGE_BYTES], files[other][there : there + PAGE_BYTES]
            if len(mine) != len(its) or mine == its:
                continue
            changed = {name: bytearray(files[name]) for name in {one, other}}
            changed[one][at : at + PAGE_BYTES] = its
            changed[other][there : there + PAGE_BYTES] = mine
            yield Damage(f"pages at {at} of {one} and {there} of {other} swapped", {n: bytes(c) for n, c in changed.items()})


def truncations(files: Files, folder: str = "commitlog", *, step: int = 1) -> Iterator[Damage]:
    """The last file of the folder cut at each byte; and zeros from there on, as lost pages leave them, in every file."""
    names = [name for name in files if name.startswith(f"{folder}/")]
    for at in range(0, len(files[names[-1]]), step):
        yield Damage(f"{names[-1]} cut at {at}", {names[-1]: files[names[-1]][:at]})
    for name in names:
        for at in range(0, len(files[name]), step):
            zeroed = files[name][:at].ljust(len(files[name]), b"\0")
            if zeroed != files[name]:
                yield Damage(f"{name} zeros from {at} on", {name: zeroed})


def foreign_files(files: Files, root: Path) -> Iterator[Damage]:
    """What does not belong there, in each folder; and each file gone, empty, doubled, or a folder instead."""
    folders = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir()} | {"."}

    def made(folder: str, name: str | bytes, how: str) -> Callable[[Path], None]:
        def do(tree: Path) -> None:
            path = os.path.join(os.fsencode(tree / folder), os.fsencode(name))
            if os.path.lexists(path):
                return
            if how == "fifo":
                os.mkfifo(path)
            elif how == "folder":
                os.mkdir(path)
            elif how == "dangling":
                os.symlink("nowhere", path)
            elif how == "loop":
                os.symlink(os.path.basename(path), path)
            elif how == "device":
                os.symlink("/dev/zero", path)
            else:
                Path(os.fsdecode(path)).write_bytes(how.encode())
        return do

    names: tuple[str | bytes, ...] = ("x", "00000000000000000001", "00000000000000000000", "00000000000001048576",
                                      "99999999999999999999", "-0000000000000000001", "20991231235959999", "20260101000000001",
                                      "0", "4096", b"\xff\xfe", "a" * 255, ".hidden", "0.bak", "a\nb", "%SYS")
    for folder in sorted(folders):
        for name in names:
            for how in ("", "text", "fifo", "folder", "dangling", "loop", "device"):
                yield Damage(f"{how or 'empty'} {name!r} in {folder}", do=made(folder, name, how))
    for name, content in files.items():
        if name != "commitlog/" + "0" * 20:  # a log without its first segment is one that retention was at
            yield Damage(f"{name} gone", {name: None})
        yield Damage(f"{name} empty", {name: b""})
        yield Damage(f"{name} doubled", {name: content + content})
        yield Damage(f"{name} one byte longer", {name: content + b"\0"})
        for how in ("folder", "dangling", "loop"):
            folder, _, base = name.rpartition("/")
            yield Damage(f"{name} is a {how}", {name: None}, made(folder or ".", base, how))


def hostile_numbers(files: Files, truth: Truth, segment_bytes: int) -> Iterator[Damage]:
    """Each number that says how long or where something is, with values that make no sense."""
    def put(name: str, at: int, code: str, value: int) -> Damage | None:
        size = struct.calcsize(code)
        content = bytearray(files[name])
        content[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "big")
        return Damage(f"{value} at {at} of {name}", {name: bytes(content)}) if bytes(content) != files[name] else None

    places: list[tuple[str, int, str]] = []
    for message in truth.values():
        start = message.physical_offset - message.physical_offset % segment_bytes
        name, at = f"commitlog/{start:020}", message.physical_offset - start
        places += [(name, at + field_at, ">i") for field_at in (0, 4, 8, 12, 16, 36)]
        places += [(name, at + 20, ">q"), (name, at + 28, ">q"), (name, at + 84, ">i")]
        body_end = at + 88 + len(message.body)
        places += [(name, body_end, ">b"), (name, body_end + 1 + len(message.topic.encode()), ">h")]
    for name, content in files.items():
        if name.startswith("consumequeue/"):
            places += [(name, at, code) for entry in range(0, len(content), 20) for at, code in
                       ((entry, ">q"), (entry + 8, ">i"), (entry + 12, ">q"))]
        elif name.startswith("index/"):
            places += [(name, at, ">q") for at in (0, 8, 16, 24)] + [(name, at, ">i") for at in range(32, len(content) - 3, 4)]
        elif name == "checkpoint":
            places += [(name, at, ">q") for at in (0, 8, 16)]
    for name, at, code in places:
        for value in NASTY:
            damage = put(name, at, code, value)
            if damage is not None:
                yield damage


HOSTILE_JSON = (
    b"", b" ", b"{", b"}", b"[]", b"null", b"true", b"5", b'"x"', b"{}{}", b"\xff\xfe", b"\0" * 100, b"\xef\xbb\xbf{}", b"NaN",
    b"-Infinity", b"[" * 100_000, b'{"a":' * 50_000, b"{" + b'"a":1,' * 1000 + b'"b":2}', b'{"a":1,"a":2}', b"9" * 10_000,
    b'{"offsetTable":null}', b'{"offsetTable":[]}', b'{"offsetTable":{"a":5}}', b'{"offsetTable":{"a@b":{0:-1,1:9223372036854775808}}}',
    b'{"offsetTable":{"a@b":{"x":1}}}', b'{"offsetTable":{1:1e999,2:-5}}', b'{"offsetTable":{1:99999999999999999999999999}}',
    b'{"offsetTable":{-1:0,0:0,99999999999:1}}', b'{"topicConfigTable":{"T":5}}',
    b'{"topicConfigTable":{"T":{"topicName":null,"readQueueNums":-1,"writeQueueNums":1e400}}}', b'{"topicConfigTable":[]}',
    b'{"uuid":5,"device":1e999,"inode":-1}', b'{"uuid":"' + b"a" * 3000 + b'"}', b'{"uuid":"00000000-0000-0000-0000-000000000000"}',
    b'{"shm_directory":5}', b'{"shm_directory":"/proc/self/nothing"}', b'{"shm_directory":"\\u0000"}', b'{"flushed":-1}',
    b'{"flushed":1e999}', b"1e999\n", b"-5\n", b"99999999999999999999999\n", b"0x10\n", b"a = [[[[[\n", b"a = 1e999\n",
    b'mapped_file_size_commit_log_bytes = "x"\n', b"mapped_file_size_commit_log_bytes = -4096\n", b'"' + b"x" * 70_000 + b'" = 1\n',
    '{"名": "\ud83d\ude00"}'.encode("utf-8", "surrogatepass"), b'"\\ud800"', b'{"\\ud800": {"\\udfff": 1}}',
)  # fmt: skip


def hostile_config(files: Files) -> Iterator[Damage]:
    """Each small file of the store with every text of HOSTILE_JSON, and with its own cut and doubled."""
    extra = ("config/consumerOffset.json", "config/delayOffset.json", "config/topics.json", "config/watermark", "config/engine-id",
             "config/epoch", "config/engine.toml", "config/engine-run", "config/recovery", "config/rebuild", "checkpoint", "lock",
             "abort")
    for name in sorted({name for name in files if name.startswith("config/")} | set(extra)):
        own = files.get(name, b"")
        for number, text in enumerate((*HOSTILE_JSON, *(own[:at] for at in range(0, len(own), 7)))):
            if text != own:
                yield Damage(f"{name} with hostile text {number} {text[:30]!r}", {name: text})


# ---- what must hold ----------------------------------------------------------------------------


def read_all(root: Path) -> dict[tuple[str, int, int], Message]:
    """Every message as a reader of its queue gets it."""
    seen = {}
    with pyengine.open_store(root) as reader:
        for topic, queue_ids in reader.topics().items():
            for queue_id in queue_ids:
                at, end = reader.queue_range(topic, queue_id)
                for _ in range(10_000):
                    got = reader.get_message(topic, queue_id, at, max_messages=32)
                    for message in got.messages:
                        seen[topic, queue_id, message.queue_offset] = message
                    if at >= end or got.next_begin_offset <= at:
                        break
                    at = got.next_begin_offset
        reader.query_message("T", "k1", max_messages=64)
        reader.offset_by_time("T", 0, 0)
    return seen


def differences(truth: Truth, seen: Truth) -> list[str]:
    """Return the fields that a reader gets with another value than the put one, without fields that no check covers."""
    found = [f"{key} is missing" for key in truth if key not in seen]
    found += [f"{key} was never put" for key in seen if key not in truth]
    for key in truth.keys() & seen.keys():
        mine, its = truth[key], seen[key]
        names = [name for name in ("topic", "queue_id", "queue_offset", "physical_offset", "body", "tags", "keys")
                 if getattr(mine, name) != getattr(its, name)]
        if names:
            found.append(f"{key} differs in {', '.join(names)}")
    return found


class Judge:
    """One undamaged store and what it holds. `is_ours`: everything in it was synced and noted as such."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self.files = files_of(root)
        self.folders = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())
        self.truth = read_all(root)
        self.geometry = load_config(root, environ={}).geometry
        self.tree = scratch / "tree"
        self.stale = True

    def fresh(self) -> Path:
        """An undamaged copy."""
        shutil.rmtree(self.tree, ignore_errors=True)
        for folder in ("", *self.folders):
            (self.tree / folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (self.tree / name).write_bytes(content)
        return self.tree

    def __call__(self, damage: Damage) -> str | None:
        """None, or what did not hold."""
        root = self.fresh()
        damage.apply(root)
        told, complaint = self.look(root)
        if complaint:
            return complaint
        return self.recover(root, told)

    def look(self, root: Path) -> tuple[list[str], str | None]:
        """(what is told about it, what is wrong)."""
        told = []
        try:
            report = check(MessageStore(root, self.geometry))
            told = [f"{finding.severity} {finding.file} {finding.offset}: {finding.text}" for finding in report.findings
                    if finding.severity != "info"]
            if any(not finding.file and not finding.text for finding in report.findings):
                return told, f"a finding names nothing: {report.findings}"
        except EngineError as error:
            told = [f"check: {error}"]
        for what in (lambda: inspect(root, {}), lambda: load_config(root, environ={}), lambda: ConsumerOffsets(root).groups(),
                     lambda: DelayOffsets(root).read(), lambda: TopicConfigs(root).read(), lambda: read_engine_id(root),
                     lambda: read_epoch(root), lambda: find_folder(root), lambda: abort_file_exists(root)):
            with contextlib.suppress(EngineError):
                what()
        try:
            seen = read_all(root)
        except EngineError as error:
            return [*told, f"reader: {error}"], None
        wrong = differences(self.truth, seen)
        return told, None if told or not wrong else f"nothing is told, but {'; '.join(wrong[:3])}"

    def recover(self, root: Path, told: Sequence[str]) -> str | None:
        try:
            geometry = load_config(root, environ={}).geometry
            report = recover(MessageStore(root, geometry))
        except EngineError as error:
            return None if str(error) else "recovery failed without a word"
        if report.state is not RecoveryState.RECOVERED:
            return None if report.damage_offset is not None else f"degraded without a place: {report}"
        try:
            wrong = differences(self.truth, read_all(root))
        except EngineError as error:
            return f"recovered ({report.sentence}), but it cannot be read: {error}"
        if wrong and report.exit_code is ExitCode.OK and not report.notes and not told:
            return f"recovery said OK and nothing was told, but {'; '.join(wrong[:3])}"
        gone = [text for text in wrong if "missing" in text]
        if gone and report.exit_code is ExitCode.OK and not report.notes and not report.quarantined and not self.is_told_after(root):
            return f"cut without a word ({report.sentence}): {'; '.join(gone[:3])}"
        try:
            again = recover(MessageStore(root, geometry))
        except EngineError as error:
            return f"recovered, but not a second time: {error}"
        if (again.state, again.end_offset) != (report.state, report.end_offset):
            return f"a second recovery came to {again.state} {again.end_offset}, the first to {report.end_offset}"
        return None

    def is_told_after(self, root: Path) -> bool:
        return any(finding.severity != "info" for finding in check(MessageStore(root, self.geometry)).findings)


# ---- many of them ------------------------------------------------------------------------------


@dataclass
class Outcome:
    cases: int = 0
    bad: list[str] = field(default_factory=list)
    seconds: float = 0.0


def sweep(damages: Iterable[Damage], judge: Callable[[Damage], str | None], *, until_s: float | None = None,
          bad_max: int = 20, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Judges them one by one in a forked child; one that crashes or hangs is followed by another child.

    Every child makes the damages anew from its position, so `damages` must be the same in each: it is iterated in
    the child. Ends early behind `until_s` seconds or `bad_max` findings.
    """
    began_s = time.monotonic()
    outcome = Outcome()
    with mmap.mmap(-1, 64) as line:  # number of the case under way, 1 when the child is done
        skip = 0
        while True:
            struct.pack_into("=qq", line, 0, skip, 0)
            ours, its = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                _run_child(damages, judge, line, its, skip, None if until_s is None else began_s + until_s)
            os.close(its)
            bad, hung = _follow(ours, pid, line, timeout_s)
            outcome.bad += bad
            _, status = os.waitpid(pid, 0)
            at, done = struct.unpack_from("=qq", line)
            outcome.cases = at + (0 if done else 1)
            if done or len(outcome.bad) >= bad_max:
                break
            how = f"no answer within {timeout_s:g} s" if hung else f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(
                status) else f"exit {status}"
            outcome.bad.append(f"case {at}: {how}")
            skip = at + 1
    outcome.seconds = time.monotonic() - began_s
    return outcome


def _run_child(damages: Iterable[Damage], judge: Callable[[Damage], str | None], line: mmap.mmap, its: int, skip: int,
               until_s: float | None) -> None:
    try:
        number = 0
        for number, damage in enumerate(damages):
            if number < skip:
                continue
            struct.pack_into("=q", line, 0, number)
            try:
                complaint = judge(damage)
            except BaseException:
                complaint = traceback.format_exc()[-1500:]
            if complaint:
                os.write(its, f"case {number}: {damage.name}: {complaint}".encode("utf-8", "replace")[:3000] + b"\0")
            if until_s is not None and time.monotonic() > until_s:
                break
        struct.pack_into("=qq", line, 0, number + 1, 1)
    finally:
        os._exit(0)


def _follow(ours: int, pid: int, line: mmap.mmap, timeout_s: float) -> tuple[list[str], bool]:
    text, hung = b"", False
    at, since_s = -1, time.monotonic()
    with open(ours, "rb", buffering=0) as pipe:
        while True:
            if select.select([pipe], [], [], 0.2)[0]:
                piece = pipe.read(65536)
                if not piece:
                    break
                text += piece
            now, = struct.unpack_from("=q", line)
            if now != at:
                at, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > timeout_s:
                hung = True
                os.kill(pid, signal.SIGKILL)
                since_s = time.monotonic()
    return [one.decode(errors="replace") for one in text.split(b"\0") if one], hung


