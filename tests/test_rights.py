"""Who can do what: one test for each row of docs/security.md."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import random
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import pyengine
import pyengine.client.producer
import pyengine.ipc.live_reader
from fix_cli import run
from fix_golden import usual
from fix_slave import SECRET, WireSlave, secret_file
from fix_store_builder import StoreBuilder
from logs import LogBuilder
from pyengine.cli.engine_status import engine_status
from pyengine.cli.metrics import metrics
from pyengine.engine_config import EngineConfig
from pyengine.errors import ConfigError, DiskError, EngineError, EngineUnavailableError, StoreBusyError
from pyengine.formats import ha_wire
from pyengine.formats.paths import set_log_folders
from pyengine.ipc import shared_objects
from pyengine.ipc.cleaning import Cleaning
from pyengine.ipc.live_reader import check_now
from pyengine.ipc.replication import Replication, create_replication
from pyengine.ipc.shared_objects import KIND_NAMES, SEMAPHORE_KINDS, SharedFolder, find_folder
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.services.replication.ha_service import HAService
from pyengine.services.replication.ha_stream import BadStreamError, LogsDifferError, RecordStream
from pyengine.storage.backup_files import locked_folder
from pyengine.storage.commit_log import CommitLog, new_segment_folder
from pyengine.storage.config import load_config, record_sizes, set_durably
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_writes import open_shared_file
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from ready_store import store_with_writer
from waiting import eventually

NOBODY = 65534


@pytest.fixture
def engine(make_engine):
    """An engine with one message, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = make_engine()
        made.root = Path(folder) / "store"
        made.start()
        with pyengine.connect(made.root) as producer:
            assert producer.put("T", b"one").ok
        made.wait_noted()
        yield made
        made.sweep()


def as_nobody(work: Callable[[], object]) -> object:
    """Return what `work` gives in a child process of another user: its result, or "Kind: sentence" of what it raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                told = work()
            except (EngineError, OSError) as error:
                told = f"{type(error).__name__}: {error}"
            os.write(writing, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    assert told, "the child failed"
    return json.loads(told)


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def give_store(umask):
    """give_store(owner) -> a stopped store of that user, a slave's with a group's offsets, in a folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def give(owner: int) -> Path:
            builder = StoreBuilder(Path(folder) / "store")
            for number in range(20):
                builder.put("T", b"body %d" % number, keys=f"k{number}")
            (builder.root / "lock").unlink()
            (builder.root / "checkpoint").unlink()
            record_sizes(builder.root, EngineConfig(**asdict(builder.geometry)))
            ReplicationStateFile(builder.root).write(ReplicationState("SLAVE", 0))
            ConsumerOffsets(builder.root).commit("T", "g", {0: 1})
            for path in (builder.root, *builder.root.rglob("*")):
                os.chown(path, owner, owner)
            return builder.root

        yield give


def not_the_owners(root: Path) -> dict[str, str]:
    """What another user than the store's has made in it, or what its user may not read and write."""
    owner, found = root.stat(), {}
    for path in (root, *root.rglob("*")):
        status = path.stat()
        if (status.st_uid, status.st_gid) != (owner.st_uid, owner.st_gid) or status.st_mode & 0o600 != 0o600:
            found[str(path.relative_to(root))] = f"{status.st_uid}:{status.st_gid} {stat.filemode(status.st_mode)}"
    return found


def mapped_writable() -> set[str]:
    """Paths that this process has mapped shared and writable."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if re.match(r"\S+ .w.s ", line) and len(line.split()) > 5}


def opened_writable(folder: Path) -> set[str]:
    """Files below `folder` that this process has open for writing."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            flags = int(re.search(r"flags:\s+(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text())[1], 8)
        except OSError:
            continue
        if path.startswith(str(folder)) and flags & os.O_ACCMODE:
            found.add(path)
    return found


@pytest.mark.root
def test_another_user_gets_no_session(engine):
    told = as_nobody(lambda: pyengine.connect(engine.root, timeout_s=30) and "connected")
    assert told.startswith("EngineUnavailableError: ") and "as another user: no permission" in told, told  # at once: it would not change
    assert engine.pids()  # and no process was hurt


