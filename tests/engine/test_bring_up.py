"""Bringing an engine up: `confirm` and dispatch where they were noted, and too few descriptors refused at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys

import pytest

import pyengine
from fix_cli import command_line, environment, spawn
from fix_engine import SMALL
from fix_golden import usual
from fix_owner import CHECKOUT
from pyengine.cli.promote import promote_stopped
from pyengine.engine import bring_up as bring_up_module
from pyengine.engine.bring_up import DESCRIPTORS_MIN, DESCRIPTORS_RAISED_TO, FIRST_GENERATION, bring_up, require_descriptors
from pyengine.engine.kinds import raise_descriptors
from pyengine.errors import CorruptionError, DiskFullError, EngineError, EngineUnavailableError, UsageError
from pyengine.formats.index_file import IndexLayout
from pyengine.ipc import sessions, shared_objects
from pyengine.ipc.live_reader import open_store
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.native.session import session_bytes
from pyengine.native.writer import get_queue_offset, view_queue_table
from pyengine.storage.config import load_config
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import scaled_timeout_s

MASTER = {"broker_role": "SYNC_MASTER", "dispatch_at": "replicated"}
FEW = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("confirmed") / "store"
    with pyengine.Engine(root, **SMALL) as engine, engine.connect() as producer:
        places = [producer.put("T", bytes([number]) * 100) for number in range(3)]
        size = places[1].physical_offset - places[0].physical_offset
    return root, [place.physical_offset + size for place in places]


@pytest.fixture
def store(made, tmp_path):
    """(root, ends of its three records), stopped in order; everything is in its queue."""
    root, ends = made
    return shutil.copytree(root, tmp_path / "store"), ends


def give_up(problem: EngineError) -> None:
    """Do not wait for a master."""
    raise problem


@contextlib.contextmanager
def brought_up(root, **settings):
    """The memory of an engine without workers, as a start leaves it."""
    config = load_config(root, settings, {})
    with StoreLock(root, create=True) as lock:
        lock.own()
        memory = bring_up(root, config, lock, give_up).memory
        try:
            yield memory
        finally:
            semaphore, folder = memory.identity.sysv_semaphore_id, memory.folder
            memory.close()
            sessions.remove_attach_count(semaphore)
            folder.sweep()


def position(memory, name):
    return native.load_position(getattr(memory.control, name))


def seen(root):
    with open_store(root) as reader:
        return reader.queue_range("T", 0)[1]


@pytest.mark.parametrize("step", ["_set_positions", "set_confirmed", "create_abort_file"])
def test_a_start_that_fails_before_it_is_published_leaves_no_memory_and_no_semaphore(store, monkeypatch, step):
    root, _ = store
    made = []

    def fail(*arguments):
        raise DiskFullError("no room")

    monkeypatch.setattr(sessions, "make_attach_count", lambda make=sessions.make_attach_count: made.append(make()) or made[-1])
    monkeypatch.setattr(bring_up_module, step, fail)
    with pytest.raises(DiskFullError, match="no room"), brought_up(root, **MASTER):
        pass
    assert made == [] and shared_objects.find_folder(root).names() == []


# In a namespace of its own, which has no other engine's semaphores: an engine is killed, the start after it is killed at a step,
# and recovery removes what both have left.
KILLED_TWICE = """
import os, sys
from pathlib import Path
from pyengine.cli.torture import KillRounds
from pyengine.errors import EngineError
from pyengine.ipc.crashed_engine_memory import recover_offline
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.config import load_config

def semaphores():
    return len(Path("/proc/sysvipc/sem").read_text().splitlines()) - 1

root, step = Path(sys.argv[1]), sys.argv[2]
rounds = KillRounds(root, {}, None)
rounds.start_engine()
rounds.kill_remaining()
assert semaphores() == 1
os.environ[VARIABLE] = f"{step}:1:kill"
try:
    rounds.start_engine()
    raise AssertionError("it was not killed")
except EngineError:
    rounds.kill_remaining()
