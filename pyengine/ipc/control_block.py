"""The engine's shared memory as one object: control block, latches, and the run settings.

    supervisor   EngineMemory.create(folder, settings) ... fill positions ... publish()
    worker       EngineMemory.attach(folder)                 everything read-write
    producer     EngineMemory.attach(folder, writable=False) the control block is read-only
    reader       EngineMemory.of(root)                       the same, by the store's path

The EngineUnavailableError of a failed attach says why: "no engine", "not published
yet", "another layout" or "too short". The supervisor stores the magic last, so a block that a process
can attach to is complete. When a block is replaced, `state.retired` is set in it; a process that has it
mapped then attaches again.

The store's owner writes the run settings into the object `settings`. All workers use them until the
engine ends, even if command line, environment and engine.toml change: a supervisor that adopts living
workers compares its own settings with them, and starts the missing workers with them. Live settings
(`Setting.live`) may change: the supervisor replaces the object, writes the limits of producers into the
identity, raises `settings_seq` and wakes the workers, which read the object again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from functools import cached_property
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine._native import ffi
from pyengine.arguments import Closing
from pyengine.errors import ConfigError, EngineError, EngineUnavailableError, OtherLayoutError, StoreBusyError, command
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.ipc import shared_objects
from pyengine.ipc.shared_objects import KIND_NAMES, Handle, SharedFolder, SharedObject
from pyengine.ipc.store_lock import lock_modified_ns
from pyengine.native import control as native
from pyengine.native import recorder, store_stats, waiting
from pyengine.native.failpoints import failpoint
from pyengine.native.waiting import Latch
from pyengine.native.writer import check_queue_table, view_queue_table
from pyengine.settings import Value
from pyengine.storage.config import DEFAULT, ENVIRONMENT, FILE, LIVE, SET, SETTINGS, EngineConfig, config_path, read_file
from pyengine.storage.engine_id import EngineId, read_boot_id, read_epoch

if TYPE_CHECKING:
    from pyengine._native import (
        ms_blocked_reasons,
        ms_control,
        ms_identity,
        ms_queue_table,
        ms_store_stats,
        ms_topic_stats,
    )

SESSION_SLOTS: int = native.SESSION_SLOTS
MODE_NAMES = {native.MODE_MAPPED: "async", native.MODE_POOL: "pool", native.MODE_SYNC: "sync"}
MODE_NUMBERS = {name: number for number, name in MODE_NAMES.items()}
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


def check_block(block: ms_control, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError, with the reason, unless this is a valid, published control block."""
    native.check_control(block, mapped_bytes)
    identity, state = block.identity, native.load(block.state, "state")
    sense = (identity.mode in MODE_NAMES and identity.role < len(ROLE_NAMES) and state in STATE_NAMES and identity.segment_bytes > 0
             and identity.sessions_max <= SESSION_SLOTS and identity.pool_buffers <= native.POOL_BUFFERS_MAX)
    if not sense:
        raise EngineUnavailableError("the control block has values that no engine writes: it was written over; start the engine again")


