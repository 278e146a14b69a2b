"""The engine's memory as one object: control block, latches, and the settings that it was brought up with.

    supervisor   EngineMemory.create(folder, settings) ... fill positions ... publish()
    worker       EngineMemory.attach(folder)                 everything read-write
    producer     EngineMemory.attach(folder, writable=False) the control block is read-only
    reader       the same

Attaching has named outcomes: EngineUnavailableError says "no engine", "not published
yet", "another layout" or "too short". The magic is stored last, so what attaches is
complete. A block that was replaced says so in `state.retired`; a process that holds it attaches
again.

The store's owner writes the run settings into the object `settings`. They hold for its workers
until the engine ends, whatever command line, environment and engine.toml say by then: a supervisor
that adopts living workers compares what it is asked for with them, and starts the missing workers
with them. Those that are live (`Setting.live`) may change: the supervisor puts a new object in the place of the old one, writes the
limits of producers into the identity, raises `settings_seq` and wakes the workers, which read the object again.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from pyengine._native import ffi
from pyengine.errors import ConfigError, EngineError, EngineUnavailableError, OtherLayoutError
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.ipc import shared_objects
from pyengine.ipc.shared_objects import KIND_NAMES, SharedFolder, SharedObject
from pyengine.native import control as native
from pyengine.native import obstacles, queue_table, recorder, store_stats, waiting
from pyengine.native.failpoint import failpoint
from pyengine.native.waiting import Latch
from pyengine.settings import Value
from pyengine.storage.config import DEFAULT, ENVIRONMENT, LIVE, SET, SETTINGS, EngineConfig

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_control, ms_identity, ms_obstacles, ms_queue_table, ms_recorder, ms_store_stats, ms_topic_stats

_Handle = TypeVar("_Handle")

SESSION_SLOTS = native.SESSION_SLOTS
MODE_NAMES = {native.MODE_MAPPED: "async", native.MODE_POOL: "pool", native.MODE_SYNC: "sync"}
STATE_NAMES = {
    native.STATE_STOPPED: "stopped", native.STATE_RECOVERING: "recovering", native.STATE_RUNNING: "running",
    native.STATE_READ_ONLY: "read_only", native.STATE_DEGRADED: "degraded", native.STATE_STOPPING: "stopping",
}
TOPIC_STATS_SLOTS_MIN = 1024
POOL_NOT_MADE = -2  # segment_base of a buffer that does not exist yet: neither free nor taken
# The limits of producers: fields of the identity that follow live settings, by the setting's name.
LIMITS = {"put_timeout_ms": "put_timeout_ms", "sync_flush_timeout_ms": "sync_flush_timeout_ms",
          "os_page_cache_busy_timeout_ms": "os_page_cache_busy_timeout_ms", "slave_timeout_ms": "slave_timeout_ms",
          "ha_slave_fallbehind_max_bytes": "ha_slave_fallbehind_max_bytes", "session_ring_bytes_default": "session_ring_bytes"}
ROLE_NAMES = ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE")


@dataclass(frozen=True, slots=True)
class Identity:
    """What the supervisor writes, and changes only in its LIMITS: whose memory this is and how it works.

    Field for field `struct ms_identity` (csrc/control.cdef.h), without magic, version and size.
    """

    store_uuid: uuid.UUID
    boot_id: bytes
    epoch: int
    engine_id_device: int
    engine_id_inode: int
    segment_bytes: int
    mode: int
    session_ring_bytes_default: int = 4 << 20
    max_message_bytes: int = 4 << 20
    put_timeout_ms: int = 10_000
    sync_flush_timeout_ms: int = 5000
    os_page_cache_busy_timeout_ms: int = 1000
    spin_writer_us: int = 0
    spin_producer_us: int = 0
    sessions_max: int = 256
    pool_buffers: int = 0
    replay_clock: int = 0
    dispatch_at: int = 0
    role: int = 0
    created_ms: int = 0
    sysv_semaphore_id: int = -1
    lock_modified_ns: int = 0
    slave_timeout_ms: int = 3000
    ha_slave_fallbehind_max_bytes: int = 256 << 20
    min_in_sync_replicas: int = 1
    replicates: int = 0
    gateway: int = 0
    created_boot_ns: int = 0

    def write(self, block: ms_identity) -> None:
        """Fill `struct ms_identity`, which no process reads before it is published."""
        for name in self.__slots__:
            value = getattr(self, name)
            if name in ("store_uuid", "boot_id"):
                setattr(block, name, list(value.bytes if name == "store_uuid" else value))
            else:
                setattr(block, name, value)

    @classmethod
    def read(cls, block: ms_identity) -> Identity:
        """The identity of a published block."""
        values = {name: getattr(block, name) for name in cls.__slots__}
        values["store_uuid"] = uuid.UUID(bytes=bytes(block.store_uuid))
        values["boot_id"] = bytes(block.boot_id)
        return cls(**values)


def check_block(block: ms_control, mapped_bytes: int) -> None:
    """EngineUnavailableError, naming what is wrong, unless this is a published control block that an engine may have written."""
    native.check_control(block, mapped_bytes)
    identity, state = block.identity, native.load(block.state, "state")
    sense = (identity.mode in MODE_NAMES and identity.role < len(ROLE_NAMES) and state in STATE_NAMES and identity.segment_bytes > 0
             and identity.sessions_max <= SESSION_SLOTS and identity.pool_buffers <= native.POOL_BUFFERS_MAX)
    if not sense:
        raise EngineUnavailableError("the control block says what no engine writes: it was written over")


class EngineMemory:
    """The shared memory of one running engine, as one process has it mapped.

    `control` is a cffi pointer; shared fields are read and written through pyengine.native.
    It must not be used after close().
    """

    def __init__(self, folder: SharedFolder, control: SharedObject) -> None:
        self.folder = folder
        self.control_object = control
        self.control = native.view_control(control.memory)
        self._load_retired = native.loader(self.control.state, "retired")
        self._latches: dict[int, Latch] = {}
        self._stats_objects: list[SharedObject] = []

    @classmethod
    def create(cls, folder: SharedFolder, identity: Identity, recorded: bytes = b"") -> EngineMemory:
        """New memory of zeros with its semaphores, in a swept folder, not published yet. For the supervisor.

        `recorded`: the flight recorder that a dead engine of this boot left, which goes on."""
        folder.make()
        control = folder.create(shared_objects.CONTROL, native.CONTROL_BYTES)
        with folder.create(shared_objects.STORE_STATS, store_stats.STATS_BYTES) as shared:
            store_stats.format_stats(store_stats.view(shared.memory))
        with folder.create(shared_objects.OBSTACLES, obstacles.OBSTACLES_BYTES) as shared:
            obstacles.format_obstacles(obstacles.view(shared.memory))
        with folder.create(shared_objects.RECORDER, recorder.RECORDER_BYTES) as shared:
            shared.memory[: len(recorded)] = recorded
            recorder.format_recorder(recorder.view(shared.memory), identity.boot_id)
        shared_objects.create_semaphores(folder.short_id)
        memory = cls(folder, control)
        identity.write(memory.control.identity)
        return memory

    @classmethod
    def attach(cls, folder: SharedFolder, *, writable: bool = True) -> EngineMemory:
        """Map the memory of a running engine; EngineUnavailableError says why not."""
        control = folder.attach(shared_objects.CONTROL, writable=writable)
        try:
            block = native.view_control(control.memory)
            check_block(block, control.size_bytes)
        except EngineUnavailableError:
            control.close()
            raise
        return cls(folder, control)

    def publish(self) -> None:
        """From here on others can attach."""
        native.publish(self.control)

    @cached_property
    def identity(self) -> Identity:
        """Whose memory this is and how it works."""
        return Identity.read(self.control.identity)

    def change_run_settings(self, config: EngineConfig) -> int:
        """Let the engine run with these, which differ in live settings only; the number that workers show in their line once they
        have taken them. For the supervisor, which may be killed in between: its successor does it again."""
        new = f"{shared_objects.SETTINGS}.new"
        self.folder.unlink(new)
        write_run_settings(self.folder, config, new)
        os.rename(self.folder.path / new, self.folder.path / shared_objects.SETTINGS)
        failpoint("settings_renamed")
        for field, name in LIMITS.items():
            native.store(self.control.identity, field, getattr(config, name))
        self.__dict__.pop("identity", None)
        failpoint("limits_changed")
        waiting.raise_sequence(self.control.settings_seq)
        for kind in range(len(KIND_NAMES)):
            self.wake(kind)
        return waiting.load_sequence(self.control.settings_seq)

    def latch(self, kind: int) -> Latch:
        """The latch of one kind of worker, opened at first use."""
        if kind not in self._latches:
            name = shared_objects.semaphore_name(self.folder.short_id, kind)
            self._latches[kind] = Latch(ffi.addressof(self.control.latch[kind]), name, writable=self.control_object.writable)
        return self._latches[kind]

    def open_latches(self) -> EngineMemory:
        """Open all of them, and return itself: an engine's own process needs them also after their names were removed."""
        for kind in range(len(KIND_NAMES)):
            self.latch(kind)
        return self

    def wake(self, kind: int) -> None:
        """Wake one kind of worker; call it after publishing what it should see."""
        self.latch(kind).wakeup()

    @property
    def retired(self) -> bool:
        """Whether another control block has taken over: attach again."""
        return self._load_retired() != 0

    @property
    def state(self) -> int:
        """One of the STATE_ numbers."""
        return native.load(self.control.state, "state")

    def retire(self) -> None:
        """Tell all processes that have this memory mapped that it is over, and wake all sleepers."""
        native.store(self.control.state, "retired", 1)
        for number in (self.control.flush_seq, self.control.arrival_seq, self.control.session_seq, self.control.confirm_seq):
            waiting.raise_sequence(number)

    def missing_names(self) -> list[str]:
        """Names of this engine's objects that were removed, or are another object's: no process can attach any more.

        Without the socket, which is the supervisor's (SessionServer.is_reachable). Each call is some twenty system calls.
        Empty while that cannot be told, for want of a descriptor.
        """
        generation = native.load(self.control.state, "queue_table_generation_offered")
        wanted = [*shared_objects.LASTING, *([shared_objects.queues_name(generation)] if generation else [])]
        wanted += [shared_objects.pool_name(number) for number in range(self.identity.pool_buffers)
                   if native.load(self.control.pool[number], "segment_base") != POOL_NOT_MADE]
        try:
            there = set(self.folder.names())
        except OSError:
            return []
        missing = [name for name in wanted if name not in there]
        if shared_objects.CONTROL in there and not self.folder.is_named(self.control_object):
            missing.append(shared_objects.CONTROL)
        return missing + shared_objects.missing_semaphores(self.folder.short_id)

    def make_topic_stats(self, topics: int) -> None:
        """Create the counters by topic, with room for twice as many topics as there are. For the supervisor."""
        slots = TOPIC_STATS_SLOTS_MIN
        while slots * 3 // 4 < 2 * topics:
            slots *= 2
        with self.folder.create(shared_objects.TOPIC_STATS, store_stats.topic_stats_bytes(slots)) as shared:
            store_stats.format_topic_stats(store_stats.view_topics(shared.memory), slots)

    def open_store_stats(self, *, writable: bool = False) -> ms_store_stats:
        """`struct ms_store_stats *`, usable until close_statistics(); EngineUnavailableError says why not."""
        return self._open(shared_objects.STORE_STATS, store_stats.view, store_stats.check, writable)

    def open_topic_stats(self, *, writable: bool = False) -> ms_topic_stats:
        """`struct ms_topic_stats *`, usable until close_statistics(); EngineUnavailableError says why not."""
        return self._open(shared_objects.TOPIC_STATS, store_stats.view_topics, store_stats.check_topics, writable)

    @cached_property
    def counters(self) -> ms_store_stats:
        """The statistics for a worker to count in: the shared ones, or private ones if those cannot be had.

        Statistics never keep a worker from its work.
        """
        try:
            return self.open_store_stats(writable=True)
        except (EngineError, OSError):
            return store_stats.private()

    def open_obstacles(self, *, writable: bool = False) -> ms_obstacles:
        """`struct ms_obstacles *`, usable until close_statistics(); EngineUnavailableError says why not."""
        return self._open(shared_objects.OBSTACLES, obstacles.view, obstacles.check, writable)

    @cached_property
    def obstacles(self) -> ms_obstacles:
        """Where a worker says what keeps it from its work; lines of its own if the shared ones cannot be had."""
        try:
            return self.open_obstacles(writable=True)
        except (EngineError, OSError):
            return obstacles.private()

    def open_recorder(self, *, writable: bool = False) -> ms_recorder:
        """`struct ms_recorder *`, usable until close_statistics(); EngineUnavailableError says why not."""
        return self._open(shared_objects.RECORDER, recorder.view, recorder.check, writable)

    def recorder_of(self, kind: int) -> recorder.Recorder:
        """The worker's hand on its ring, for what made puts wait; it records nothing if the ring cannot be had."""
        try:
            shared = self.open_recorder(writable=True)
        except (EngineError, OSError):
            shared = None
        return recorder.Recorder(shared, kind, self.identity.epoch)

    def _open(self, name: str, view: Callable[[Buffer], _Handle], check: Callable[[_Handle, int], None], writable: bool) -> _Handle:
        """The object of that name, with the functions of pyengine.native that view and check it."""
        shared = self.folder.attach(name, writable=writable)
        self._stats_objects.append(shared)
        found = view(shared.memory)
        check(found, shared.size_bytes)
        return found

    def close_statistics(self) -> None:
        """Close what open_store_stats and its like, `counters`, `obstacles` and recorder_of() gave."""
        for name in ("counters", "obstacles"):
            self.__dict__.pop(name, None)
        for shared in self._stats_objects:
            shared.close()
        self._stats_objects.clear()

    def open_queue_table(self, generation: int) -> tuple[SharedObject, ms_queue_table]:
        """(object, table) of that generation; the caller closes the object. EngineUnavailableError
        when it is not there, or is no table any more."""
        shared = self.folder.attach(shared_objects.queues_name(generation))
        table = queue_table.view(shared.memory)
        try:
            queue_table.check(table, shared.size_bytes)
        except EngineUnavailableError:
            shared.close()
            raise
        return shared, table

    def check_layouts(self) -> None:
        """OtherLayoutError, with what to do, where an object that messages depend on has another layout than this version's.

        For who means to take the engine over. What only tells of it (statistics, links, obstacles, the recorder) is not looked
        at: a worker goes on without it.
        """
        from pyengine.native import cleaning, session

        def check(name: str, shared: SharedObject) -> None:
            if name == shared_objects.CLEANING:
                cleaning.check(cleaning.view(shared.memory), shared.size_bytes)
            else:
                session.check_session(session.view(shared.memory), shared.size_bytes)

        for name in os.listdir(self.folder.path):
            if name == shared_objects.CLEANING or name.startswith(shared_objects.SESSION_PREFIX):
                try:
                    with self.folder.attach(name, writable=False) as shared:
                        check(name, shared)
                except OtherLayoutError:
                    raise OtherLayoutError(f"the engine was started by another version of pyengine (the layout of {name} in shared "
                                           "memory is not this version's): use that version, or stop the engine and start it with "
                                           "this one") from None
                except EngineUnavailableError:
                    pass  # gone meanwhile, or only just being made

    def open_pool(self, *, writable: bool = True) -> dict[int, SharedObject]:
        """The pool's buffers that exist by now, by number; the caller closes them. At the start, because an engine's own
        process needs them also after their names were removed."""
        return {number: self.folder.attach(shared_objects.pool_name(number), writable=writable)
                for number in range(self.identity.pool_buffers)
                if native.load(self.control.pool[number], "segment_base") != POOL_NOT_MADE}

    def close(self) -> None:
        """Unmap; the memory itself stays."""
        self.control = self._load_retired = None  # type: ignore[assignment]  # used after close() they shall fail
        for latch in self._latches.values():
            latch.close()
        self._latches.clear()
        self.close_statistics()
        self.control_object.close()

    def __enter__(self) -> EngineMemory:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def now_ms() -> int:
    """Wall clock in ms."""
    return time.time_ns() // 1_000_000


