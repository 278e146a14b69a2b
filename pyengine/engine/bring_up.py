"""Bring a stopped store up: recover it and publish the shared memory that its workers attach to.

    own the lock -> recover files and pool -> epoch + 1 -> create objects -> `abort` -> publish

A crash may interrupt every step: until the control block is published no process can
attach, and the next start begins again. A store that recovery refuses is refused before
any shared object is created.

A store that was a slave is refused as a master unless it was promoted, and a SYNC_MASTER whose log ends before what its slaves have
confirmed is refused (docs/replication.md). `confirm` is never beyond the end of the log: the start settles the confirmed offset,
durably, before it accepts a put.

When the writer asks for a larger queue table, the supervisor makes an empty one; the writer copies its entries
into it, switches to it and removes the old one. Until then the writer continues with the old table, or waits,
for a bounded time, when that is full. The pool buffers that a start does not need are made while the engine runs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pyengine.engine import log_file
from pyengine.errors import CorruptionError, DiskFullError, EngineError, EngineUnavailableError, NotAStoreError, UsageError, command
from pyengine.events import Event, Report
from pyengine.formats.constants import TOPIC_BYTES_MAX
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.ipc import sessions, shared_objects
from pyengine.ipc.cleaning import create_cleaning
from pyengine.ipc.control_block import (
    LIMITS,
    MODE_NUMBERS,
    POOL_NOT_MADE,
    EngineMemory,
    boot_ns,
    now_ms,
    write_run_settings,
)
from pyengine.ipc.crashed_engine_memory import open_crashed_memory
from pyengine.ipc.heartbeat import Heartbeat, process_start_ms
from pyengine.ipc.replication import create_replication
from pyengine.ipc.shared_objects import SharedFolder, note_run, pool_name
from pyengine.ipc.store_lock import StoreLock, lock_modified_ns
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.native.session import session_bytes
from pyengine.native.waiting import spin_us
from pyengine.native.writer import format_queue_table, queue_table_bytes, set_queue_offset, view_queue_table
from pyengine.services.replication.ha_handshake import Secret, SecretError
from pyengine.services.replication.ha_join import ask_peers, join
from pyengine.services.replication.ha_stream import MasterLink
from pyengine.storage.checkpoint import CUT, Cut, RecoveryPath, create_abort_file, read_checkpoint
from pyengine.storage.commit_log import CommitLog, Log, list_log, new_segment_folder, note_log_begin
from pyengine.storage.config import EngineConfig, record_sizes
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.durable_writes import create_file, make_folders, make_log_folder
from pyengine.storage.engine_id import EngineId, ensure_engine_id, raise_epoch, read_boot_id, read_epoch
from pyengine.storage.file_system import free_bytes
from pyengine.storage.message_store import MessageStore, require_space
from pyengine.storage.recovery.derived import queues_between
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import Progress, RecoveryReport, RecoveryState
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile

# Threads that handle a put to a SYNC_MASTER: producer, writer and the replicator's two; a put of a RocketMQ client:
# the client's two, gateway and writer.
LONG_WAY_CPUS = 4
ROLES = {"ASYNC_MASTER": native.ASYNC_MASTER, "SYNC_MASTER": native.SYNC_MASTER, "SLAVE": native.SLAVE}
FIRST_GENERATION = 1
QUEUE_SLOTS_MIN = 4096
POOL_AT_ONCE_BYTES = 256 << 20  # this part of the pool is made before READY, the rest while the engine runs
_STORE_NAMES = frozenset(("commitlog", "consumequeue", "index", "checkpoint", "config", "lock", "abort", log_file.NAME))
SLAVE = "SLAVE"
# In an engine with all kinds of workers, a producer and forty queues the process that opens the most has 37 descriptors.
DESCRIPTORS_MIN = 48
DESCRIPTORS_RAISED_TO = 2048  # enough for the most producers and pool buffers that can be set
# Of the writer, beside one for each session and two for each pool buffer: its objects and some segments that are not flushed yet.
WRITER_DESCRIPTORS = 28


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """A published engine without workers.

    `presence` is a slave's connection to its master (services/replication/ha_join.py), to be closed once its replicator is connected.
    """

    memory: EngineMemory
    report: RecoveryReport
    seconds: float
    presence: MasterLink | None = None


def prepare_root(root: Path) -> None:
    """Make the directory of a new store; NotAStoreError for a directory that holds something else."""
    if root.exists() and not root.is_dir():
        raise NotAStoreError(f"{root} is a file, not a directory")
    try:
        make_folders(root, is_given=False)
        names = set(os.listdir(root)) - {"lost+found"}
    except PermissionError as error:
        raise NotAStoreError(f"{root} cannot be read: {error.strerror}") from None
    if names and not names & _STORE_NAMES:
        raise NotAStoreError(f"{root} is not empty and holds no store: give a new or an empty directory")


FindMaster = Callable[[Path, EngineConfig], str]


def no_name_servers(root: Path, config: EngineConfig) -> str:
    """Refuse to look for a slave's master."""
    raise EngineUnavailableError("no name server is asked where its master is: set ha_master_address")


