"""Sessions of producers: the table of sessions, the socket where they are opened, the count of living producers.

A slot of the table goes FREE -> OPEN (by the supervisor) -> DEAD (by the supervisor, or by the writer after a bad entry)
-> FREE (by the writer, once the ring is drained). Each opening raises the slot's generation. The
object's name has the epoch and the generation, so that it never refers to another session, of this
engine or of an earlier one.
A lock on the object's file lasts as long as any copy of the producer's descriptor or of its mapping:
by it the supervisor notices, at each tick and when all slots are taken, a producer that dropped its session without
closing it, or that runs another program by exec. It closes the session of an ended process even if a child has the lock.
Every step is one compare-and-swap; after it `session_seq` rises and the writer is woken.

A producer opens its session at a Unix socket in the engine's folder, which the supervisor serves.
Request and answer are one JSON line each; the objects come with the answer as descriptors (SCM_RIGHTS):

    {"want": "session", "ring_bytes": 4194304}
        -> {"slot", "generation", "ring_bytes", "epoch", "folder"} + [session rw, control READ-ONLY]
    {"want": "close", "epoch": 5, "slot": 3, "generation": 7}      -> {"closed": true}
    {"want": "settings", "live": {"name": "value"}}     -> the settings are read again; the answer of the supervisor's take_settings()
    anything else                                       -> {"error": sentence}, with "again": true if a try at once may succeed, and
                                                           "may_pass": true if one may after the engine has started (again)

The peer's user must be the engine's own or root. A peer cannot block the supervisor: sockets are
non-blocking, a line has at most LINE_BYTES_MAX bytes, and a peer that is silent for TIMEOUT_S is
dropped. When more than PEERS_MAX are connected, the one that was silent for longest is dropped, so that
other users of the socket cannot keep a producer out (open_session() tries again).

The kernel keeps the count of living producers right (a SysV semaphore with SEM_UNDO). The
supervisor creates the semaphore (IPC_PRIVATE: no key that could be guessed or used twice) and publishes
its id in the control block. A producer adds one; when it closes its session, or is killed at any
instruction, the kernel subtracts that. `status` shows the count, and `stop` waits, bounded, until it
falls; no decision depends on it alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from pyengine.errors import DiskFullError, EngineError, EngineUnavailableError, passing
from pyengine.formats.small_file import PARSE_ERRORS, TRANSIENT_ERRNOS, opened
from pyengine.ipc.control_block import SESSION_SLOTS, STATE_NAMES, EngineMemory
from pyengine.ipc.heartbeat import is_alive, process_start_ms
from pyengine.ipc.shared_objects import CONTROL, SOCKET, session_name
from pyengine.native import control as native
from pyengine.native import session as native_session
from pyengine.native import waiting
from pyengine.native.failpoints import failpoint
from pyengine.storage.file_system import free_bytes
from pyengine.storage.ofd_lock import find_lock, try_lock

if TYPE_CHECKING:
    from pyengine._native import ms_session_slot

LINE_BYTES_MAX = 4096
TIMEOUT_S = 5.0
PEERS_MAX = 64
WORKER_KINDS = (native.SCHEDULER, native.REPLICATOR, native.GATEWAY)  # they put through sessions too, for which slots are kept
_CREDENTIALS = struct.Struct("3i")
NO_ATTACH_COUNT = -1


class SessionAnswer(TypedDict):
    """The supervisor's answer to the request `session`; the objects come with it as descriptors."""

    slot: int
    generation: int
    ring_bytes: int
    epoch: int
    folder: str


class SlotsDrainingError(DiskFullError):
    """All slots are taken, but some will be free once the writer has drained them."""


def no_room_reason(memory: EngineMemory) -> str:
    """Return why shared memory has no room for a new session; "" if it has. OSError if that cannot be found out."""
    folder, needed = memory.folder.path, native_session.session_bytes(memory.identity.session_ring_bytes_default)
    return f"no session can be opened: {folder.parent} has no room for {needed:,} bytes" if free_bytes(folder) < needed else ""