@pytest.mark.root
def test_another_user_gets_no_shared_object(engine):
    folder = find_folder(engine.root)
    names = folder.names()

    def attempt() -> list[str]:
        told = []
        for name in names:
            try:
                folder.attach(name, writable=False).close()
                told.append(name)
            except EngineUnavailableError as error:
                assert "another user" in str(error)
        return told

    assert {"control", "cleaning"} <= set(names)
    assert as_nobody(attempt) == []


@pytest.mark.root
def test_another_user_cannot_ring_a_latch(engine):
    import posix_ipc

    def attempt() -> list[str]:
        opened = []
        for kind in SEMAPHORE_KINDS:
            try:
                posix_ipc.Semaphore(shared_objects.semaphore_name(find_folder(engine.root).short_id, kind)).close()
                opened.append(KIND_NAMES[kind])
            except posix_ipc.PermissionsError:
                pass
        return opened

    assert as_nobody(attempt) == []


@pytest.mark.root
def test_another_user_cannot_change_the_store(engine):
    def attempt() -> list[str]:
        changed = []
        for folder, names, files in os.walk(engine.root):
            changed += [path for path in [folder, *(os.path.join(folder, name) for name in files)] if os.access(path, os.W_OK)]
        return changed

    assert as_nobody(attempt) == []


@pytest.mark.root
def test_another_user_who_may_read_the_files_reads_them_and_holds_nothing(engine):
    def attempt() -> list:
        with pyengine.open_store(engine.root) as store, store.hold(0) as held:
            return [store.is_live, held, [str(message.body) for message in store.get_message("T", 0, 0, level="committed").messages]]

    assert as_nobody(attempt) == [False, False, ["b'one'"]]


@pytest.mark.root
def test_status_of_the_engine_of_another_user_says_that_parts_cannot_be_seen(engine):
    document = as_nobody(lambda: engine_status(engine.root, {}))
    assert document["state"] == "running" and "cannot be seen" in document["reason"], document


@pytest.mark.root
@pytest.mark.parametrize(("owner", "run_as"), [(NOBODY, lambda work: work()), (0, lambda work: work()), (NOBODY, as_nobody)],
                         ids=["root in another's", "root in its own", "a user in its own"])
def test_what_commands_make_in_a_store_belongs_to_the_stores_user(give_store, owner, run_as):
    root = give_store(owner)
    for words in (["config", "set", root, "file_reserved_time_hours=24"], ["topics", "create", root, "U"], ["recover", root],
                  ["groups", "reset", root, "--group", "g", "--topic", "T", "--to", "last"], ["rebuild", root],
                  ["tail", root, "--topic", "T", "--group", "h", "--from", "first", "--no-follow"], ["clean", root, "--older-than", "0"],
                  ["promote", root, "--force"]):
        assert run_as(lambda words=words: run(*words).code) == 0, words
        assert not_the_owners(root) == {}, words


@pytest.mark.root
@pytest.mark.parametrize("owner", [NOBODY, pytest.param(0, marks=pytest.mark.ci)], ids=["another's store", "its own"])
def test_an_engine_of_root_leaves_a_store_to_its_user(give_store, make_engine, owner):
    engine = make_engine()
    engine.root = give_store(owner)
    assert run("promote", engine.root, "--force").code == 0
    started = run("start", engine.root)
    assert started.code == 0 and (f"`sudo -u nobody pyengine start {engine.root}`" in started.stderr) is (owner == NOBODY), started
    with pyengine.connect(engine.root) as producer, pyengine.consume(engine.root, "U", group="u") as consumer:
        assert all(producer.put("U", b"x" * 100, keys="k").ok for _ in range(100))
        assert consumer.pull(timeout_s=30)
        consumer.commit()
    engine.wait_noted()
    assert engine.stop()
    assert not_the_owners(engine.root) == {}


@pytest.mark.root
def test_a_new_store_of_root_in_another_users_folder_stays_roots_with_its_log_folders(tmp_path, make_engine):
    theirs, disk = tmp_path / "theirs", tmp_path / "disk"
    for folder, owner in ((theirs, NOBODY), (disk, 0)):
        folder.mkdir()
        os.chown(folder, owner, owner)
    engine = make_engine(store_path_commit_log=f"{disk}/log,{theirs}/log")
    engine.root = theirs / "store"
    for settings in (engine.settings, {}):
        engine.settings = settings
        engine.start()
        assert engine.stop()
    assert {path.stat().st_uid for path in (*theirs.rglob("*"), *disk.rglob("*"))} == {0}