def boot_ns() -> int:
    """Time since the machine was started, suspensions included, in ns; setting the wall clock does not change it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# ---- the run settings ------------------------------------------------------------


def write_run_settings(folder: SharedFolder, config: EngineConfig, name: str = shared_objects.SETTINGS) -> None:
    """Note every setting with its origin, in a new object. For the store's owner."""
    document = {row.name: [row.show(getattr(config, row.name)), config.origins.get(row.name, DEFAULT)] for row in SETTINGS.values()}
    text = json.dumps(document).encode()
    with folder.create(name, len(text)) as shared:
        shared.memory[:] = text


def read_run_settings(folder: SharedFolder) -> EngineConfig:
    """What the engine in `folder` runs with; EngineUnavailableError where that cannot be told. A setting that this version does not
    know is of a newer one, which may run beside it for the time of an upgrade, and is left out."""
    with folder.attach(shared_objects.SETTINGS, writable=False) as shared:
        try:
            document = {name: row for name, row in json.loads(shared.memory[:]).items() if name in SETTINGS}
            return EngineConfig(**{name: value for name, (value, _) in document.items()},
                                origins={name: str(origin) for name, (_, origin) in document.items()})
        except (ConfigError, *PARSE_ERRORS) as error:
            path = folder.path / shared_objects.SETTINGS
            raise EngineUnavailableError(f"{path} is damaged ({error}): stop the engine, then start it") from None


