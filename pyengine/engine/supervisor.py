"""Supervisor: owns the store, recovers it, starts and watches the workers, opens sessions, stops in order.

These tasks need one process that decides alone: only the supervisor recovers the store, creates shared
objects, opens sessions and marks them dead, and grows the queue table. No message passes through it: while
it is dead, puts and reads continue; only new sessions and restarts of workers wait for its successor, which
adopts living workers without recovery.

SIGHUP: it reads the settings again; live settings take effect, and the log names those that need a restart. `pyengine config
set` asks for the same over the socket of the sessions. SIGUSR1: it reopens a log that was renamed at once, not within a second.
SIGTERM and SIGINT: orderly stop. Puts are refused, the writer drains, then committer, flusher, scheduler, replicator, reputter,
allocator and checkpointer each finish what was published before them. If all of that succeeded, `abort` is removed; otherwise
it remains, and the next start recovers the store.

With --no-children (systemd: one unit per kind) it starts no workers. With --shared it is no child of the process that starts
it, and stops the engine in order when no process shares the engine any more (Engine(shared=True)): the kernel says so, through
the locks of ipc/store_lock.py.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyengine.engine.bring_up import (
    DESCRIPTORS_RAISED_TO,
    FindMaster,
    PoolGrowth,
    bring_up,
    grow_queue_table,
    no_name_servers,
    prepare_root,
    require_descriptors,
)
from pyengine.engine.children import Children
from pyengine.engine.fork_server import ForkServer
from pyengine.engine.kinds import begin_process, kinds_of, kinds_with, raise_descriptors
from pyengine.engine.log_file import LogFile, log_event, notify, watchdog_interval_s
from pyengine.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    ExitCode,
    OtherLayoutError,
    StoreBusyError,
    disk_errors,
    os_error_sentence,
    shown,
)
from pyengine.events import Event
from pyengine.formats.paths import folders_of
from pyengine.ipc import sessions
from pyengine.ipc.control_block import (
    MODE_NAMES,
    EngineMemory,
    read_run_settings,
    reload_settings,
    require_same_settings,
    restart_differences,
)
from pyengine.ipc.heartbeat import Heartbeat, build_id, process_start_ms
from pyengine.ipc.sessions import WORKER_KINDS, Sessions, SessionServer
from pyengine.ipc.shared_objects import SOCKET, removed_names
from pyengine.ipc.statistics import StoreStatsService
from pyengine.ipc.store_lock import SharingLock, StoreLock, kill_workers, living_kinds, name_processes, require_startable
from pyengine.native import control as native
from pyengine.native.failpoints import failpoint
from pyengine.native.flush import monotonic_ns
from pyengine.native.session import producer_count
from pyengine.services.replication.ha_stream import MasterLink
from pyengine.storage.checkpoint import remove_abort_file
from pyengine.storage.config import LIVE, SETTINGS, EngineConfig, config_path, load_config, parse_set, read_file, setting_name
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.engine_id import ID_NAME, read_engine_id, read_epoch
from pyengine.storage.file_system import HeldStore, Loss
from pyengine.storage.recovery.report import RecoveryState

TICK_S = 1.0
PRESENCE_TICKS_MAX = 5
LOST_WORKERS_S = 60.0  # for workers that no supervisor can adopt to end by themselves
LOST_POLL_INTERVAL_S = 0.1
BROKEN_STOP_S = 5.0    # an orderly stop of an engine whose files were removed or replaced, which some workers cannot finish
STOP_TIMEOUT_S = 600.0  # committing a full pool to a slow disk takes long; a caller may stop waiting earlier
PRODUCERS_WAIT_S = 0.2  # for producers to notice that puts are refused and to detach; then the stop continues
READY_TIMEOUT_S = 60.0
MASTER_SILENCES = 3    # a new slave waits for its master so many times as long as for a silent link


@dataclass(frozen=True, slots=True)
class Arguments:
    """The command line of a supervisor."""

    root: Path
    settings: dict[str, str]
    no_children: bool = False
    shared: bool = False           # stop with the last process that shares the engine
    stop: bool = False             # stop living workers in order, start nothing
    embedder_descriptor: int = -1  # pidfd of the process that embeds the engine, which then has the other end of stdin
    report_descriptor: int = -1    # JSON lines about the start go here
    stop_timeout_s: float = STOP_TIMEOUT_S


class Supervisor:
    def __init__(self, arguments: Arguments, find_master: FindMaster) -> None:
        self._arguments = arguments
        self._find_master = find_master
        self._root = arguments.root
        self._store: HeldStore
        self._loss: Loss | None = None
        self._selector = selectors.DefaultSelector()
        self._stop_requested = arguments.stop
        self._reload_requested = False
        self._log = LogFile(arguments.root, turns=True)
        self._restart_reason = ""  # why the engine must be stopped in order and started again
        self._last_logged: dict[Event, str] = {}
        self._memory: EngineMemory
        self._sharing: SharingLock | None = None
        self._fork_server: ForkServer | None = None
        self._presence: MasterLink | None = None
        self._presence_ticks = 0
        self._watchdog_s = watchdog_interval_s()
        self._began_ns = monotonic_ns()
        self._listen_to_signals()

    def _listen_to_signals(self) -> None:
        """Handlers only set a flag; the wake-up descriptor ends the selector's sleep."""
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ, lambda: self._read_signals(reading))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._request_stop)
        for number in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)  # _read_signals() answers it
        if self._arguments.embedder_descriptor >= 0:
            for descriptor in (0, self._arguments.embedder_descriptor):
                self._selector.register(descriptor, selectors.EVENT_READ,
                                        lambda descriptor=descriptor: self._on_embedder_exit(descriptor))

    def _request_stop(self, *_: object) -> None:
        self._stop_requested = True

    def _read_signals(self, reading: int) -> None:
        came = os.read(reading, 4096)
        if signal.SIGHUP in came:
            self._reload_requested = True
        if signal.SIGUSR1 in came:
            self._log.check()

    def _on_embedder_exit(self, descriptor: int) -> None:
        """The process that embeds the engine has ended (its pidfd), or runs another program by exec (the end of its pipe)."""
        self._selector.unregister(descriptor)
        self._stop_requested = True

    def _stop_when_unused(self, sharing: SharingLock) -> None:
        """In a thread of its own: wait for the end of the last process that shares the engine, then ask for an orderly stop."""
        try:
            sharing.wait_until_unused()
        except EngineError:  # the store's folder is gone, which ends the engine too
            return
        self._log_event(Event.ENGINE_UNUSED, "no process shares the engine any more: it stops in order")
        os.kill(os.getpid(), signal.SIGTERM)

    # ---- run --------------------------------------------------------------------

    def run(self) -> ExitCode:
        """Own the store until a signal to stop. Raises EngineError when the store cannot be owned or recovered."""
        require_descriptors()
        raise_descriptors(DESCRIPTORS_RAISED_TO)  # before the fork: the fork server and the workers inherit the limit
        build_id()           # and the cached build id
        require_startable(self._root)
        prepare_root(self._root)
        self._hold()
        config = self._asked_settings()
        if config is not None and not self._arguments.no_children:
            self._fork_server = ForkServer(self._store, kinds_with(config))
        try:
            return self._own_and_serve(config)
        finally:
            if self._fork_server is not None:
                self._fork_server.close()

    def _hold(self) -> None:
        """Hold the store's folder: from here on this process and its children reach files of the store only below it."""
        with disk_errors("open", self._root):
            self._store = HeldStore(self._root)
        self._root = self._store.root
        self._log = LogFile(self._root, turns=True)

    def _own_and_serve(self, config: EngineConfig | None) -> ExitCode:
        with StoreLock(self._root, create=True) as lock:
            memory = self._own(lock)
            if memory is not None:
                self._adopt(memory, config)
                outcome: dict[str, object] = {"adopted": True}
            elif config is None:
                return ExitCode.OK  # the last worker has ended meanwhile
            else:
                brought = bring_up(self._root, config, lock, lambda problem: self._await_master(config, problem),
                                   lambda done, total: self._report({"progress": [done, total]}), self._find_master)
                self._memory, self._presence = brought.memory, brought.presence
                outcome = {"adopted": False, "recovery": brought.report.sentence, "seconds": round(brought.seconds, 3)}
                self._log_event(Event.ENGINE_RECOVERED if brought.report.state is RecoveryState.RECOVERED else Event.LOG_DAMAGED,
                          f"{brought.report.sentence} ({brought.seconds:.2f} s)")
                for note in brought.report.notes:
                    self._log_event(Event.RECOVERY_NOTE, note)
                self._log_change(Event.TABLE_UNUSABLE, _problem_of_topics(self._root))
            self._store.watch(ID_NAME)
            try:
                return self._serve(lock, outcome)
            finally:
                with contextlib.suppress(BufferError):
                    self._memory.close()

    def _asked_settings(self) -> EngineConfig | None:
        """Return the settings that are asked for; None: living workers keep theirs.

        That is so for --stop, and after a wrong edit of the settings under a service manager, which would not try again.
        """
        if self._arguments.stop:
            return None
        try:
            return load_config(self._root, self._arguments.settings)
        except ConfigError as error:
            if not (self._arguments.no_children and living_kinds(self._root)):
                raise
            self._log_event(Event.SETTINGS_REFUSED, f"living workers keep their settings: {error}")
            return None

    def _await_master(self, config: EngineConfig, problem: EngineUnavailableError) -> None:
        """Pause the start of a new slave, which asks its master where to begin; raise the problem when the time for that is over."""
        limit_s = MASTER_SILENCES * config.ha_housekeeping_interval_ms / 1000
        waited_s = (monotonic_ns() - self._began_ns) / 1e9
        if self._stop_requested or waited_s >= limit_s:
            raise problem
        text = f"waiting up to {limit_s:g} s for the master: {problem}"
        if text != self._last_logged.get(Event.ENGINE_WAITS):
            self._log_change(Event.ENGINE_WAITS, text)
            notify(f"STATUS={text}")
            self._report({"waits": text})
        self._process_events(min(TICK_S, limit_s - waited_s))

    @property
    def must_restart(self) -> bool:
        """Whether the engine that was stopped must be started again, in this process or by the service manager."""
        return bool(self._restart_reason) and not self._stop_requested and not self._find_loss()

    def _own(self, lock: StoreLock) -> EngineMemory | None:
        """Become the store's owner; return the memory of living workers whose supervisor died, None if there are none.

        Workers that no supervisor can adopt end by themselves (worker.py); this waits for them. StoreBusyError
        names the processes that do not end.
        """
        deadline_s = time.monotonic() + LOST_WORKERS_S
        while not lock.own():
            try:
                return _attach_to_living(self._root)
            except OtherLayoutError as error:
                raise StoreBusyError(f"the workers of {self._root} are alive, and their supervisor is not: {error}. That version takes "
                                     "them over with its own `pyengine start` (docs/upgrades.md)") from None
            except EngineUnavailableError as error:
                living = name_processes(self._root, [kind for kind in living_kinds(self._root) if kind != native.SUPERVISOR])
                if time.monotonic() >= deadline_s or self._stop_requested and not self._arguments.stop:
                    raise StoreBusyError(f"processes of an engine that cannot be taken over hold {self._root} ({error}): {living}: "
                                         "end them (kill -9), then start again; the next start recovers") from None
                self._log_change(Event.ENGINE_WAITS,
                               f"workers cannot be taken over ({error}); waiting for them to end by themselves: {living}")
            time.sleep(LOST_POLL_INTERVAL_S)
        return None

    def _adopt(self, memory: EngineMemory, asked: EngineConfig | None) -> None:
        """Adopt the workers whose supervisor died.

        StoreBusyError if they run with other settings than `asked`. Under a service manager, where a user would
        not read that error, the workers are stopped in order and started with `asked`.
        """
        try:
            running = read_run_settings(memory.folder)
            if asked is not None and not self._arguments.no_children:
                require_same_settings(self._root, asked, running)
            elif asked is not None and (clauses := restart_differences(asked, running)):
                self._restart_reason = f"the settings have changed: {'; '.join(clauses)}"
        except EngineError:
            memory.close()
            raise
        Heartbeat(memory.control.workers[native.SUPERVISOR]).begin(os.getpid(), process_start_ms(os.getpid()) or 0)
        # The last supervisor may have died while it stopped the engine, or in this function: the engine continues to run.
        if memory.state == native.STATE_STOPPING:
            native.store(memory.control.state, "state", native.STATE_RUNNING)
            failpoint("adopted_running")
        folders = folders_of(self._root, running.store_path_commit_log, running.read_only_commit_log_store_paths)
        gone = [folder for folder in folders.all if not folder.is_dir()]
        if gone:
            self._loss = Loss(f"{gone[0]} was moved or removed while the engine ran", True, False)
            native.refuse_puts(memory.control, native.REFUSE_LOST)
        native.refuse_puts(memory.control, native.REFUSE_STOPPING | (0 if gone else native.REFUSE_LOST), False)
        self._log_event(Event.ENGINE_ADOPTED, "adopted living workers, without recovery")
        self._memory = memory
        if asked is not None and not self._restart_reason:
            self._take_settings({}, asked)

    def _take_settings(self, live: Mapping[str, str], asked: EngineConfig | None = None) -> dict[str, object]:
        """Read all settings again, as at the start, and give the live ones to the workers; return what changed.

        `live` takes precedence over all sources. EngineError if a setting is wrong; then nothing has changed.
        """
        values = {setting_name(name, LIVE): SETTINGS[setting_name(name, LIVE)].read(value, LIVE) for name, value in live.items()}
        asked = asked or load_config(self._root, self._arguments.settings)
        config, changed, later = reload_settings(
            read_run_settings(self._memory.folder), asked, read_file(config_path(self._root)), values)
        number = self._memory.change_run_settings(config)
        if changed or later:
            self._log_event(Event.SETTINGS_READ, f"settings were read again: {'; '.join(changed + later)}")
        return {"changed": changed, "later": later, "number": number}

    def _reload(self) -> None:
        """Answer SIGHUP: read the settings again and log the result."""
        self._reload_requested = False
        try:
            found = self._take_settings({})
        except EngineError as error:
            self._log_event(Event.SETTINGS_REFUSED, f"the settings stay as they are: {error}")
        else:
            if not found["changed"] and not found["later"]:
                self._log_event(Event.SETTINGS_READ, "settings were read again: nothing has changed")

    def _serve(self, lock: StoreLock, outcome: dict[str, object]) -> ExitCode:
        line = Heartbeat(self._memory.control.workers[native.SUPERVISOR])
        line.state(native.WORKER_READY)
        if self._arguments.shared:
            self._sharing = SharingLock(self._root)
            self._sharing.watch()
        degraded = self._memory.state == native.STATE_DEGRADED
        kinds = () if degraded or self._arguments.no_children else kinds_of(self._memory.identity)
        self._recorder = self._memory.recorder_of(native.SUPERVISOR)
        children = Children(self._memory, lock, self._selector, kinds, self._store, self._fork_server,
                            self._log_event, self._note_death)
        sessions = Sessions(self._memory, max(1, self._memory.identity.sessions_max - len(WORKER_KINDS)))
        server = SessionServer(self._memory, self._selector, sessions, self._take_settings)
        self._pool = PoolGrowth(self._memory, self._log_event)
        bridge = LatchBridge(self._memory, self._selector)  # last: its thread must not outlive the mapping
        try:
            children.may_start = not self._loss  # a worker would look for the log, or make it, where it was
            children.start()
            if self._become_ready(children, line):
                if not outcome["adopted"]:
                    self._recorder.note("start", self._began_ns, monotonic_ns() - self._began_ns, cause="start")
                self._report({"ready": outcome | {"pid": os.getpid(), "state": "degraded" if degraded else "running",
                                                  "mode": MODE_NAMES[self._memory.identity.mode],
                                                  "reason": native.reason(self._memory.control)}})
                self._pool.start()
                children.renew()
                if self._sharing:
                    threading.Thread(target=self._stop_when_unused, args=(self._sharing,), name="sharing", daemon=True).start()
                self._supervise(children, server, line)
            return self._stop(children, server, lock)
        finally:
            self._leave_master_to_replicator(now=True)
            self._pool.join()
            self._recorder.close()
            bridge.close()
            children.forget()

    def _become_ready(self, children: Children, line: Heartbeat) -> bool:
        """Wait until every worker is ready; False if one cannot come up, or the engine must stop."""
        if self._loss:  # before the adoption
            self._report({"error": self._loss.sentence, "exit_code": int(ExitCode.USAGE)})
            return False
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not children.all_ready and not self._must_stop and not children.halted:
            if time.monotonic() > deadline_s:
                why = f" ({children.down_reason})" if children.down_reason else ""
                children.halted = f"not up after {READY_TIMEOUT_S:g} s: {', '.join(children.not_ready())}{why}"
            line.record_heartbeat()
            self._process_events(min(0.5, children.next_due_s() - time.monotonic()))
            children.tick()
        if children.halted:
            self._report({"error": children.halted, "exit_code": int(ExitCode.FAILED)})
        return children.all_ready and not self._restart_reason and not children.halted

    @property
    def _must_stop(self) -> bool:
        return self._stop_requested or bool(self._restart_reason)

    def _supervise(self, children: Children, server: SessionServer, line: Heartbeat) -> None:
        due_s = 0.0
        stats = StoreStatsService(self._memory)
        while not self._must_stop and not children.halted:
            now_s = time.monotonic()
            if now_s >= due_s:
                due_s = now_s + TICK_S
                if self._memory.is_overwritten or self._find_loss():
                    return
                if missing := self._memory.missing_names() + ([] if server.is_reachable else [SOCKET]):
                    self._restart_reason = f"{removed_names(missing)}, so that no process can attach any more"
                    children.may_start = False
                    return
                line.record_heartbeat()
                self._log.tick()
                server.tick()
                stats.tick()
                if self._arguments.no_children:
                    self._count_restarts()
                self._leave_master_to_replicator()
                self._log_change(Event.WORK_BLOCKED, grow_queue_table(self._memory))
                is_frozen = native.load(self._memory.control.state, "frozen") == 2
                self._log_change(Event.STORE_READ_ONLY, native.reason(self._memory.control) if is_frozen else "")
                children.no_session = server.no_session_reason()
                if self._watchdog_s is not None:
                    notify("WATCHDOG=1")
            if self._reload_requested:
                self._reload()
            children.tick()
            until_s = min(due_s, children.next_due_s())
            if self._watchdog_s is not None:
                until_s = min(until_s, now_s + self._watchdog_s)
            self._process_events(until_s - time.monotonic())

    def _find_loss(self) -> Loss | None:
        """Return what happened to the store's folder; once it was lost, it stays so."""
        self._loss = self._loss or self._store.loss()
        return self._loss

    def _note_death(self, kind: int) -> None:
        self._recorder.note("died", monotonic_ns(), 0, detail=kind, cause="restart")

    def _count_restarts(self) -> None:
        """Count restarts for `status` when the service manager starts the workers: each start except the first is a restart."""
        for kind in kinds_of(self._memory.identity):
            line = self._memory.control.workers[kind.number]
            restarts = max(0, native.load(line, "incarnation") - 1)
            if restarts > native.load(line, "restarts"):
                self._note_death(kind.number)
            native.store(line, "restarts", restarts)

    def _leave_master_to_replicator(self, *, now: bool = False) -> None:
        """Close the slave's connection from bring-up once its replicator is connected, or after PRESENCE_TICKS_MAX ticks."""
        if self._presence is not None:
            self._presence_ticks += 1
            if now or self._presence_ticks > PRESENCE_TICKS_MAX or native.load(self._memory.control.replicator, "linked"):
                self._presence.close()
                self._presence = None

    def _process_events(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, min(seconds, TICK_S))):
            key.data()

    # ---- stop -------------------------------------------------------------------

    def _stop(self, children: Children, server: SessionServer, lock: StoreLock) -> ExitCode:
        """Stop in order; the store is clean if every byte that was written is durable and dispatched."""
        deadline_s = time.monotonic() + self._arguments.stop_timeout_s
        notify("STOPPING=1")
        loss = self._find_loss()
        if loss:
            native.refuse_puts(self._memory.control, native.REFUSE_LOST)
            self._log_event(Event.STORE_LOST, f"{loss.sentence}; puts are refused, and the engine ends")
            if not loss.is_whole:
                deadline_s = min(deadline_s, time.monotonic() + BROKEN_STOP_S)
        if self._restart_reason:
            self._log_event(Event.ENGINE_RESTARTS, f"{self._restart_reason}; the engine is stopped in order and started again")
        if self._memory.is_overwritten:
            children.kill()
            if self._arguments.no_children:
                kill_workers(self._root)
            server.close()
            sessions.remove_attach_count(self._memory.identity.sysv_semaphore_id)  # as it was before; the next start cannot read it
            self._log_event(Event.MEMORY_OVERWRITTEN,
                      "the control block was written over: the workers were killed, the next start recovers the store")
            return ExitCode.FAILED
        state = self._memory.control.state
        degraded = self._memory.state == native.STATE_DEGRADED
        native.refuse_puts(self._memory.control, native.REFUSE_STOPPING)
        failpoint("stop_refused")
        if not native.load(state, "frozen") and not degraded:
            native.store(state, "state", native.STATE_STOPPING)
            failpoint("stop_stated")
        self._memory.wake(native.WRITER)
        self._memory.wake(native.SCHEDULER)  # it closes its session
        self._pool.join()  # before the names of the buffers are removed or restored; it may be filling a large one
        self._wait_for_producers(min(deadline_s, time.monotonic() + PRODUCERS_WAIT_S))
        if self._arguments.no_children:
            may_start = children.may_start
            kinds = [kind for kind in kinds_of(self._memory.identity) if lock.kind_taken(kind.number)]
            children = Children(self._memory, lock, self._selector, kinds, self._store, None, self._log_event)
            children.start()
            children.may_start = may_start
        if loss and loss.is_taken:
            children.kill()
            problems = ["another engine may be using these files, so the workers were killed: nothing more is written to them"]
        else:
            problems = children.stop(self._process_events, deadline_s) + self._stop_problems(degraded)
        server.close()
        return self._end(problems, ExitCode.DEGRADED if degraded else ExitCode.FAILED, may_restore=not children.may_start)

    def _end(self, problems: list[str], code: ExitCode, *, may_restore: bool) -> ExitCode:
        """Leave the store to the next start, after all workers have ended; `code` is for an end with problems."""
        loss = self._loss
        for problem in problems:
            self._log_event(Event.STOP_UNCLEAN, problem)
        if problems:
            self._log_event(Event.STOP_UNCLEAN, "the store was not stopped in an orderly way: the next start recovers it")
            if may_restore:
                self._restore_names()
            if loss is None:
                return code
        if loss is None or loss.is_whole and not problems:
            remove_abort_file(self._root)
        if not problems or loss and not loss.is_whole:
            self._remove_objects()
        if not problems:
            self._log_event(Event.ENGINE_STOPPED, "stopped")
        return ExitCode.OK if loss is None else ExitCode.USAGE  # which tells a service manager not to start it again at that path

    def _restore_names(self) -> None:
        """Give the commit slot and the pool their names back for recovery: the processes that wrote to them have ended."""
        try:
            self._memory.folder.make()
            for shared in (*self._pool.buffers, self._memory.control_object):
                self._memory.folder.restore_name(shared)
        except (EngineError, OSError) as error:
            self._log_event(Event.STOP_UNCLEAN, f"recovery has the files alone, without what was in the pool: {error}")
        self._memory.retire()  # the memory that producers have mapped: recovery reads the copies

    def _wait_for_producers(self, until_s: float) -> None:
        """Wait, until `until_s`, for producers to detach, which they do when their puts are refused."""
        semaphore_id = self._memory.identity.sysv_semaphore_id
        while producer_count(semaphore_id) and time.monotonic() < until_s:
            self._process_events(0.02)

    def _stop_problems(self, degraded: bool) -> list[str]:
        control = self._memory.control
        if degraded:
            return [native.reason(control)]
        if native.load(control.state, "frozen"):
            return [native.reason(control)]
        wrote, _ = native.committed_slot(control)
        problems = [f"{name} is at {native.load_position(getattr(control, name))}, not at {wrote}"
                  for name in ("wrote", "committed", "flushed", "reput_from")
                  if native.load_position(getattr(control, name)) != wrote]
        if native.load(control.writer, "intent_end") > wrote:
            problems.append("the writer left an unfinished pass")
        if native.load(control.workers[native.CHECKPOINTER], "state") != native.WORKER_ABSENT:
            problems.append("the checkpointer did not finish: queues and index may not be on disk")
        return problems

    def _remove_objects(self) -> None:
        memory = self._memory
        native.store(memory.control.state, "state", native.STATE_STOPPED)
        failpoint("stopped_stated")
        semaphore_id = memory.identity.sysv_semaphore_id
        memory.retire()
        failpoint("stopped_retired")
        sessions.remove_attach_count(semaphore_id)
        failpoint("stopped_uncounted")
        memory.folder.sweep()

    # ---- report -----------------------------------------------------------------

    def _log_event(self, event: Event, text: str) -> None:
        log_event(native.SUPERVISOR, self._root, event, text)

    def _log_change(self, event: Event, text: str) -> None:
        if text != self._last_logged.get(event, ""):
            self._last_logged[event] = text
            if text:
                self._log_event(event, text)

    def _report(self, line: dict[str, object]) -> None:
        """Report the progress of the start to systemd and to the process that started this one."""
        ready = line.get("ready")
        if isinstance(ready, dict):
            notify("READY=1", f"STATUS={ready['state']}")
        report(self._arguments.report_descriptor, line)