@pytest.mark.root
def test_a_shared_folder_that_another_user_made_is_refused(tmp_path):
    folder = SharedFolder(tmp_path / "pyengine-0123456789abcdef")
    folder.path.mkdir(mode=0o700)
    os.chown(folder.path, NOBODY, NOBODY)
    with pytest.raises(EngineUnavailableError, match="belongs to another user"):
        folder.make()
    os.chown(folder.path, os.geteuid(), os.getegid())
    folder.make()
    folder.path.chmod(0o755)
    with pytest.raises(EngineUnavailableError, match="open to others"):
        folder.make()


@pytest.mark.root
def test_a_log_folder_that_the_stores_user_cannot_write_is_refused_by_root(tmp_path):
    root = tmp_path / "store"
    (root / "commitlog").mkdir(parents=True)
    os.chown(root, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user 0, .*`chown {NOBODY} {tmp_path}/two`"):
        set_durably(root, {"store_path_commit_log": f"{root}/commitlog,{tmp_path}/two"})
    os.chown(tmp_path / "two", NOBODY, NOBODY)
    set_durably(root, {"store_path_commit_log": f"{root}/commitlog,{tmp_path}/two"})


@pytest.mark.root
def test_a_first_start_of_root_refuses_a_log_folder_that_the_next_could_not_use(tmp_path, make_engine):
    engine, log = make_engine(), tmp_path / "disk" / "log"
    engine.root.mkdir()
    os.chown(engine.root, NOBODY, NOBODY)
    with pytest.raises(EngineError, match=f"belongs to user 0, and the store to user {NOBODY}, .*`chown {NOBODY} {log}`"):
        engine.start(store_path_commit_log=str(log))
    os.chown(log, NOBODY, NOBODY)
    for _ in range(2):
        engine.start()
        assert engine.stop()
    assert {path.stat().st_uid for path in (log, *log.iterdir())} == {NOBODY}


@pytest.mark.root
def test_a_log_folder_that_may_not_be_written_gets_no_segment():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.chmod(root, 0o755)
        for name, mode in (("one", 0o755), ("two", 0o777)):
            (root / name).mkdir()
            (root / name).chmod(mode)
        set_log_folders(root, "one,two", "")
        assert as_nobody(lambda: [new_segment_folder(root, n * 64, 64).name for n in range(3)]) == ["two"] * 3


@pytest.mark.root
def test_a_semaphore_that_another_user_made_is_refused(rng):
    import posix_ipc

    short_id = f"{rng.getrandbits(64):016x}"
    name = shared_objects.semaphore_name(short_id, native.FLUSHER)
    as_nobody(lambda: posix_ipc.Semaphore(name, posix_ipc.O_CREX, mode=0o666).close())
    os.seteuid(NOBODY - 1)  # neither that user nor root
    try:
        for act in (shared_objects.unlink_semaphores, shared_objects.create_semaphores):
            with pytest.raises(EngineUnavailableError, match=f"another user has made the named semaphore {name}"):
                act(short_id)
    finally:
        os.seteuid(0)
        shared_objects.unlink_semaphores(short_id)


@pytest.mark.root
def test_another_user_who_may_read_the_lock_can_prevent_a_start_and_is_reported():
    def hold() -> str:
        descriptor = os.open(path, os.O_RDONLY)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
        os.write(held, b"x")
        os.read(go_on, 1)
        return "held"

    ready, held = os.pipe()
    go_on, done = os.pipe()
    with tempfile.TemporaryDirectory() as folder, StoreLock(folder, create=True) as lock, ThreadPoolExecutor(1) as other:
        os.chmod(folder, 0o755)
        path = lock.path
        told = other.submit(as_nobody, hold)
        os.read(ready, 1)
        try:
            with pytest.raises(StoreBusyError, match=f"a process that is not a worker holds a lock on {path}"):
                lock.own()
        finally:
            os.write(done, b"x")
        assert told.result() == "held" and lock.own()
        path.chmod(0o600)
        assert "PermissionError" in as_nobody(hold)
    for descriptor in (ready, held, go_on, done):
        os.close(descriptor)


def locks_of(root):
    return [path for path in (root / "config").rglob("*") if path.is_file() and (path.suffix == ".lock" or path.parent.name == "consumers")]


@pytest.mark.root
def test_another_user_can_lock_no_file_that_stops_consumers_tables_or_transactions(make_engine):
    """To read a file is enough to lock it. Files of an older version are closed to others at the start."""
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, transaction_timeout_ms=0) as producer, pyengine.consume(engine.root, "T", group="g") as consumer:
        with producer.transaction(group="t", checker=lambda message: None) as transaction:
            transaction.put("T", b"x")
        producer.check_transactions()
        assert consumer.pull(timeout_s=30)
        consumer.commit()
    made = locks_of(engine.root)
    assert {path.name for path in made} >= {"transactions.lock", "topics.json.lock", "T@g", "consumerOffset.json.lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o600}
    engine.stop()
    for path in made:
        path.chmod(0o644)
    engine.start()
    assert {stat.S_IMODE(path.stat().st_mode) for path in locks_of(engine.root)} == {0o600}


@pytest.mark.root
@pytest.mark.parametrize("umask", [0o002, 0o022], ids=oct)
@pytest.mark.parametrize("mode", [0o2775, 0o2755, 0o777], ids=oct)
def test_a_lock_that_a_killed_process_left_is_for_those_who_may_write_in_the_folder(mode, umask):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 0, NOBODY)
        folder.chmod(mode)
        child = os.fork()
        if child == 0:
            os.umask(umask)
            with locked_folder(folder):
                os._exit(0)
        os.waitpid(child, 0)
        lock = folder / ".pyengine.lock"
        def taken() -> bool:
            with locked_folder(folder):
                return True

        is_shared = mode == 0o2775
        assert stat.S_IMODE(lock.stat().st_mode) == (0o660 if is_shared else 0o600)
        assert as_nobody(taken) == (is_shared or f"DiskError: cannot lock {lock}: Permission denied")
        assert lock.exists() == (not is_shared)