def bring_up(root: Path, config: EngineConfig, lock: StoreLock, await_master: Callable[[EngineUnavailableError], None],
             progress: Progress | None = None, find_master: FindMaster = no_name_servers) -> StartedEngine:
    """Recover the store and publish its engine's memory. The caller holds the lock exclusively; afterwards the lock is shared.

    `find_master` asks name servers where the master of a slave is whose settings do not say it. `await_master` is called as often
    as a new slave does not reach its master, which may start later: it returns when to try again, or raises the problem.
    Raises what recovery raises, and DiskFullError when shared memory, or the disk of a new store, has no room. A store
    that recovery finds damaged below its watermark comes up degraded: read-only, without
    workers.
    """
    began_s = time.monotonic()
    check_role(root, config)
    check_secret(root, config)
    require_space(root, config)
    require_file_size(config)
    store = MessageStore(root, config.geometry)
    store.list_complete_log()
    record_sizes(root, config)  # before there is a store: a consumer that waits for it must not read it with other sizes
    for writable in store.commit_log_folders.writable:
        make_log_folder(root, writable)
    lock.hold_log()
    engine_id = ensure_engine_id(root)
    report, remembered, recorded = _recover(store, config, progress)
    presence, confirm, is_recovered = None, 0, report.state is RecoveryState.RECOVERED
    if is_recovered:
        if config.broker_role == SLAVE and config.replicates:
            while True:
                try:
                    report, presence = _join_master(store, config, report, remembered, progress, find_master)
                    break
                except EngineUnavailableError as problem:  # only of a new slave
                    await_master(problem)
        note_log_begin(root, max(0, report.min_offset))
        confirm, confirm_notes = settle_confirmed(root, config, report.end_offset, remembered)
        report = replace(report, notes=report.notes + confirm_notes + ask_peers(root, config))
    memory = _open_memory(root, config, engine_id, report, recorded, confirm)
    lock.share()
    if is_recovered and report.path is RecoveryPath.ABNORMAL:
        report = replace(report, notes=report.notes + _enter_topics(store, config, report))
    return StartedEngine(memory, report, time.monotonic() - began_s, presence)


def _recover(store: MessageStore, config: EngineConfig, progress: Progress | None) -> tuple[RecoveryReport, int, bytes]:
    """Recover the files, and what the dead engine's memory has; (report, confirmed offset in that memory, its flight recorder)."""
    with open_crashed_memory(store.root) as crashed:
        crashed.require_dead()
        remembered = crashed.confirm
        report = recover(store, progress=progress, shared=crashed.shared, options=config)
        if report.state is RecoveryState.RECOVERED:
            _note_confirmed(store.root, remembered)
            raise_epoch(store.root)  # from here on the crashed engine's memory is stale
            failpoint("epoch_raised")
        elif crashed.undrained_bytes:
            raise CorruptionError(f"{report.sentence} {crashed.undrained_bytes:,} acknowledged bytes are only in the "
                                  f"shared memory of the dead engine: keep the machine up until that is decided.")
        recorded = crashed.recorded()
        crashed.discard()
    return report, remembered, recorded