class EngineMemory(Closing):
    """The shared memory of one running engine, mapped in this process.

    `control` is a cffi pointer; shared fields are read and written through pyengine.native.
    It must not be used after close().
    """

    def __init__(self, folder: SharedFolder, control: SharedObject) -> None:
        self.folder = folder
        self.control_object = control
        self.control = native.view_control(control.memory)
        self._load_retired, self._load_state = (native.loader(self.control.state, field) for field in ("retired", "state"))
        self._latches: dict[int, Latch] = {}
        self._stats_objects: list[SharedObject] = []

    @classmethod
    def create(cls, folder: SharedFolder, identity: Mapping[str, Any], recorded: bytes = b"") -> EngineMemory:
        """Create memory of zeros and its semaphores in a swept folder, unpublished. For the supervisor.

        `identity`: fields of `struct ms_identity`, the store and the constants of the engine; later it changes only the LIMITS.
        `recorded`: the flight recorder of the last engine of this boot, which the new engine continues.
        """
        folder.make()
        control = folder.create(shared_objects.CONTROL, native.CONTROL_BYTES)
        with folder.create(shared_objects.STORE_STATS, store_stats.STATS_BYTES) as shared:
            store_stats.publish(store_stats.view(shared.memory))
        with folder.create(shared_objects.BLOCKED_REASONS, native.BLOCKED_REASONS_BYTES) as shared:
            native.publish_blocked_reasons(native.view_blocked_reasons(shared.memory))
        with folder.create(shared_objects.RECORDER, recorder.RECORDER_BYTES) as shared:
            shared.memory[: len(recorded)] = recorded
            recorder.format_recorder(recorder.view(shared.memory), identity["boot_id"])
        shared_objects.create_semaphores(folder.short_id)
        memory = cls(folder, control)
        for name, value in identity.items():
            setattr(memory.control.identity, name, list(value) if isinstance(value, bytes) else value)
        return memory

    @classmethod
    def attach(cls, folder: SharedFolder, *, writable: bool = True) -> EngineMemory:
        """Map the memory of a running engine; EngineUnavailableError says why it cannot."""
        return cls(folder, folder.open_checked(shared_objects.CONTROL, native.view_control, check_block, writable=writable)[0])

    @classmethod
    def of(cls, root: str | os.PathLike[str], *, writable: bool = False) -> EngineMemory:
        """Map the memory of the engine that runs, or ran last, on the store at `root`; EngineUnavailableError says why it cannot."""
        return cls.attach(shared_objects.find_folder(root), writable=writable)

    def set_attach_count(self, semaphore_id: int) -> None:
        """Note the count of producers (sessions.make_attach_count) in the unpublished block."""
        self.control.identity.sysv_semaphore_id = semaphore_id
        self.__dict__.pop("identity", None)

    def publish(self) -> None:
        """Publish the control block: other processes can attach from now on."""
        native.publish(self.control)

    @cached_property
    def identity(self) -> ms_identity:
        """A copy of the store and the constants of this engine."""
        return native.copy_identity(self.control)

    @property
    def store_uuid(self) -> uuid.UUID:
        """Of the identity."""
        return uuid.UUID(bytes=bytes(self.identity.store_uuid))

    @property
    def boot_id(self) -> bytes:
        """Of the identity."""
        return bytes(self.identity.boot_id)

    @property
    def is_overwritten(self) -> bool:
        """Whether constant fields of the control block were overwritten: then no value in shared memory can be trusted."""
        try:
            check_block(self.control, native.CONTROL_BYTES)
        except EngineUnavailableError:
            return True
        return not native.has_identity(self.control, self.identity)

    @cached_property
    def place(self) -> tuple[int, int]:
        """Device and inode of the control block: two mappings of the same one have the same."""
        status = os.fstat(self.control_object.descriptor)
        return status.st_dev, status.st_ino

    def again(self) -> EngineMemory:
        """Map the same control block again, read-only and independent of this mapping, even if its name is gone."""
        control = self.control_object
        return EngineMemory(self.folder, SharedObject(control.name, os.dup(control.descriptor), writable=False))

    def change_run_settings(self, config: EngineConfig) -> int:
        """Replace the run settings by `config`, which differs from them in live settings only. For the supervisor.

        Returns the sequence number that each worker's line shows once the worker uses the new settings. If the supervisor is
        killed meanwhile, its successor repeats the call.
        """
        write_run_settings(self.folder, config)
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
        """Return the latch of one kind of worker, opened at first use; only if the memory is mapped writable."""
        if not self.control_object.writable:
            raise ValueError("a latch is for processes of the engine, not for one that has its memory read-only")
        if kind not in self._latches:
            name = shared_objects.semaphore_name(self.folder.short_id, kind) if kind in shared_objects.SEMAPHORE_KINDS else ""
            self._latches[kind] = Latch(ffi.addressof(self.control.latch[kind]), name)
        return self._latches[kind]

    def open_latches(self) -> EngineMemory:
        """Open all latches now and return self: a process of the engine needs them even after their names were removed."""
        for kind in range(len(KIND_NAMES)):
            self.latch(kind)
        return self

    def wake(self, kind: int) -> None:
        """Wake one kind of worker; publish its work before the call."""
        self.latch(kind).wakeup()

    @property
    def retired(self) -> bool:
        """Whether this control block is retired: a process must attach again."""
        return self._load_retired() != 0

    @property
    def state(self) -> int:
        """The engine's state, one of the STATE_ numbers."""
        return self._load_state()

    def judge_ended(self, root: str | os.PathLike[str], engine_id: EngineId) -> tuple[str, bool]:
        """Return why the memory of an ended engine does not tell the end of the store's log ("" if it does), and whether a sync failed.

        The second may be true where the end is rejected: the kernel reports pages that it could not write to no later program.
        """
        if reason := self.why_stale(root, engine_id):
            return reason, False
        if self.identity.lock_modified_ns and self.identity.lock_modified_ns != lock_modified_ns(root):
            reason = "another program has opened the store since"
        elif self.state == native.STATE_DEGRADED:  # its end of the log is the damage, not the end of what was written
            reason = "that engine only read"
        return reason, native.load(self.control.state, "frozen") != 0

    def why_stale(self, root: str | os.PathLike[str], engine_id: EngineId) -> str:
        """Return why this is not the memory of the store's last engine, in this boot; "" if it is. Whatever layout it has."""
        identity = self.identity
        if self.store_uuid != engine_id.uuid:
            return "it belongs to another store"
        if (identity.engine_id_device, identity.engine_id_inode) != (engine_id.device, engine_id.inode):
            return "the store is a copy"
        if self.boot_id != read_boot_id():
            return "the machine was started again"
        if identity.epoch != read_epoch(root):
            return f"it is of epoch {identity.epoch}, the store of {read_epoch(root)}"
        return ""

    def retire(self) -> None:
        """Mark this memory as retired for all processes that have it mapped, and wake those that wait for a sequence."""
        native.store(self.control.state, "retired", 1)
        for number in (self.control.flush_seq, self.control.arrival_seq, self.control.session_seq, self.control.confirm_seq):
            waiting.raise_sequence(number)

    def missing_names(self) -> list[str]:
        """Return the names of this engine's objects that were removed or replaced, so that no process can attach any more.

        The socket is not included (SessionServer.is_reachable checks it). Each call is some twenty system calls.
        Empty if the folder cannot be read for lack of a descriptor.
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

    def open_store_stats(self) -> ms_store_stats:
        """`struct ms_store_stats *`, usable until close_statistics(); EngineUnavailableError says why not. As writable as the memory."""
        return self._open(shared_objects.STORE_STATS, store_stats.view, store_stats.check)

    def open_topic_stats(self) -> ms_topic_stats:
        """`struct ms_topic_stats *`, as open_store_stats()."""
        return self._open(shared_objects.TOPIC_STATS, store_stats.view_topics, store_stats.check_topics)

    def open_blocked_reasons(self) -> ms_blocked_reasons:
        """`struct ms_blocked_reasons *`, as open_store_stats()."""
        return self._open(shared_objects.BLOCKED_REASONS, native.view_blocked_reasons, native.check_blocked_reasons)

    # A worker runs without these objects rather than fail.

    @cached_property
    def counters(self) -> ms_store_stats:
        """The statistics in which a worker counts: the shared object, or a private one if that cannot be opened."""
        try:
            return self.open_store_stats()
        except (EngineError, OSError):
            return store_stats.private()

    @cached_property
    def blocked_reasons(self) -> ms_blocked_reasons:
        """The lines for the workers' blocked reasons: the shared object, or a private one if that cannot be opened."""
        try:
            return self.open_blocked_reasons()
        except (EngineError, OSError):
            return native.private_blocked_reasons()

    def recorder_of(self, kind: int) -> recorder.Recorder:
        """Return the recorder of a worker's stalls; it records nothing if the shared ring cannot be opened."""
        try:
            shared = self._open(shared_objects.RECORDER, recorder.view, recorder.check)
        except (EngineError, OSError):
            shared = None
        return recorder.Recorder(shared, kind)

    def _open(self, name: str, view: Callable[[mmap], Handle], check: Callable[[Handle, int], None]) -> Handle:
        shared, found = self.folder.open_checked(name, view, check, writable=self.control_object.writable)
        self._stats_objects.append(shared)
        return found

    def close_statistics(self) -> None:
        """Close all that open_store_stats() and the other open_ methods, `counters`, `blocked_reasons` and recorder_of() returned."""
        for name in ("counters", "blocked_reasons"):
            self.__dict__.pop(name, None)
        for shared in self._stats_objects:
            shared.close()
        self._stats_objects.clear()

    def open_queue_table(self, generation: int) -> tuple[SharedObject, ms_queue_table]:
        """Return (object, table) of that generation; the caller closes the object.

        EngineUnavailableError when the object does not exist or is not a valid table.
        """
        return self.folder.open_checked(shared_objects.queues_name(generation), view_queue_table, check_queue_table,
                                        writable=self.control_object.writable)

    def check_layouts(self) -> None:
        """Raise OtherLayoutError, with what to do, if an object that puts or cleaning depend on has another version's layout.

        A supervisor calls it before it adopts workers. Objects that only report (statistics, links, blocked reasons, the
        recorder) are not checked: a worker runs without them.
        """
        from pyengine.native import cleaning, session

        for name in os.listdir(self.folder.path):
            try:
                if name == shared_objects.CLEANING:
                    self.folder.open_checked(name, cleaning.view, cleaning.check, writable=False)[0].close()
                elif name.startswith(shared_objects.SESSION_PREFIX):
                    self.folder.open_checked(name, session.view, session.check_session, writable=False)[0].close()
            except OtherLayoutError:
                raise OtherLayoutError(f"the engine was started by another version of pyengine (the layout of {name} in shared "
                                       "memory is not this version's): use that version, or stop the engine and start it with "
                                       "this one") from None
            except EngineUnavailableError:
                pass  # removed meanwhile, or not complete yet

    def open_pool(self, *, writable: bool = True) -> dict[int, SharedObject]:
        """Open the pool's buffers that exist now, by number; the caller closes them.

        A process of the engine calls it at its start, since it needs the buffers even after their names were removed.
        """
        return {number: self.folder.attach(shared_objects.pool_name(number), writable=writable)
                for number in range(self.identity.pool_buffers)
                if native.load(self.control.pool[number], "segment_base") != POOL_NOT_MADE}

    def close(self) -> None:
        """Unmap the memory, which remains for other processes."""
        self.control = self._load_retired = None  # type: ignore[assignment]  # a use after close() must raise
        for latch in self._latches.values():
            latch.close()
        self._latches.clear()
        self.close_statistics()
        self.control_object.close()