@pytest.mark.root
def test_a_private_file_that_a_member_put_in_the_place_of_the_lock_stays_private():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chown(folder, 0, NOBODY)
        folder.chmod(0o2775)
        lock = folder / ".pyengine.lock"
        lock.touch(0o600)
        with locked_folder(folder):
            assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.root
def test_root_opens_no_lock_file_that_is_a_link_to_another_users_file(tmp_path):
    other = tmp_path / "other"
    for name, make in {"link": Path.symlink_to, "hard": Path.hardlink_to}.items():
        root = tmp_path / name
        (root / "config").mkdir(parents=True)
        other.write_bytes(b"of root")
        for folder in (root, root / "config"):
            os.chown(folder, NOBODY, NOBODY)
        for file in ("transactions.lock", "consumerOffset.lock", "topics.json.lock"):
            path = root / "config" / file
            make(path, other)
            if name == "link":
                os.lchown(path, NOBODY, NOBODY)
            with pytest.raises(DiskError):
                open_shared_file(path)
    assert other.read_bytes() == b"of root" and other.stat().st_uid == 0


def test_shared_objects_are_the_engines_users_alone(engine):
    folder = find_folder(engine.root)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with pyengine.connect(engine.root):
        modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.path.iterdir()}
        assert set(modes.values()) == {"0o600"}, modes
    semaphores = [path for path in Path("/dev/shm").glob("sem.pyengine-*") if folder.short_id in path.name]
    assert len(semaphores) == len(SEMAPHORE_KINDS)
    assert {stat.S_IMODE(path.stat().st_mode) for path in semaphores} == {0o600}