def asked_otherwise(asked: EngineConfig, running: EngineConfig) -> list[str]:
    """A clause for each setting that needs a restart and that --set, the environment or engine.toml gives otherwise than it runs."""
    return [f"{name} = {row.show(getattr(asked, name))} ({asked.origins[name]}) is asked for, "
            f"{row.show(getattr(running, name))} runs"
            for name, row in SETTINGS.items()
            if asked.origins.get(name, DEFAULT) != DEFAULT and not row.inert and not row.live
            and getattr(asked, name) != getattr(running, name)]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a running engine is to run with after its settings were read again. `changed`: clauses about live settings that differ
    now; `later`: about those that need a restart."""

    config: EngineConfig
    changed: list[str]
    later: list[str]


def reload_settings(running: EngineConfig, asked: EngineConfig, from_file: Mapping[str, Value], live: Mapping[str, Value]) -> Reloaded:
    """The live settings as they are asked for now, all others as they run.

    `asked`: from all sources, as at a start; `from_file`: the file's alone; `live`: what `pyengine config set` gives just now. What
    was set live goes before the command line until the engine ends, and what the command line gave at the start before the file.
    """
    values = {name: getattr(running, name) for name in SETTINGS}
    origins = dict(running.origins)
    changed, later = [], []
    for name, row in SETTINGS.items():
        was = running.origins.get(name, DEFAULT)
        value, origin = getattr(asked, name), asked.origins.get(name, DEFAULT)
        if name in live:
            value, origin = live[name], LIVE
        elif was == LIVE and name in from_file:
            value, origin = from_file[name], LIVE
        elif was in (SET, ENVIRONMENT) and origin not in (SET, ENVIRONMENT):
            continue
        if row.fixed or row.inert or value == values[name] and name not in live:
            continue
        if not row.live:
            later.append(f"{name} = {row.show(value)} ({origin}) needs a restart, {row.show(values[name])} runs")
            continue
        if value != values[name]:
            changed.append(f"{name} = {row.show(value)} ({origin}), {row.show(values[name])} before")
        values[name], origins[name] = value, origin
    return Reloaded(EngineConfig(**values, origins=origins), changed, later)


def overrides_of(running: EngineConfig, asked: EngineConfig | None) -> dict[str, str]:
    """What a worker must be given by --set to run with `running` where it would find `asked` by itself (None: unknown)."""
    return running.overrides() | {name: row.show(getattr(running, name)) for name, row in SETTINGS.items()
                                  if asked is not None and getattr(asked, name) != getattr(running, name)}