def now_ms() -> int:
    """Return the wall clock in ms."""
    return time.time_ns() // 1_000_000


def boot_ns() -> int:
    """Return the time since boot, suspends included, in ns; setting the wall clock does not change it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# ---- the run settings ------------------------------------------------------------


def write_run_settings(folder: SharedFolder, config: EngineConfig) -> None:
    """Write every setting with its origin. For the store's owner."""
    document = {row.name: [row.show(getattr(config, row.name)), config.origins.get(row.name, DEFAULT)] for row in SETTINGS.values()}
    folder.put(shared_objects.SETTINGS, json.dumps(document).encode())


def read_run_settings(folder: SharedFolder) -> EngineConfig:
    """Return the run settings of the engine in `folder`; EngineUnavailableError if they cannot be read.

    Unknown settings are left out: they come from a newer version, which may run beside this one during an upgrade.
    """
    with folder.attach(shared_objects.SETTINGS, writable=False) as shared:
        try:
            document = {name: row for name, row in json.loads(shared.memory[:]).items() if name in SETTINGS}
            return EngineConfig(**{name: value for name, (value, _) in document.items()},
                                origins={name: str(origin) for name, (_, origin) in document.items()})
        except (ConfigError, *PARSE_ERRORS) as error:
            path = folder.path / shared_objects.SETTINGS
            raise EngineUnavailableError(f"{path} is damaged ({error}): stop the engine, then start it") from None