# Puts once, cuts all that it was given down to nothing, and waits to be killed.
CUTTING = """
import os, sys
import pyengine
producer = pyengine.connect(sys.argv[1])
assert producer.put("H", b"x").ok
cut = []
for name in os.listdir("/proc/self/fd"):
    try:
        path = os.readlink(f"/proc/self/fd/{name}")
        if os.path.dirname(path) == sys.argv[2]:
            os.ftruncate(int(name), 0)
            cut.append(os.path.basename(path).split("-")[0])
    except OSError:
        pass
print(*sorted(set(cut)), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_producer_is_given_nothing_that_reaches_the_log(engine):
    folder = find_folder(engine.root)
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"two").ok
        assert opened_writable(engine.root) == set()
        writable = {os.path.basename(path).split("-")[0] for path in mapped_writable() if str(folder.path) in path}
        assert writable == {"session"}
        control = next(fd for fd in map(int, os.listdir("/proc/self/fd"))
                       if os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}") == str(folder.path / "control"))
        with pytest.raises(PermissionError):
            mmap.mmap(control, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_cutting_short_all_that_a_producer_was_given_costs_its_session_only(make_engine):
    engine = make_engine()
    engine.start()
    before = engine.pids()
    with pyengine.connect(engine.root) as good, pyengine.open_store(engine.root) as reader:
        assert good.put("G", b"before").ok
        command = [sys.executable, "-c", CUTTING, str(engine.root), str(find_folder(engine.root).path)]
        hostile = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert hostile.stdout.readline() == "session\n"
            assert good.put("G", b"after").ok
            assert reader.wait_for_message("G", 0, 1, timeout_s=30)
            for kind in before:
                with engine.memory(writable=True) as memory:
                    memory.wake(KIND_NAMES.index(kind))
            with pyengine.connect(engine.root) as late:
                assert late.put("G", b"late").ok
        finally:
            hostile.communicate("\n")
    assert engine.pids() == before
    assert {kind: engine.incarnation(kind) for kind in before} == dict.fromkeys(before, 1)


# Writes nonsense to all that it has mapped writable in /dev/shm, while it puts; ends without a word.
SCRIBBLING = """
import ctypes, os, random, re, sys, threading, time
import pyengine
dice = random.Random(int(sys.argv[2]))
producer = pyengine.connect(sys.argv[1])
assert producer.put("H", b"x").ok
lines = [line for line in map(str.split, open("/proc/self/maps")) if line[1] == "rw-s" and "pyengine" in line[-1]]
spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
print(*sorted({re.sub("[0-9].*", "", os.path.basename(line[-1])) for line in lines}), flush=True)

def put():
    while True:
        try:
            producer.put("H", b"y", timeout_s=0.05)
        except pyengine.EngineError:
            pass

threading.Thread(target=put, daemon=True).start()
for _ in range(3000):
    begin, end = dice.choice(spans)
    at = begin + dice.randrange(min(end - begin, dice.choice([64, 640, 4096, 1 << 30])) - 31)
    nonsense = dice.choice([dice.randbytes(32), b"\\xff" * 32, bytes(32), dice.randbytes(4) + bytes(28)])
    ctypes.memmove(at, nonsense, dice.choice([1, 4, 8, 32]))
    if dice.random() < 0.05:
        time.sleep(0.0005)
os._exit(0)
"""
# Wakes the writer in vain until it has used a second of CPU. Its other threads sleep where the writer sleeps, and take wake-ups.
RINGING = """
import ctypes, platform, sys, threading, time
from pyengine._native import ffi
from pyengine.ipc.session_client import open_session
from pyengine.native import control as native
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]
call = ctypes.CDLL(None).syscall
with open_session(sys.argv[1]) as session:
    flag = ctypes.c_void_p(int(ffi.cast("uintptr_t", ffi.addressof(session.control.latch[native.WRITER], "has_notified"))))

    def sleep_there():
        while True:
            call(FUTEX, flag, 0, 0, None)

    for _ in range(int(sys.argv[2])):
        threading.Thread(target=sleep_there, daemon=True).start()
    print("begun", flush=True)
    while time.process_time() < 1:
        for _ in range(1000):
            call(FUTEX, flag, 1, 1 << 30)