def _open_memory(root: Path, config: EngineConfig, engine_id: EngineId, report: RecoveryReport, recorded: bytes,
                 confirm: int) -> EngineMemory:
    """Make all shared objects of the engine, write `abort` and publish the control block; no object is left if that fails."""
    folder = SharedFolder.of(engine_id, config.shm_directory)
    folder.make()
    folder.sweep()
    note_run(root, config.shm_directory)
    try:
        memory = EngineMemory.create(folder, _identity(root, config, engine_id), recorded)
        _create_queue_table(memory, report)
        memory.make_topic_stats(len({topic for topic, _ in report.queue_ends}))
        write_run_settings(folder, config)
        create_cleaning(folder)
        create_replication(folder)
        _create_pool(memory)
        failpoint("memory_made")
        _set_positions(memory, root, report)
        set_confirmed(memory, root, confirm, report.end_offset)
        memory.open_latches()
        if config.broker_role == SLAVE:
            native.refuse_puts(memory.control, native.REFUSE_SLAVE)
        elif report.state is RecoveryState.RECOVERED \
                and (noted := ReplicationStateFile(root).read().state) is not None and noted.is_fenced:
            native.refuse_puts(memory.control, native.REFUSE_FENCED)
        if report.state is RecoveryState.RECOVERED:
            create_abort_file(root)
            failpoint("engine_opened")
            _publish(memory, native.STATE_RUNNING, report.copy_note)
            failpoint("engine_published")
        else:
            _publish(memory, native.STATE_DEGRADED, report.sentence)
    except BaseException:
        folder.sweep()
        raise
    return memory


def _enter_topics(store: MessageStore, config: EngineConfig, report: RecoveryReport) -> tuple[str, ...]:
    """Enter into topics.json the topics that were put to before the crash: the checkpointer may have died before it did.

    It is not called after an orderly stop, so that an entry that a user deleted stays deleted. Returns a failure as a sentence.
    """
    log = Log.of(store.list_log(), store.segment_bytes, None)
    try:
        queues = ((queue.topic, queue.queue_id, queue.newest_ms)
                  for queue in queues_between(log, report.scan_from, report.end_offset, config.enable_multi_dispatch))
        TopicConfigs(store.root)._enter(queues, config.put_topic_queue_nums, config.own_topics)
    except EngineError as error:
        return (f"new topics are not entered into topics.json: {error}",)
    return ()


def _note_confirmed(root: Path, remembered: int) -> None:
    """Note the confirmed offset of the dead engine's memory before that is discarded: this start may still be refused or killed."""
    file = ReplicationStateFile(root)
    noted = file.read().state
    if noted is not None and remembered > noted.confirm:
        file.write(replace(noted, confirm=remembered))


def _join_master(store: MessageStore, config: EngineConfig, report: RecoveryReport, remembered: int,
                 progress: Progress | None, find_master: FindMaster) -> tuple[RecoveryReport, MasterLink | None]:
    """Ask the master where a new slave's log begins, or truncate what the master does not have (services/replication/ha_join.py)."""
    if config.learns_master:
        try:
            config = replace(config, ha_master_address=find_master(Path(store.root), config))
        except EngineUnavailableError as error:
            if report.end_offset == 0:
                raise EngineUnavailableError(f"a new slave asks its master where to begin: {error}") from None
            return replace(report, notes=(*report.notes, f"the log was not compared with the master's: {error}")), None
    found = join(store, config, report.min_offset, report.end_offset, remembered)
    if found.cut_at is not None:
        failpoint("cut_decided")
        file = ReplicationStateFile(store.root)
        noted = file.read().state
        if noted is not None and noted.role != SLAVE:  # as a master it would lack the records that are about to be truncated
            file.write(replace(noted, role=SLAVE))
        CUT.write(store.root, Cut(found.cut_at, report.end_offset, found.notes[0]))
        failpoint("cut_intended")
        again = recover(store, progress=progress, options=config)
        report = replace(again, notes=report.notes + again.notes, quarantined=report.quarantined + again.quarantined)
        return report, found.presence
    if found.origin:  # without its first segment the next recovery would report the watermark as a loss
        size = config.mapped_file_size_commit_log_bytes
        os.close(create_file(new_segment_folder(store.root, found.origin, size), segment_name(found.origin), size, allocate="none"))
        failpoint("origin_made")
        report = replace(report, min_offset=found.origin, end_offset=found.origin)
    return replace(report, notes=report.notes + found.notes), found.presence