class LatchBridge:
    """Turns the supervisor's latch into a descriptor, so that one select() waits for all events."""

    def __init__(self, memory: EngineMemory, selector: selectors.BaseSelector) -> None:
        self._latch = memory.latch(native.SUPERVISOR)
        self._selector = selector
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._memory = memory
        self._running = True
        selector.register(self._event, selectors.EVENT_READ, self._woken)
        self._latch.arm()
        self._thread = threading.Thread(target=self._wait, name="latch", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        while self._running:
            self._latch.wait(TICK_S)
            self._latch.arm()  # before the supervisor looks, and after a timeout too: a wake-up before this is not posted
            os.eventfd_write(self._event, 1)

    def _woken(self) -> None:
        os.eventfd_read(self._event)
        grow_queue_table(self._memory)

    def close(self) -> None:
        self._running = False
        self._latch.wakeup()
        self._thread.join()
        self._selector.unregister(self._event)
        os.close(self._event)


def _problem_of_topics(root: Path) -> str:
    """Return what is wrong with topics.json, or "": the engine runs without that file, so it is a note and not an error."""
    try:
        return TopicConfigs(root).read().problem
    except EngineError as error:
        return str(error)


def _attach_to_living(root: Path) -> EngineMemory:
    """Attach to the memory of living workers whose supervisor died; EngineUnavailableError if it is incomplete or not theirs."""
    memory = EngineMemory.of(root, writable=True)
    try:
        memory.check_layouts()
    except OtherLayoutError:
        memory.close()
        raise
    engine_id = read_engine_id(root)
    why = ""
    if memory.retired or engine_id is None or memory.store_uuid != engine_id.uuid \
            or memory.identity.epoch != read_epoch(root):
        why = "they are of another start of this store"
    elif missing := memory.missing_names():
        why = removed_names(missing)
    if why:
        memory.close()
        raise EngineUnavailableError(why)
    return memory.open_latches()


def report(descriptor: int, line: dict[str, object]) -> None:
    """Write one JSON line to the starting process, if that still reads."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.write(descriptor, shown(json.dumps(line)).encode() + b"\n")


def parse_arguments(argv: Sequence[str] | None) -> Arguments:
    parser = argparse.ArgumentParser(
        prog="python -m pyengine.workers.supervisor", description="Owns a store: recovers it, runs its workers, opens sessions.",
        epilog="SIGTERM: orderly stop; SIGHUP: settings are read again; SIGUSR1: a log that was moved is reopened. "
               "Exit codes: 0 stopped clean, 1 failed, 2 wrong call, or the store was moved, 3 damage found, 5 store busy, 6 degraded.")
    parser.add_argument("store", type=Path, metavar="STORE", help="root directory of the store; made if it is not there")
    parser.add_argument("--set", action="append", default=[], metavar="key=value", help="a setting (pyengine config explain)")
    parser.add_argument("--no-children", action="store_true", help="start no workers: something else does (systemd)")
    parser.add_argument("--shared", action="store_true", help="run in the background; stop when no process shares the engine any more")
    parser.add_argument("--stop", action="store_true", help="stop workers whose supervisor died, in order; start nothing")
    parser.add_argument("--stop-timeout", type=float, default=STOP_TIMEOUT_S, metavar="S",
                        help="longest orderly stop (%(default)s)")
    parser.add_argument("--embedder-fd", type=int, default=-1, metavar="FD",
                        help="pidfd of the program that embeds the engine: stop when it ends, or when stdin does")
    parser.add_argument("--report-fd", type=int, default=-1, metavar="FD", help="JSON lines about the start")
    given = parser.parse_args(argv)
    return Arguments(given.store.absolute(), parse_set(given.set), given.no_children, given.shared, given.stop, given.embedder_fd,
                     given.report_fd, given.stop_timeout)


def main(argv: Sequence[str] | None = None, find_master: FindMaster = no_name_servers) -> int:
    begin_process()
    faulthandler.enable()
    descriptor, root = -1, None
    try:
        arguments = parse_arguments(argv)
        descriptor, root = arguments.report_descriptor, arguments.root
        if arguments.shared and os.fork():  # its starter may end before it, or reap children that it does not know
            os._exit(ExitCode.OK)
        supervisor = Supervisor(arguments, find_master)
        code = supervisor.run()
        if not supervisor.must_restart:
            return code
        if "NOTIFY_SOCKET" in os.environ:  # the service manager was told of the stop; it restarts a service that failed
            return ExitCode.FAILED
        for number in (signal.SIGTERM, signal.SIGINT):  # a request to stop ends this process from here on
            signal.signal(number, signal.SIG_DFL)
        if not supervisor.must_restart:  # it came just before
            return code
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    except EngineError as error:
        log_event(native.SUPERVISOR, root, Event.START_FAILED, str(error))
        notify(f"STATUS=cannot start: {' '.join(str(error).split())}")
        report(descriptor, {"error": str(error), "exit_code": int(error.exit_code)})
        return error.exit_code
    except OSError as error:  # for example a missing permission, or a file in place of a folder
        traceback.print_exc()
        notify(f"STATUS=cannot start: {os_error_sentence(error)}")
        report(descriptor, {"error": os_error_sentence(error), "exit_code": int(ExitCode.FAILED)})
        return ExitCode.FAILED

