"""A store's owner without workers: what a supervisor sets up, for tests of single workers and services."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import forked
from forked import ForkedProcess
from pyengine._native import ffi, lib
from pyengine.ipc import sessions, shared_objects
from pyengine.ipc.cleaning import create_cleaning
from pyengine.ipc.control_block import EngineMemory, boot_ns, now_ms, write_run_settings
from pyengine.ipc.heartbeat import Heartbeat, process_start_ms
from pyengine.ipc.replication import create_replication
from pyengine.ipc.shared_objects import SharedFolder
from pyengine.ipc.store_lock import StoreLock
from pyengine.native import control as native
from pyengine.services.service import ServiceContext
from pyengine.storage.config import EngineConfig, record_sizes
from pyengine.storage.engine_id import ensure_engine_id, raise_epoch, read_boot_id
from pyengine.storage.message_store import MessageStore
from waiting import eventually

DEFAULTS = {"session_ring_bytes_default": 4 << 20, "max_message_bytes": 4 << 20, "put_timeout_ms": 10_000, "sync_flush_timeout_ms": 5000,
            "os_page_cache_busy_timeout_ms": 1000, "sessions_max": 256, "sysv_semaphore_id": -1, "slave_timeout_ms": 3000,
            "ha_slave_fallbehind_max_bytes": 256 << 20, "min_in_sync_replicas": 1}
CHECKOUT = Path(__file__).resolve().parent.parent


def identity_of(engine_id, **fields) -> dict:
    """The fields of an engine's identity, with these and the defaults of the settings."""
    return DEFAULTS | {"store_uuid": engine_id.uuid.bytes, "boot_id": read_boot_id(), "engine_id_device": engine_id.device,
                       "engine_id_inode": engine_id.inode} | fields


def add_sync(stats, took_ns: int) -> None:
    """Count the duration of one fdatasync, as the flusher does."""
    lib.ms_latency_add(ffi.addressof(stats.sync, "latency"), took_ns)


class Owner:
    """Holds the store as a supervisor does, in the test's own process; recovers nothing."""

    def __init__(self, root: Path, **identity) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        identity = {"segment_bytes": 65536, **identity}
        self.config = EngineConfig(mapped_file_size_commit_log_bytes=identity["segment_bytes"],
                                   mapped_file_size_consume_queue_bytes=6000, max_hash_slot_num=100, max_index_num=400)
        record_sizes(root, self.config)
        self.lock = StoreLock(root, create=True)
        self.lock.own()
        self.engine_id = ensure_engine_id(root)
        self.folder = SharedFolder.of(self.engine_id)
        self.folder.sweep()
        values = {"epoch": raise_epoch(root), "mode": native.MODE_MAPPED, "created_ms": now_ms(), "created_boot_ns": boot_ns(),
                  "sysv_semaphore_id": sessions.make_attach_count()} | identity
        self.memory = EngineMemory.create(self.folder, identity_of(self.engine_id, **values))
        self.memory.make_topic_stats(0)
        self.control = self.memory.control
        self.children: list[subprocess.Popen[str] | ForkedProcess] = []
        self.environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}  # of spawned processes

    def make_rest(self) -> None:
        """The objects that single workers do without: with them the memory is whole, for `status`."""
        self.use_settings()
        create_cleaning(self.folder)
        create_replication(self.folder)

    def use_settings(self, **settings) -> None:
        """Replace the run settings; workers that are started later take them."""
        write_run_settings(self.folder, replace(self.config, **settings))

    def position(self, offset: int, ready_end: int | None = None) -> None:
        """Let the log end at `offset`, everything below it durable and dispatched."""
        for name in ("wrote", "committed", "flushed", "reput_from"):
            native.store_position(getattr(self.control, name), offset)
        for slot in self.control.slots:
            slot.wrote = offset
        self.control.writer.intent_end = offset
        native.store(self.control.allocator, "ready_end", offset if ready_end is None else ready_end)
        native.store(self.control.allocator, "reserved_end", offset)

    def publish(self, state: int = native.STATE_RUNNING) -> None:
        """Let workers in."""
        Heartbeat(self.control.workers[native.SUPERVISOR]).begin(os.getpid(), process_start_ms(os.getpid()))
        self.use_settings()
        self.memory.publish()
        native.store(self.control.state, "state", state)
        self.lock.share()

    def spawn(self, module: str, *arguments: str, script: str | None = None) -> subprocess.Popen[str] | ForkedProcess:
        """Start a worker process; `script` runs instead of a module."""
        what = ["-P", "-c", script] if script else ["-P", "-m", module]
        child = forked.start([sys.executable, *what, str(self.root), *arguments], self.environment)
        self.children.append(child)
        return child

    def context(self, config: EngineConfig | None = None, **hooks) -> ServiceContext:
        """Return what a service works with; `hooks`: report, heartbeat, recorder."""
        config = config or self.config
        geometry = replace(config.geometry, mapped_file_size_commit_log_bytes=self.config.mapped_file_size_commit_log_bytes)
        return ServiceContext(self.memory, MessageStore(self.root, geometry), config, **hooks)

    def worker(self, kind: int):
        """The worker's line in the control block."""
        return self.control.workers[kind]

    def wait_ready(self, kind: int, incarnation: int = 1) -> None:
        line = self.worker(kind)
        eventually(lambda: native.load(line, "state") == native.WORKER_READY
                   and native.load(line, "incarnation") >= incarnation, f"worker {kind} ready")

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
            child.stderr.close()
        semaphore = self.memory.identity.sysv_semaphore_id
        self.memory.close()
        sessions.remove_attach_count(semaphore)
        self.folder.sweep()
        self.lock.close()


@contextmanager
def woken_asleep(memory: EngineMemory, kind: int) -> Iterator[None]:
    """Another thread wakes that worker whenever it has armed its latch, until the block ends."""
    line, over = memory.control.latch[kind], threading.Event()

    def wake() -> None:
        while not over.is_set():
            eventually(lambda: over.is_set() or native.load(line, "has_notified") == 0, "it arms its latch")
            memory.wake(kind)

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        yield
    finally:
        over.set()
        waker.join()


@pytest.fixture
def make_owner(tmp_path):
    """make_owner(**identity) -> Owner of a new store; swept at the end."""
    yield from owners_below(tmp_path)


def owners_below(folder: Path) -> Iterator[Callable[..., Owner]]:
    """The body of a fixture such as make_owner, of any scope."""
    owners = []

    def make(name: str = "store", **identity) -> Owner:
        owners.append(Owner(folder / name, **identity))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()
        assert shared_objects.SharedFolder.of(owner.engine_id).names() == []