def write_rows(folder: SharedFolder, name: str, rows: list[dict[str, Any]]) -> None:
    """Write what only the gateway knows into the object `name`: NAME_SERVERS or POPS."""
    folder.put(name, json.dumps(rows).encode())


def read_rows(folder: SharedFolder, name: str) -> list[dict[str, Any]]:
    """Return what the gateway wrote last; empty if it wrote nothing."""
    with contextlib.suppress(EngineError, *PARSE_ERRORS), folder.attach(name, writable=False) as shared:
        rows: list[dict[str, Any]] = json.loads(shared.memory[:])
        return rows
    return []


def read_masters(folder: SharedFolder) -> list[str]:
    """Return the HA addresses of this slave's master that name servers tell, those with which the gateway is registered."""
    return list(dict.fromkeys(row["master"] for row in read_rows(folder, shared_objects.NAME_SERVERS)
                              if row["registered"] and row.get("master")))


def restart_differences(asked: EngineConfig, running: EngineConfig) -> list[str]:
    """Return a clause for each setting that needs a restart and whose value in `asked`, if not a default, differs from `running`."""
    return [f"{name} = {row.show(getattr(asked, name))} ({asked.origins[name]}) is asked for, "
            f"{row.show(getattr(running, name))} runs"
            for name, row in SETTINGS.items()
            if asked.origins.get(name, DEFAULT) != DEFAULT and not row.live
            and getattr(asked, name) != getattr(running, name)]