def _identity(root: Path, config: EngineConfig, engine_id: EngineId) -> dict[str, int | bytes]:
    is_short = config.broker_role == "ASYNC_MASTER" and not config.gateway_enable
    spin_writer_us, spin_producer_us = spin_us(config.spin, 2 if is_short else LONG_WAY_CPUS)
    pool_buffers = min(config.transient_store_pool_size, native.POOL_BUFFERS_MAX) if config.mode == "pool" else 0
    return {
        "store_uuid": engine_id.uuid.bytes, "boot_id": read_boot_id(), "epoch": read_epoch(root),
        "engine_id_device": engine_id.device, "engine_id_inode": engine_id.inode,
        "segment_bytes": config.mapped_file_size_commit_log_bytes, "mode": MODE_NUMBERS[config.mode],
        "max_message_bytes": config.max_message_size_bytes, "spin_writer_us": spin_writer_us, "spin_producer_us": spin_producer_us,
        "sessions_max": min(config.sessions_max + len(sessions.WORKER_KINDS), native.SESSION_SLOTS, _sessions_that_fit(pool_buffers)),
        "pool_buffers": pool_buffers, "replay_clock": config.replay_clock, "role": ROLES[config.broker_role],
        "created_ms": now_ms(), "created_boot_ns": boot_ns(), "lock_modified_ns": lock_modified_ns(root), "sysv_semaphore_id": -1,
        "dispatch_at": config.dispatch_at == "replicated" and config.broker_role != "SLAVE",
        "min_in_sync_replicas": config.min_in_sync_replicas, "replicates": config.replicates, "gateway": config.gateway_enable,
        "grpc": config.grpc_enable, **{field: getattr(config, name) for field, name in LIMITS.items()}}


def _create_queue_table(memory: EngineMemory, report: RecoveryReport) -> None:
    """Create the table of next queue offsets as recovery found them, with room for twice as many queues."""
    slots = QUEUE_SLOTS_MIN
    while slots < 2 * len(report.queue_ends):
        slots *= 2
    with memory.folder.create(shared_objects.queues_name(FIRST_GENERATION), queue_table_bytes(slots)) as shared:
        table = view_queue_table(shared.memory)
        format_queue_table(table, slots, FIRST_GENERATION)
        for (topic, queue_id), end in report.queue_ends.items():
            if len(topic.encode()) <= TOPIC_BYTES_MAX:  # a put to a longer topic is refused
                set_queue_offset(table, topic, queue_id, end)
    native.store(memory.control.state, "queue_table_generation_offered", FIRST_GENERATION)
    for slot in memory.control.slots:
        slot.queue_table_generation = FIRST_GENERATION