"""


def test_nothing_that_a_producer_can_write_ends_or_stalls_a_worker(make_engine, rng):
    engine = make_engine()
    engine.start()
    before = engine.pids()
    with pyengine.connect(engine.root) as good:
        for _ in range(4):
            command = [sys.executable, "-c", SCRIBBLING, str(engine.root), str(rng.getrandbits(32))]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
                assert hostile.stdout.readline() == "session-\n"
                while hostile.poll() is None:
                    assert good.put("G", b"meanwhile").ok
            assert hostile.returncode in (0, -signal.SIGSEGV, -signal.SIGABRT)
    assert engine.pids() == before
    assert {kind: engine.incarnation(kind) for kind in before} == dict.fromkeys(before, 1)
    engine.stop()
    assert check_now(engine.root, load_config(engine.root)).findings == []


@pytest.mark.parametrize("sleepers", usual([0, 4], [4], pytest.mark.ci))
def test_a_producer_that_rings_for_nothing_costs_the_writer_little(make_engine, sleepers):
    engine = make_engine()
    engine.start()
    writer = psutil.Process(engine.pid("writer"))
    with pyengine.connect(engine.root) as good:
        before_s = sum(writer.cpu_times()[:2])
        command = [sys.executable, "-c", RINGING, str(engine.root), str(sleepers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hostile:
            assert hostile.stdout.readline() == "begun\n"
            for _ in range(20):
                assert good.put("G", b"meanwhile").ok
        assert hostile.returncode == 0
        assert sum(writer.cpu_times()[:2]) - before_s < 0.2
        assert good.put("G", b"after").ok


def test_a_reader_has_nothing_of_the_store_writable(engine):
    with pyengine.open_store(engine.root) as store, store.hold(0) as held:
        assert held and store.get_message("T", 0, 0).messages[0].body == b"one"
        assert opened_writable(engine.root) == set()
        folder = find_folder(engine.root).path
        assert opened_writable(folder) == {path for path in mapped_writable() if path.startswith((str(folder), str(engine.root)))} == set()


def test_random_bytes_where_the_cleaner_is_asked_delete_no_segment(make_engine, rng):
    """A `pyengine clean` can write where the cleaner notes its progress: whatever it writes there, nothing is deleted."""
    engine = make_engine(clean_resource_interval_ms=1)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for _ in range(3):
            assert producer.put_many("T", [b"x" * 4000] * 260).ok
    engine.wait_noted()
    before = sorted(os.listdir(engine.root / "commitlog"))
    with (Cleaning(find_folder(engine.root)) as cleaning, engine.memory() as memory, memoryview(cleaning.shared.memory) as block):
        line = memory.control.workers[native.CLEANER]
        for _ in range(20):
            block[128:640] = rng.randbytes(512)
            seen = native.load(line, "heartbeat_ns")
            eventually(lambda: native.load(line, "heartbeat_ns") > seen + 5_000_000, "it went round")
            assert sorted(os.listdir(engine.root / "commitlog")) == before
        assert native.load(line, "incarnation") == 1


@pytest.mark.parametrize(("umask", "right"), [(0o077, 0o077), (0, 0o022)], ids=["no other user reads", "no other user writes"])
def test_whatever_the_umask_other_users_have_no_more_rights_on_a_store_than_promised(make_engine, umask, right):
    before = os.umask(umask)
    try:
        engine = make_engine()
        engine.start()
        with pyengine.connect(engine.root) as producer:
            assert producer.put("T", b"one", keys="k").ok
        engine.stop()
    finally:
        os.umask(before)
    assert [path for path in [engine.root, *engine.root.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & right] == []


def test_metrics_answer_this_machine_alone_by_default():
    listen = next(param for param in metrics.params if param.name == "listen")
    assert str(listen.default).startswith("127.0.0.1:")


@pytest.fixture
def master(make_owner):
    """master(**settings) -> (owner, the replicator of its SYNC_MASTER in this process, the log that it serves)."""
    served: list[HAService] = []

    def make(**settings):
        owner, writer = store_with_writer(make_owner, mode=native.MODE_MAPPED, role=1, replicates=1)
        for number in range(20):
            writer.put(b"message %d" % number)
        create_replication(owner.folder)
        config = EngineConfig(broker_role="SYNC_MASTER", **{"ha_allow_plain": "127.0.0.1", **settings})
        served.append(HAService(owner.context(config), Replication(owner.folder, writable=True), port=0))
        served[-1].start()
        return owner, served[-1], writer

    yield make
    for one in served:
        one.close()


def until(service: HAService, slave: WireSlave, condition: Callable[[], object], what: str) -> None:
    def step():
        service.work()
        slave.take()
        return condition()
    eventually(step, what)


def test_a_master_listens_for_this_machine_alone_by_default(master):
    _, service, _ = master()
    addresses = {connection.laddr.ip for connection in psutil.Process().net_connections("tcp")
                 if connection.laddr.port == service.port and connection.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}
    assert EngineConfig().ha_port == EngineConfig(broker_role="SLAVE", ha_listen_port=5000).ha_port == 0


def test_every_peer_from_an_allowed_address_gets_the_log(master):
    _, service, writer = master()
    with contextlib.closing(WireSlave(service.port)) as plain_slave:
        plain_slave.report(1)
        until(service, plain_slave, lambda: plain_slave.end == writer.end, "all of it came")
        assert b"message 19" in plain_slave.log


@pytest.mark.parametrize("settings", [{}, {"ha_secret_file": SECRET}, {"ha_secret_file": SECRET, "ha_allow_plain": "10.0.0.0/8"}],
                         ids=["nothing set", "secret", "secret and other addresses"])
def test_a_stranger_on_the_replication_port_gets_nothing(master, tmp_path, settings):
    settings = {"ha_allow_plain": ""} | settings
    if "ha_secret_file" in settings:
        settings["ha_secret_file"] = secret_file(tmp_path)
    owner, service, writer = master(**settings)
    for words in (ha_wire.REPORT.pack(1), ha_wire.REPORT.pack(writer.end), ha_wire.HELLO + bytes(ha_wire.PROOF_BYTES)):
        with socket.create_connection(("127.0.0.1", service.port), 30) as stranger:
            stranger.sendall(words)
            heard = b""
            with contextlib.suppress(ConnectionError):
                while data := stranger.recv(65536):
                    heard += data
            assert len(heard) in (0, len(ha_wire.CHALLENGE) + ha_wire.NONCE_BYTES), "a random number at most"
    assert native.load_position(owner.control.confirm) == 0
    assert native.load(owner.control.replicator, "slaves_connected") == 0, "puts are told SLAVE_NOT_AVAILABLE"


def test_a_false_slave_can_confirm_only_bytes_that_it_was_sent(master):
    owner, service, writer = master()
    before = {name: native.load_position(getattr(owner.control, name)) for name in ("wrote", "committed", "flushed")}
    for words in ((1 << 40,), (1, writer.end + 1), (-5,), (1, 1 << 62)):
        with contextlib.closing(WireSlave(service.port)) as false:
            false.report(words[0])
            if len(words) > 1:
                until(service, false, lambda: false.end == writer.end, "it was sent the log")
                false.report(words[1])
            eventually(lambda: not false.take(), "its link is closed")
    assert native.load_position(owner.control.confirm) == 0
    with contextlib.closing(WireSlave(service.port)) as modest:
        modest.report(1)
        until(service, modest, lambda: modest.end == writer.end, "it was sent the log")
        modest.report(writer.end)
        until(service, modest, lambda: native.load_position(owner.control.confirm) == writer.end, "the report is confirmed")
    assert {name: native.load_position(getattr(owner.control, name)) for name in before} == before


def test_more_links_than_allowed_are_closed(master):
    _, service, _ = master(ha_connections_max=2)
    with contextlib.ExitStack() as links:
        first, second = (links.enter_context(contextlib.closing(WireSlave(service.port))) for _ in range(2))
        for one in (first, second):
            one.report(1)
            until(service, one, lambda: one.start >= 0, "it is served")
        third = links.enter_context(contextlib.closing(WireSlave(service.port)))
        eventually(lambda: not third.take(), "the third is closed")
        assert first.take() and second.take(), "and the others are not"


def test_a_false_master_adds_whole_records_or_nothing(tmp_path, rng):
    own = LogBuilder(65536)
    own.append_varied(rng, 10)
    own.write(tmp_path)
    more = LogBuilder(65536)
    more.append_varied(rng, 30)
    other = bytes(more.segments[0])[:more.end]

    def hear(offset: int, data: bytes) -> list[int]:
        """Return where the runs end that would be appended, of a slave that begins at its own first byte."""
        stream, ends = RecordStream(0, own.end, CommitLog(tmp_path, 65536), 65536, 1 << 20), []
        try:
            stream.take(offset, memoryview(data))
            while run := stream.whole():
                ends.append(run.end)
                stream.drop(run.end)
        except (BadStreamError, LogsDifferError):
            pass
        return ends

    own_bytes = bytes(own.segments[0])[:own.end]
    assert hear(0, other) == [], "another log, from the first byte on"
    assert hear(500, other) == [], "a place that was not asked for"
    for _ in range(50):
        assert hear(0, own_bytes + rng.randbytes(rng.randrange(1, 400))) == [], "bytes that are no record"
    whole = LogBuilder(65536, 0)
    whole.append_varied(random.Random(1), 1)
    record = bytes(whole.segments[0])[:whole.end]
    assert hear(0, own_bytes + record) == [], "a whole record that names another place"