def require_same_settings(root: Path, asked: EngineConfig, running: EngineConfig) -> None:
    """Raise StoreBusyError if workers that run cannot be adopted by an engine with the settings `asked`."""
    if clauses := restart_differences(asked, running):
        raise StoreBusyError(f"workers of {root} are alive and run with other settings: {'; '.join(clauses)}: {command('stop', root)}, "
                             "then start")


def difference_from_file(root: str | os.PathLike[str], running: EngineConfig) -> str:
    """Return a sentence about settings that differ from the store's file, except those given at the start; "" if there are none."""
    try:
        from_file = read_file(config_path(root))
    except ConfigError as error:
        kept_out = "Python program" if running.gateway_enable else "program"
        return f"no {kept_out} can connect, and the next start will be refused: {error}"
    differing = []
    for name, row in SETTINGS.items():
        origin, runs = running.origins.get(name, DEFAULT), getattr(running, name)
        if origin not in (DEFAULT, FILE, LIVE) or (origin == DEFAULT and name not in from_file):
            continue
        if (wanted := from_file.get(name, row.default)) != runs:
            differing.append(f"{name} = {row.show(wanted)} in the file, {row.show(runs)} runs")
    if not differing:
        return ""
    return (f"settings differ from {config_path(root)}: {'; '.join(differing)}: stop and start the engine to have the file's"
            " (SIGHUP to its supervisor is enough for those that are live: `pyengine config explain`)")


def reload_settings(running: EngineConfig, asked: EngineConfig, from_file: Mapping[str, Value], live: Mapping[str, Value],
                    ) -> tuple[EngineConfig, list[str], list[str]]:
    """Take live settings from the arguments, and all others from `running`.

    Return (settings, clauses about live settings that have changed, clauses about settings that need a restart).
    `asked`: the settings from all sources, as at a start; `from_file`: those of the file alone; `live`: those of the current
    `pyengine config set`. A live set value takes precedence over the command line until the engine ends, and a value from
    the command line at the start takes precedence over the file.
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
        if row.fixed or value == values[name] and name not in live:
            continue
        if not row.live:
            later.append(f"{name} = {row.show(value)} ({origin}) needs a restart, {row.show(values[name])} runs")
            continue
        if value != values[name]:
            changed.append(f"{name} = {row.show(value)} ({origin}), {row.show(values[name])} before")
        values[name], origins[name] = value, origin
    return EngineConfig(**values, origins=origins), changed, later