def _create_pool(memory: EngineMemory) -> None:
    """Create the buffers that fit into POOL_AT_ONCE_BYTES, at least one, after checking that there is room for all of them."""
    identity = memory.identity
    needed = identity.pool_buffers * identity.segment_bytes
    free = free_bytes(memory.folder.path)
    if needed > free:
        raise DiskFullError(
            f"the pool needs {needed:,} bytes in {memory.folder.path.parent}, {free:,} are free: use fewer buffers "
            "(transient_store_pool_size), smaller segments, or set shm_directory")
    for number in range(identity.pool_buffers):
        memory.control.pool[number].segment_base = POOL_NOT_MADE
    at_once = max(1, POOL_AT_ONCE_BYTES // identity.segment_bytes)
    for number in range(min(at_once, identity.pool_buffers)):
        make_pool_buffer(memory, number)


def _set_positions(memory: EngineMemory, root: Path, report: RecoveryReport) -> None:
    """Set all positions to the end of the recovered log; a degraded store's flushed position to its watermark, if that is lower."""
    control, size = memory.control, memory.identity.segment_bytes
    end = report.end_offset
    flushed = end if report.state is RecoveryState.RECOVERED or report.watermark is None else min(end, report.watermark)
    if report.state is not RecoveryState.RECOVERED and report.is_copy:
        flushed = max(0, report.min_offset)  # no engine has synced a byte of the copy
    # Recovery that had no record to read knows no time: the checkpoint has the newest then.
    time_ms = max(report.last_store_timestamp_ms, read_checkpoint(root).physic_msg_timestamp_ms, 0)
    segments = list_log(root, size)
    native.store_position(control.min_offset, max(0, report.min_offset))
    for position in (control.wrote, control.committed, control.reput_from):
        native.store_position(position, end)
    native.store_position(control.flushed, flushed)
    for slot in control.slots:
        slot.wrote, slot.store_timestamp_ms = end, time_ms
    native.store(control.writer, "intent_end", end)
    native.store(control.allocator, "reserved_end", end)
    native.store(control.allocator, "ready_end", segments[-1].start_offset + size if segments else end - end % size)
    native.store(control.workers[native.CHECKPOINTER], "position", end)


def _publish(memory: EngineMemory, state: int, reason: str) -> None:
    native.set_reason(memory.control, reason)
    Heartbeat(memory.control.workers[native.SUPERVISOR]).begin(os.getpid(), process_start_ms(os.getpid()) or 0)
    native.store(memory.control.state, "state", state)
    # Made last: until the block is published, the start that follows a killed one does not find the semaphore's id to remove it.
    memory.set_attach_count(sessions.make_attach_count())
    memory.publish()


# ---- what the last run noted of replication (config/replication.json) ------------


def check_role(root: str | os.PathLike[str], config: EngineConfig) -> None:
    """Raise UsageError when a store that was a slave, or whose last role cannot be read, is started as a master unpromoted."""
    if config.broker_role == SLAVE or not StorePaths(root).config.is_dir():  # a file of that name makes a later step of the start fail
        return
    noted, problem = ReplicationStateFile(root).read()
    if noted is not None and noted.role == SLAVE:
        why = f"{root} ran as a slave last, and is not started as {config.broker_role}: start it as a slave again"
    elif problem:  # the copy that was read in place of the file may be older than the change of the role
        why = (f"whether {root} ran as a slave last cannot be told ({problem}), so it is not started as {config.broker_role}: put the "
               "file back from a copy, start it as a slave")
    else:
        return
    raise UsageError(f"{why} (broker_role=SLAVE and ha_master_address=HOST:PORT, by --set or in config/engine.toml), or make it "
                     f"the master: {command('promote', root)}")


def check_secret(root: str | os.PathLike[str], config: EngineConfig) -> None:
    """Raise UsageError when the store replicates and its secret cannot be used."""
    secret = Secret(root, config)
    if config.replicates and secret.is_set:
        try:
            secret.read()
        except SecretError as error:
            raise UsageError(str(error)) from None


def settle_confirmed(root: str | os.PathLike[str], config: EngineConfig, end: int, remembered: int) -> tuple[int, tuple[str, ...]]:
    """Decide up to which offset the log, which ends at `end`, counts as confirmed; (that offset, sentences for the report).

    `remembered` is the confirmed offset in the dead engine's memory, which may be newer than the note; 0 if there is none.
    CorruptionError when a SYNC_MASTER has lost confirmed records, unless ha_cut=any lets it start without them.
    """
    file = ReplicationStateFile(root)
    noted = file.read().state
    confirm = max(noted.confirm if noted else 0, remembered)
    notes: tuple[str, ...] = ()
    if confirm > end:
        lost = f"slaves have confirmed this log up to {confirm}, but it ends at {end}: {confirm - end:,} bytes are lost here"
        if config.broker_role == SLAVE:
            lost = f"this slave had reported its log up to {confirm}, but it ends at {end}"
        elif config.broker_role == "SYNC_MASTER" and config.ha_cut != "any":
            raise CorruptionError(
                f"{lost}. A slave that is linked last has them: promote it (pyengine promote), and start this store as its slave. "
                "To go on without them, start with ha_cut=any; slaves that have them will not follow then")
        else:
            lost += "; slaves that have them do not follow this master (docs/replication.md)"
        notes = (lost,)
        confirm = end
    dispatch_at = "replicated" if config.dispatch_at == "replicated" and config.broker_role != SLAVE else "committed"
    if noted is not None and noted.confirm > end or dispatch_at != (noted.dispatch_at if noted else "committed"):
        master_end = noted.master_end if noted is not None and config.broker_role == SLAVE else 0
        file.write(ReplicationState(config.broker_role, confirm, dispatch_at, master_end))
        failpoint("confirmed_settled")
    return confirm, notes


def set_confirmed(memory: EngineMemory, root: str | os.PathLike[str], confirm: int, end: int) -> None:
    """Set the confirmed offset, and the dispatch position to it where dispatch is bounded by it.

    Queue entries beyond that position, of an earlier run, stay invisible until it passes them.
    """
    identity, control = memory.identity, memory.control
    if not identity.replicates:
        return
    native.store_position(control.confirm, confirm)
    failpoint("confirm_restored")
    if identity.role == native.SLAVE:
        noted = ReplicationStateFile(root).read().state
        native.store(control.replicator, "master_end", noted.master_end if noted else 0)
    if identity.dispatch_at and confirm < end:
        start = max(confirm, native.load_position(control.min_offset))
        with contextlib.closing(CommitLog(root, identity.segment_bytes)) as log:
            native.store_position(control.reput_from, log.record_boundary(start))


# ---- how many files a process may have open, and how long ones -------------------


def require_descriptors(pool_buffers: int = 0) -> None:
    """Raise EngineError when a process that starts from here may not open enough files, or the pidfds by which it watches workers."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        raise EngineError(f"the kernel or a seccomp profile refuses pidfd_open ({error.strerror}), by which an engine watches its workers: "
                          "allow it in the profile, or update the container engine (Linux 5.3 has the call)") from None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    wanted = DESCRIPTORS_MIN + 2 * pool_buffers
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise EngineError(f"a process may have {hard} files open here, and an engine needs {wanted} at least: raise the limit "
                          "(`ulimit -n 1024`, LimitNOFILE= in a unit; root can raise the hard one)")


def require_file_size(config: EngineConfig) -> None:
    """Raise EngineError when a process that starts from here may not make files as long as this store's."""
    limit, sizes = resource.getrlimit(resource.RLIMIT_FSIZE)[0], config.geometry
    wanted = max(sizes.mapped_file_size_commit_log_bytes, sizes.mapped_file_size_consume_queue_bytes,
                 config.enable_consume_queue_ext * sizes.mapped_file_size_consume_queue_ext_bytes,
                 config.message_index_enable * sizes.index_layout.size_bytes, session_bytes(config.session_ring_bytes))
    if limit != resource.RLIM_INFINITY and limit < wanted:
        raise EngineError(f"a file may have {limit:,} bytes here, and this store's have up to {wanted:,}: raise the limit "
                          "(`ulimit -f unlimited`, LimitFSIZE= in a unit)")


def _sessions_that_fit(pool_buffers: int) -> int:
    """Return for how many producers the writer, which inherits this process's limit, has descriptors: without one it cannot go on."""
    require_descriptors(pool_buffers)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return native.SESSION_SLOTS if soft == resource.RLIM_INFINITY else soft - WRITER_DESCRIPTORS - 2 * pool_buffers


SLOTS_MAX = 1 << 24


def grow_queue_table(memory: EngineMemory) -> str:
    """Offer a larger table if the writer wants one; return a sentence if it cannot be made (the next call tries again)."""
    wanted = native.load(memory.control.writer, "queue_table_wanted")
    if wanted == 0:
        return ""
    generation = native.load(memory.control.state, "queue_table_generation_offered")
    try:
        shared, table = memory.open_queue_table(generation)
    except (EngineError, OSError) as error:
        return str(error)
    with shared:
        offered = table.slots
    if wanted <= offered:
        return ""
    slots = offered
    while slots < wanted:
        slots *= 2
    if slots > SLOTS_MAX:
        return f"{wanted:,} queues are more than an engine can hold ({SLOTS_MAX:,} slots)"
    name = shared_objects.queues_name(generation + 1)
    memory.folder.unlink(name)  # left by a supervisor that died in this function
    try:
        with memory.folder.create(name, queue_table_bytes(slots)) as made:
            format_queue_table(view_queue_table(made.memory), slots, generation + 1)
    except EngineError as error:
        return str(error)
    failpoint("table_made")
    native.store(memory.control.state, "queue_table_generation_offered", generation + 1)
    failpoint("table_offered")
    memory.wake(native.WRITER)
    return ""


def make_pool_buffer(memory: EngineMemory, number: int) -> None:
    """Create one buffer with all of its pages, and offer it to the writer."""
    name = pool_name(number)
    memory.folder.unlink(name)  # left by a supervisor that died in this function
    memory.folder.create(name, memory.identity.segment_bytes).close()
    native.compare_and_swap(memory.control.pool[number], "segment_base", POOL_NOT_MADE, -1)


def missing_pool_buffers(memory: EngineMemory) -> list[int]:
    return [number for number in range(memory.identity.pool_buffers)
            if native.load(memory.control.pool[number], "segment_base") == POOL_NOT_MADE]


class PoolGrowth:
    """Makes, while the engine runs, the pool buffers that the start did not make; keeps all buffers open."""

    def __init__(self, memory: EngineMemory, report: Report) -> None:
        self._memory = memory
        self.buffers = list(memory.open_pool(writable=False).values())
        self._report = report
        self._running = True
        self._thread = threading.Thread(target=self._make, name="pool", daemon=True)

    def start(self) -> None:
        if missing_pool_buffers(self._memory):
            self._thread.start()

    def _make(self) -> None:
        try:
            for number in missing_pool_buffers(self._memory):
                if not self._running:
                    return
                make_pool_buffer(self._memory, number)
                self.buffers.append(self._memory.folder.attach(pool_name(number), writable=False))
                self._memory.wake(native.WRITER)
        except (EngineError, OSError) as error:  # no room, no descriptor: the writer continues with the buffers it has
            self._report(Event.POOL_SMALLER, f"the pool stays smaller than asked: {error}")

    def join(self) -> None:
        """End the thread once the buffer that it is making is complete."""
        self._running = False
        if self._thread.ident is not None:
            self._thread.join()