class Sessions:
    """Opens sessions, marks them dead, removes their objects."""

    def __init__(self, memory: EngineMemory, producers_max: int = SESSION_SLOTS) -> None:
        """`producers_max`: how many sessions may be of other processes than the engine's workers."""
        self._memory = memory
        self._control = memory.control
        self._slots = range(min(memory.identity.sessions_max, SESSION_SLOTS))
        self._producers_max = min(producers_max, len(self._slots))

    def open(self, pid: int, uid: int, ring_bytes: int | None = None) -> tuple[SessionAnswer, int]:
        """Open a session for the process `pid`; return the answer and the descriptor of the object, which the caller closes.

        EngineError if all slots are taken, the size is wrong, memory is full, or the process has ended.
        """
        ring_bytes = ring_bytes or self._memory.identity.session_ring_bytes_default
        native_session.check_ring_bytes(ring_bytes)
        start_ms = process_start_ms(pid)
        if start_ms is None:
            raise EngineUnavailableError(f"process {pid} is not visible here: producer and engine must share one pid namespace, and "
                                         "/proc must show them all processes (no hidepid=)")
        slot = self._free_slot(pid)
        line = self._control.sessions[slot]
        generation = native.load(line, "generation") % 0xFFFFFFFF + 1
        epoch, folder = self._memory.identity.epoch, self._memory.folder
        name = session_name(epoch, slot, generation)
        folder.unlink(name)  # left by a supervisor that died in this function
        with folder.create(name, native_session.session_bytes(ring_bytes)) as shared:
            native_session.format_session(native_session.view(shared.memory), ring_bytes, slot, generation, epoch)
            try_lock(shared.descriptor, 0, name)  # until the last copy of the descriptor is closed and the last mapping is unmapped
            descriptor = os.dup(shared.descriptor)
        failpoint("session_object_made")
        line.pid, line.uid, line.start_time_ms = pid, uid, start_ms
        line.ring_bytes, line.bad_entry = ring_bytes, 0
        native.store(line, "generation", generation)
        failpoint("session_row_filled")
        native.compare_and_swap(line, "state", native.SESSION_FREE, native.SESSION_OPEN)
        failpoint("session_opened")
        self._changed()
        answer: SessionAnswer = {"slot": slot, "generation": generation, "ring_bytes": ring_bytes, "epoch": epoch,
                                 "folder": str(folder.path)}
        return answer, descriptor

    def _free_slot(self, pid: int) -> int:
        used = used_sessions(self._memory)
        workers = {native.load(self._control.workers[kind], "pid") for kind in WORKER_KINDS}
        producers = sum(native.load(self._control.sessions[slot], "pid") not in workers for slot in used)
        if pid in workers or producers < self._producers_max:
            for slot in self._slots:
                if slot not in used:
                    return slot
        sentence = (f"all {self._producers_max} sessions are taken: close producers, or raise sessions_max and, if that is higher already, "
                    "the engine's limit of open files (`ulimit -n`)")
        if self.close_dropped() or native.SESSION_DEAD in (native.load(self._control.sessions[slot], "state") for slot in used):
            raise SlotsDrainingError(sentence)
        raise DiskFullError(sentence)

    def close_dropped(self) -> list[int]:
        """Mark the sessions dead whose process has ended, or that no process has open any more; return their slots."""
        closed = []
        for slot, generation, _ in self.open_slots():
            with contextlib.suppress(OSError):  # the name was removed, or no descriptor is free
                if not (self.owner_lives(slot) and self._is_held(slot, generation)) and self.close(slot, generation):
                    closed.append(slot)
        return closed

    def _is_held(self, slot: int, generation: int) -> bool:
        """Whether a process has the session's object open."""
        path = self._memory.folder.path / session_name(self._memory.identity.epoch, slot, generation)
        with opened(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            return find_lock(descriptor, 0) is not None

    def close(self, slot: int, generation: int) -> bool:
        """Mark a session dead; its published entries are still executed. False when it was closed already."""
        if slot not in self._slots:
            return False
        line = self._control.sessions[slot]
        if native.load(line, "generation") != generation:
            return False
        if not native.compare_and_swap(line, "state", native.SESSION_OPEN, native.SESSION_DEAD):
            return False
        failpoint("session_marked_dead")
        self._changed()
        return True

    def owner_lives(self, slot: int) -> bool:
        """Whether the process that the slot was opened for is alive."""
        line = self._control.sessions[slot]
        return is_alive(native.load(line, "pid"), native.load(line, "start_time_ms"))

    def open_slots(self) -> list[tuple[int, int, int]]:
        """Return (slot, generation, pid) of the open sessions."""
        found = []
        for slot in used_sessions(self._memory):
            line = self._control.sessions[slot]
            if native.load(line, "state") == native.SESSION_OPEN:
                found.append((slot, native.load(line, "generation"), native.load(line, "pid")))
        return found

    def sweep_objects(self) -> list[str]:
        """Remove session and side objects whose session is closed and drained; return their names."""
        epoch = self._memory.identity.epoch
        living = {(epoch, slot, native.load(self._control.sessions[slot], "generation")) for slot in used_sessions(self._memory)}
        removed = []
        try:
            names = self._memory.folder.names()
        except OSError:  # no descriptor is free: the next call does it
            return []
        for name in names:
            kind, *numbers = name.split("-")
            if kind not in ("session", "side") or not all(number.isdecimal() for number in numbers):
                continue
            if tuple(map(int, numbers[:3])) not in living:
                if self._memory.folder.unlink(name):
                    removed.append(name)
        return removed

    def _changed(self) -> None:
        waiting.raise_sequence(self._control.session_seq)
        self._memory.wake(native.WRITER)


def used_sessions(memory: EngineMemory) -> list[int]:
    """Return the slots that are not free."""
    return native.used_sessions(memory.control, memory.identity.sessions_max)


def ended_sessions(memory: EngineMemory) -> list[tuple[ms_session_slot, int]]:
    """Return (line, generation) of sessions that are closed or whose producer is dead; the writer may not have drained them yet."""
    found = []
    for slot in used_sessions(memory):
        line = memory.control.sessions[slot]
        state, generation = native.load(line, "state"), native.load(line, "generation")
        if state == native.SESSION_DEAD or state == native.SESSION_OPEN and not is_alive(
                native.load(line, "pid"), native.load(line, "start_time_ms")):
            found.append((line, generation))
    return found


def is_drained(line: ms_session_slot, generation: int) -> bool:
    """Whether the writer has executed all entries of this session, which must have ended."""
    return native.load(line, "generation") != generation or native.load(line, "state") == native.SESSION_FREE


# ---- the socket ------------------------------------------------------------------


class _Peer:
    def __init__(self, channel: socket.socket, pid: int, uid: int) -> None:
        self.channel = channel
        self.pid = pid
        self.uid = uid
        self.line = b""
        self.until_s = time.monotonic() + TIMEOUT_S


class SessionServer:
    """Answers requests of producers, in the supervisor's selector loop."""

    def __init__(self, memory: EngineMemory, selector: selectors.BaseSelector, sessions: Sessions,
                 take_settings: Callable[[Mapping[str, str]], Mapping[str, object]] | None = None) -> None:
        """`take_settings` answers requests to read the settings again; without it they are refused."""
        self._memory = memory
        self._take_settings = take_settings
        self._selector = selector
        self._sessions = sessions
        self._peers: set[_Peer] = set()
        self._listener = bound_socket(memory.folder.path)
        self._listener.listen(PEERS_MAX)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        sessions.close_dropped()

    @property
    def is_reachable(self) -> bool:
        """Whether the socket still has its name."""
        return self._memory.folder.socket_path.exists()

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:  # the connection waits until tick(): the loop must not spin on it
                self._selector.unregister(self._listener)
            return
        channel.setblocking(False)
        raw = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        peer = _Peer(channel, pid, uid)
        if uid not in (os.geteuid(), 0):
            self._answer(peer, {"error": f"this engine belongs to uid {os.geteuid()}, not to uid {uid}"})
            channel.close()
            return
        if len(self._peers) >= PEERS_MAX:
            self._drop(min(self._peers, key=lambda peer: peer.until_s))
        try:
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(peer))
        except OSError:  # the kernel has no memory, or this user no watch, for it
            channel.close()
            return
        self._peers.add(peer)

    def _read(self, peer: _Peer) -> None:
        if peer not in self._peers:  # _accept() dropped it in the same round of the selector
            return
        try:
            data = peer.channel.recv(LINE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.line += data
        if not data or len(peer.line) > LINE_BYTES_MAX:
            self._drop(peer)
            return
        while b"\n" in peer.line and peer in self._peers:
            line, _, peer.line = peer.line.partition(b"\n")
            peer.until_s = time.monotonic() + TIMEOUT_S
            self._serve(peer, line)

    def _serve(self, peer: _Peer, line: bytes) -> None:
        descriptors: list[int] = []
        opened: SessionAnswer | None = None
        answer: Mapping[str, object]
        try:
            request = json.loads(line)
            want = request.get("want")
            if want == "session":
                answer = opened = self._open(peer, request.get("ring_bytes"), descriptors)
            elif want == "close":
                answer = self._close(peer, int(request["epoch"]), int(request["slot"]), int(request["generation"]))
            elif want == "settings" and self._take_settings is not None:
                answer = self._take_settings({str(name): str(value) for name, value in request["live"].items()})
            else:
                answer = {"error": f"unknown request {want!r}"}
        except SlotsDrainingError as error:
            answer = {"error": str(error), "again": True}
        except EngineError as error:
            answer = {"error": str(error), "may_pass": error.may_pass}
        except OSError as error:  # no descriptor is free, or the engine's folder was removed
            answer = {"error": f"no session can be opened: {error}", "may_pass": True}
        except PARSE_ERRORS as error:
            answer = {"error": f"not understood: {error}"}
        try:
            sent = self._answer(peer, answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not sent:
            if opened is not None:
                self._sessions.close(opened["slot"], opened["generation"])
            self._drop(peer)

    def _open(self, peer: _Peer, ring_bytes: object, descriptors: list[int]) -> SessionAnswer:
        if ring_bytes is not None and not isinstance(ring_bytes, int):
            raise TypeError("ring_bytes is not a number")
        self._check_serving()
        answer, descriptor = self._sessions.open(peer.pid, peer.uid, ring_bytes)
        descriptors.append(descriptor)
        descriptors.append(os.open(self._memory.folder.path / CONTROL, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        return answer

    def _check_serving(self) -> None:
        state = self._memory.state
        refused = native.load(self._memory.control.state, "refuse_puts") & native.REFUSE_STOPPING
        if state in (native.STATE_RUNNING, native.STATE_READ_ONLY) and not refused:
            return
        sentence = f"the engine takes no producers: it is {'stopping' if refused else STATE_NAMES[state]}"
        if state != native.STATE_DEGRADED:
            raise passing(EngineError(sentence))
        reason = native.reason(self._memory.control)
        raise EngineError(sentence + (f": {reason}" if reason else ""))

    def _close(self, peer: _Peer, epoch: int, slot: int, generation: int) -> dict[str, object]:
        if epoch != self._memory.identity.epoch:  # a session of an earlier engine, which used the same slots and generations
            return {"closed": False}
        if (slot, generation, peer.pid) not in self._sessions.open_slots() and peer.uid != 0:
            return {"closed": False}
        return {"closed": self._sessions.close(slot, generation)}

    def _answer(self, peer: _Peer, answer: Mapping[str, object], descriptors: list[int] | None = None) -> bool:
        data = json.dumps(answer).encode() + b"\n"
        try:
            return socket.send_fds(peer.channel, [data], descriptors or []) == len(data)
        except OSError:
            return False

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._selector.unregister(peer.channel)
        peer.channel.close()

    def tick(self) -> None:
        """Drop silent peers; mark dropped sessions dead; remove drained objects."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers if peer.until_s < now_s]:
            self._drop(peer)
        if self._listener not in self._selector.get_map():
            with contextlib.suppress(OSError):
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._sessions.close_dropped()
        self._sessions.sweep_objects()

    def no_session_reason(self) -> str:
        """Return why a request for a session would fail now; "" if it would succeed."""
        try:
            os.close(os.open(self._memory.folder.path / CONTROL, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
            return no_room_reason(self._memory)
        except FileNotFoundError:  # the engine stops for that reason
            return ""
        except OSError as error:
            return f"no session can be opened: {error.strerror}"

    def close(self) -> None:
        """Refuse new sessions from now on; open ones continue."""
        for peer in list(self._peers):
            self._drop(peer)
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.folder.socket_path.unlink()


@contextlib.contextmanager
def _short_path(folder: os.PathLike[str]) -> Iterator[str]:
    """Yield a path of the folder that is short enough for a socket address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def bound_socket(folder: Path, name: str = SOCKET) -> socket.socket:
    """Return a socket in `folder`, bound and not listening, that only this user can connect to; an older one loses its name."""
    with contextlib.suppress(FileNotFoundError):
        (folder / name).unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with _short_path(folder) as short:
            made.bind(f"{short}/{name}")
        os.chmod(folder / name, 0o600)
    except BaseException:
        made.close()
        raise
    return made


def connect_socket(folder: os.PathLike[str], timeout_s: float, name: str = SOCKET) -> socket.socket:
    """Connect to the server whose socket is in `folder`; OSError when no process listens."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        channel.settimeout(timeout_s)
        with _short_path(folder) as short:
            channel.connect(f"{short}/{name}")
    except OSError:
        channel.close()
        raise
    return channel


# ---- the count of living producers -----------------------------------------------


def make_attach_count() -> int:
    """Create a count of 0 and return its id; NO_ATTACH_COUNT if the system has no free SysV semaphore."""
    import sysv_ipc

    try:
        semaphore = sysv_ipc.Semaphore(sysv_ipc.IPC_PRIVATE, sysv_ipc.IPC_CREX, mode=0o600, initial_value=0)
    except (sysv_ipc.Error, OSError, ValueError, MemoryError):
        return NO_ATTACH_COUNT
    return int(semaphore.id)


def remove_attach_count(semaphore_id: int) -> None:
    """Remove the count; the producers in it need not notice."""
    import sysv_ipc

    if semaphore_id != NO_ATTACH_COUNT:
        with contextlib.suppress(sysv_ipc.Error):
            sysv_ipc.remove_semaphore(semaphore_id)