recover_offline(root, load_config(root, {}))
print(semaphores())
"""


@pytest.mark.root
@pytest.mark.parametrize("step", usual(
    ["epoch_raised", "shared_object_named", "memory_made", "engine_opened", "engine_published"], ["memory_made", "engine_opened"],
    pytest.mark.ci))
def test_after_a_start_that_was_killed_recovery_removes_all_semaphores(store, step):
    done = subprocess.run(["unshare", "--ipc", sys.executable, "-P", "-c", KILLED_TWICE, store[0], step], capture_output=True, text=True,
                          timeout=scaled_timeout_s(120))
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.parametrize(("beyond", "visible"), [(0, 1), (7, 1), (-1, 0)])
def test_unconfirmed_messages_stay_unseen_although_recovery_has_dispatched_them(store, beyond, visible):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("SYNC_MASTER", ends[0] + beyond))
    assert seen(root) == 3
    with brought_up(root, **MASTER) as memory:
        assert position(memory, "confirm") == ends[0] + beyond
        assert position(memory, "reput_from") == ([0, *ends])[visible], "at the boundary of a record"
        assert position(memory, "wrote") == ends[2]
        assert seen(root) == visible
        native.store_position(memory.control.reput_from, ends[2])
        assert seen(root) == visible, "not even where queues were written on"
    assert seen(root) == visible, "nor without an engine"


def test_a_store_that_no_slave_has_confirmed_shows_nothing(store):
    root, _ = store
    with brought_up(root, **MASTER) as memory:
        assert (position(memory, "confirm"), position(memory, "reput_from"), seen(root)) == (0, 0, 0)
    assert ReplicationStateFile(root).read().state == ReplicationState("SYNC_MASTER", 0)


def test_a_sync_master_that_lost_confirmed_bytes_does_not_start_without_ha_cut_any(store):
    root, ends = store
    noted = ReplicationState("SYNC_MASTER", ends[2] + 1000)
    ReplicationStateFile(root).write(noted)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="1,000 bytes are lost here.*pyengine promote"), \
                brought_up(root, broker_role="SYNC_MASTER"):
            pass
        assert ReplicationStateFile(root).read().state == noted, "the proof stays"
    with brought_up(root, broker_role="SYNC_MASTER", ha_cut="any") as memory:
        assert position(memory, "confirm") == position(memory, "reput_from") == ends[2]
        assert ReplicationStateFile(root).read().state == ReplicationState("SYNC_MASTER", ends[2])


@pytest.mark.parametrize("settings", [{}, {"ha_listen_port": "10999"}])
def test_an_async_master_says_so_and_never_calls_other_bytes_confirmed(store, settings):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("ASYNC_MASTER", ends[2] + 1000))
    with brought_up(root, **settings) as memory:
        assert position(memory, "confirm") == (ends[2] if settings else 0)
    # Durable before the first put: no slave has confirmed what comes next there.
    assert ReplicationStateFile(root).read().state == ReplicationState("ASYNC_MASTER", ends[2])


@pytest.mark.parametrize("role", ["ASYNC_MASTER", "SYNC_MASTER"])
def test_a_slave_becomes_a_master_by_promotion_alone(store, role):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("SLAVE", ends[2]))
    with pytest.raises(UsageError, match="pyengine promote"), brought_up(root, broker_role=role):
        pass
    with brought_up(root, broker_role="SLAVE"):
        pass


@pytest.mark.parametrize("spoilt", ["{", "", None])
def test_no_store_becomes_a_master_for_want_of_a_readable_role(store, spoilt):
    """The backup of the file is older: the store may have become a slave since."""
    root, ends = store
    file = ReplicationStateFile(root)
    file.write(ReplicationState("SYNC_MASTER", ends[2]))
    file.write(ReplicationState("SLAVE", ends[2]))
    file.path.unlink() if spoilt is None else file.path.write_text(spoilt)
    before = tree(root)
    for role in ("ASYNC_MASTER", "SYNC_MASTER"):
        with pytest.raises(UsageError, match=r"replication\.json .*`pyengine promote"), brought_up(root, broker_role=role):
            pass
    assert tree(root) == before
    with brought_up(root, broker_role="SLAVE"):
        pass
    promote_stopped(root, {}, "SYNC_MASTER", False, [])
    with brought_up(root):
        assert ReplicationStateFile(root).read() == (ReplicationState("SYNC_MASTER", ends[2], term=1), "")


def tree(root):
    return {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file() and path.name != "lock"}


def test_a_slave_that_lost_reported_bytes_lowers_its_confirm_to_the_end_of_its_log(store):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("SLAVE", ends[2] + 1000, master_end=ends[2] + 2000))
    with brought_up(root, broker_role="SLAVE", ha_master_address="127.0.0.1:9") as memory:
        assert position(memory, "confirm") == ends[2]
        assert native.load(memory.control.replicator, "master_end") == ends[2] + 2000, "what is missing is not forgotten"
    assert ReplicationStateFile(root).read().state.confirm == ends[2]


def killed_with_confirm(root, config, confirm):
    """An engine whose memory has that as confirmed, as kill -9 leaves it: it was not said that it is over."""
    with StoreLock(root, create=True) as lock:
        lock.own()
        memory = bring_up(root, config, lock, give_up).memory
        native.store_position(memory.control.confirm, confirm)
        sessions.remove_attach_count(memory.identity.sysv_semaphore_id)
        memory.close()


def test_a_dead_engines_confirm_in_memory_overrides_the_one_in_its_file(store):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("SYNC_MASTER", ends[0]))
    killed_with_confirm(root, load_config(root, MASTER, {}), ends[1])
    with brought_up(root, **MASTER) as memory:
        assert position(memory, "confirm") == position(memory, "reput_from") == ends[1]


def test_a_dead_engines_confirm_in_memory_survives_a_refused_start(store, monkeypatch):
    root, ends = store
    ReplicationStateFile(root).write(ReplicationState("SLAVE", ends[0], term=4))
    slave = {"broker_role": "SLAVE", "ha_master_address": "127.0.0.1:9"}
    config = load_config(root, slave, {})
    killed_with_confirm(root, config, ends[1])
    remembered = []

    def refuse(store, config, low, end, known):
        remembered.append(known)
        raise EngineError("refused")

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.engine.bring_up.join", refuse)
        for _ in range(2):
            with StoreLock(root) as lock, pytest.raises(EngineError, match="refused"):
                lock.own()
                bring_up(root, config, lock, give_up)
    assert remembered == [ends[1], 0], "the memory is gone after the first"
    assert ReplicationStateFile(root).read().state == ReplicationState("SLAVE", ends[1], term=4)
    with brought_up(root, **slave) as memory:
        assert position(memory, "confirm") == ends[1]


def test_with_the_setting_gone_everything_is_seen_again(store):
    root, ends = store
    with brought_up(root, **MASTER):
        assert seen(root) == 0
    with brought_up(root, broker_role="SYNC_MASTER") as memory:
        assert position(memory, "reput_from") == ends[2] and seen(root) == 3
    assert seen(root) == 3


@pytest.mark.parametrize("settings", [{}, {"broker_role": "SLAVE"}])
def test_without_replication_nothing_is_noted_and_nothing_bounded(store, settings):
    root, ends = store
    with brought_up(root, **settings) as memory:
        assert (position(memory, "confirm"), position(memory, "reput_from")) == (0, ends[2])
    assert not ReplicationStateFile(root).path.exists()


def test_after_entries_that_have_moved_up_no_number_is_given_twice(store):
    root, _ = store
    (file,) = (root / "consumequeue" / "T" / "0").iterdir()
    entries = file.read_bytes()
    file.write_bytes(entries[20:] + bytes(20))
    with brought_up(root) as memory, memory.folder.attach(shared_objects.queues_name(FIRST_GENERATION)) as shared:
        assert seen(root) == 2
        assert get_queue_offset(view_queue_table(shared.memory), "T", 0) == 3


# ---- how many files a process may have open --------------------------------------


def with_limit(number: int):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


@pytest.mark.parametrize("settings, cpus, spins", [
    ({}, 2, True), ({"gateway_enable": True}, 2, False), ({"gateway_enable": True}, 4, True),
    ({"gateway_enable": True, "spin": 30}, 2, True), ({"broker_role": "SYNC_MASTER"}, 3, False), ({"broker_role": "SYNC_MASTER"}, 4, True),
])
def test_puts_that_pass_through_more_processes_than_there_are_cpus_are_not_spun_for(store, monkeypatch, settings, cpus, spins):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    with brought_up(store[0], **SMALL | settings) as memory:
        identity = memory.identity
        assert (identity.spin_writer_us > 0, identity.spin_producer_us > 0) == (spins, spins)


def test_a_start_with_too_few_descriptors_is_refused_at_once(tmp_path):
    root = tmp_path / "store"
    done = spawn("start", root, preexec_fn=with_limit(FEW))
    assert done.code == 1 and f"may have {FEW} files open" in done.stderr and "ulimit -n" in done.stderr, done
    assert f"needs {DESCRIPTORS_MIN}" in done.stderr and "Traceback" not in done.stderr and not root.exists()


def test_a_start_whose_pool_leaves_too_few_descriptors_is_refused(tmp_path):
    settings = {**SMALL, "transient_store_pool_enable": "true", "transient_store_pool_size": 10}
    done = spawn("start", tmp_path / "store", *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
                 preexec_fn=with_limit(DESCRIPTORS_MIN + 19))
    assert done.code == 1 and f"needs {DESCRIPTORS_MIN + 20}" in done.stderr and "Traceback" not in done.stderr, done


LITTLE = {**SMALL, "message_index_enable": "false", "session_ring_bytes": 65_536}


@pytest.mark.parametrize("settings, longest", [
    ({**LITTLE, "mapped_file_size_commit_log_bytes": 1 << 26}, 1 << 26),
    pytest.param({**LITTLE, "mapped_file_size_consume_queue_bytes": 6_000_000}, 6_000_000, marks=pytest.mark.ci),
    pytest.param({**LITTLE, "enable_consume_queue_ext": "true"}, 48 << 20, marks=pytest.mark.ci),
    ({**SMALL, "max_index_num": 500_000}, IndexLayout(1000, 500_000).size_bytes),
    pytest.param(SMALL, session_bytes(4 << 20), marks=pytest.mark.ci),
], ids=["log", "consume queue", "extension", "index", "ring"])
def test_a_start_that_may_not_make_files_so_long_is_refused(tmp_path, settings, longest):
    """It ran, and said of each put that the disk is full for a moment, or made no queue entries for good."""
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    limit = longest - 1
    done = spawn("start", tmp_path / "store", *words, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.code == 1 and f"a file may have {limit:,} bytes here, and this store's have up to {longest:,}: " in done.stderr, done
    assert "ulimit -f" in done.stderr and not (tmp_path / "store" / "commitlog").exists()


def refuse_pidfds(number: int) -> None:
    """For preexec_fn: refuse pidfd_open with this errno by a seccomp filter, as profiles of old container engines do."""
    load, if_equal, end, allow, refuse, pidfd_open = 0x20, 0x15, 0x06, 0x7FFF0000, 0x50000, 434
    words = [(load, 0, 0, 0), (if_equal, 0, 1, pidfd_open), (end, 0, 0, refuse | number), (end, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *word) for word in words))
    libc, set_no_new_privileges, set_seccomp, filtered = ctypes.CDLL(None, use_errno=True), 38, 22, 2
    program = ctypes.create_string_buffer(struct.pack("@HP", len(words), ctypes.addressof(code)))
    if libc.prctl(set_no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, filtered, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


@pytest.mark.parametrize(("words", "number"), [
    (command_line("start"), errno.EPERM),
    ([sys.executable, "-m", "pyengine.workers.supervisor"], errno.ENOSYS)], ids=["start", "supervisor"])
def test_a_start_where_no_worker_can_be_watched_says_so_at_once_and_makes_nothing(tmp_path, words, number):
    done = subprocess.run([*words, tmp_path / "store"], cwd=CHECKOUT, capture_output=True, text=True, env=environment(),
                          timeout=scaled_timeout_s(40), preexec_fn=lambda: refuse_pidfds(number))
    assert done.returncode == 1 and f"refuses pidfd_open ({os.strerror(number)})" in done.stderr, done
    assert not (tmp_path / "store" / "commitlog").exists()


@pytest.mark.parametrize(("soft", "hard", "becomes"), [
    (FEW, 1 << 20, 2048), (FEW, 60, 60), (1024, resource.RLIM_INFINITY, 2048), (DESCRIPTORS_MIN, DESCRIPTORS_MIN, None),
    (4096, 1 << 20, None),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None), (FEW, FEW, "refused")])
def test_a_supervisor_raises_its_descriptor_limit_as_far_as_it_may(monkeypatch, soft, hard, becomes):
    raised = []
    monkeypatch.setattr(bring_up_module.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(bring_up_module.resource, "setrlimit", lambda which, pair: raised.append(pair))
    if becomes == "refused":
        with pytest.raises(EngineError, match="LimitNOFILE="):
            require_descriptors()
    else:
        require_descriptors()
        raise_descriptors(DESCRIPTORS_RAISED_TO)
    assert raised == ([(becomes, hard)] if isinstance(becomes, int) else [])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_fewest_that_are_not_refused_are_enough_for_all_workers_and_a_dozen_producers(tmp_path):
    """In pool mode, with a replicator and forty queues."""
    root = tmp_path / "store"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {**SMALL, "transient_store_pool_enable": "true", "transient_store_pool_size": 2, "ha_listen_port": port}
    with_few = with_limit(DESCRIPTORS_MIN + 2 * int(settings["transient_store_pool_size"]))
    done = spawn("start", root, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
                 preexec_fn=with_few)
    assert done.code == 0, done
    try:
        with contextlib.ExitStack() as stack:
            producers = [stack.enter_context(pyengine.connect(root)) for _ in range(12)]
            for number in range(480):
                assert producers[number % 12].put(f"t{number % 40}", bytes(500), keys="k", timeout_s=20).ok
        with pyengine.open_store(root) as store:
            for queue in range(40):
                assert store.wait_for_message(f"t{queue}", 0, 11, 60), queue
    finally:
        done = spawn("stop", root, preexec_fn=with_few)
    assert done.code == 0, done
    assert spawn("check", root, preexec_fn=with_few).code == 0
    assert os.strerror(errno.EMFILE) not in (root / "engine.log").read_text()


def test_producers_beyond_the_writers_descriptor_limit_are_refused_and_the_others_continue(tmp_path):
    """The writer maps each session: with one too many it could not even start again, and all puts would wait."""
    root = tmp_path / "store"
    done = spawn("start", root, *(word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")),
                 "--set", "sessions_max=1024", preexec_fn=with_limit(DESCRIPTORS_MIN + 12))
    assert done.code == 0, done
    try:
        with contextlib.ExitStack() as stack:
            producers = []
            with pytest.raises(EngineUnavailableError, match=r"sessions are taken: .*sessions_max.*`ulimit -n`"):
                for _ in range(64):
                    producers.append(stack.enter_context(pyengine.connect(root)))
                    assert producers[-1].put("T", b"first").ok
            assert len(producers) >= 24
            for number in range(200):
                assert producers[number % len(producers)].put("T", bytes(3000)).ok
    finally:
        done = spawn("stop", root)
    assert done.code == 0, done
    assert os.strerror(errno.EMFILE) not in (root / "engine.log").read_text()
