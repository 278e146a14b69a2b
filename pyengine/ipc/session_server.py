"""Where producers open sessions: a Unix socket in the engine's folder, served by the supervisor.

One JSON line each way, the objects as descriptors beside the answer (SCM_RIGHTS):

    {"want": "session", "ring_bytes": 4194304}
        -> {"slot", "generation", "ring_bytes", "session_bytes", "control_bytes", "epoch",
            "folder", "semaphore_writer", "sysv_semaphore_id"} + [session rw, control READ-ONLY]
    {"want": "close", "epoch": 5, "slot": 3, "generation": 7}      -> {"closed": true}
    anything else                                       -> {"error": sentence}, with "again": true where it may pass

The peer's credentials are checked: only the engine's own user or root. Nothing a peer
does blocks the supervisor: sockets never block, a line is at most LINE_BYTES_MAX long,
and a peer that is silent for TIMEOUT_S is dropped; of more than PEERS_MAX the one that
was silent for longest, so that nobody is kept out (open_session() tries again).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time

from pyengine.errors import EngineError
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.ipc.control_block import STATE_NAMES, EngineMemory
from pyengine.ipc.sessions import Sessions, SlotsDrainingError
from pyengine.ipc.shared_objects import CONTROL, semaphore_name
from pyengine.native import control as native

LINE_BYTES_MAX = 4096
TIMEOUT_S = 5.0
PEERS_MAX = 64
_CREDENTIALS = struct.Struct("3i")


class _Peer:
    def __init__(self, channel: socket.socket, pid: int, uid: int) -> None:
        self.channel = channel
        self.pid = pid
        self.uid = uid
        self.line = b""
        self.until_s = time.monotonic() + TIMEOUT_S


class SessionServer:
    """Answers producers, inside the supervisor's own selector loop."""

    def __init__(self, memory: EngineMemory, selector: selectors.BaseSelector, sessions: Sessions) -> None:
        self._memory = memory
        self._selector = selector
        self._sessions = sessions
        self._peers: set[_Peer] = set()
        self._pidfds: dict[int, tuple[int, int, int]] = {}  # pidfd -> (slot, generation, pid)
        path = memory.folder.socket_path
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        # Bound by a path relative to the folder: a socket's address has room for 107 bytes only.
        with _short_path(memory.folder.path) as folder:
            self._listener.bind(f"{folder}/{path.name}")
        os.chmod(path, 0o600)
        self._listener.listen(PEERS_MAX)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        sessions.close_orphans()
        for slot, generation, pid in sessions.open_slots():
            self._watch(slot, generation, pid)

    @property
    def is_reachable(self) -> bool:
        """Whether the socket still has its name."""
        return self._memory.folder.socket_path.exists()

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except OSError:
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
        self._peers.add(peer)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: _Peer) -> None:
        if peer not in self._peers:  # dropped by _accept(), in the same turn of the selector
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
        try:
            request = json.loads(line)
            want = request.get("want")
            if want == "session":
                answer = self._open(peer, request.get("ring_bytes"), descriptors)
            elif want == "close":
                answer = self._close(peer, int(request["epoch"]), int(request["slot"]), int(request["generation"]))
            else:
                answer = {"error": f"unknown request {want!r}"}
        except SlotsDrainingError as error:
            answer = {"error": str(error), "again": True}
        except EngineError as error:
            answer = {"error": str(error)}
        except OSError as error:  # descriptors are short, or somebody removed the engine's folder
            answer = {"error": f"no session can be opened: {error}"}
        except PARSE_ERRORS as error:
            answer = {"error": f"not understood: {error}"}
        try:
            sent = self._answer(peer, answer, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not sent:
            if "generation" in answer:
                self._sessions.close(answer["slot"], answer["generation"])
            self._drop(peer)

    def _open(self, peer: _Peer, ring_bytes: object, descriptors: list[int]) -> dict[str, object]:
        if ring_bytes is not None and not isinstance(ring_bytes, int):
            raise TypeError("ring_bytes is no number")
        self._check_serving()
        identity = self._memory.identity
        opened = self._sessions.open(peer.pid, peer.uid, ring_bytes)
        descriptors.append(opened.descriptor)
        self._watch(opened.slot, opened.generation, peer.pid)
        folder = self._memory.folder
        descriptors.append(os.open(folder.path / CONTROL, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        return {
            "slot": opened.slot, "generation": opened.generation, "ring_bytes": opened.ring_bytes,
            "session_bytes": opened.session_bytes, "control_bytes": native.CONTROL_BYTES,
            "epoch": identity.epoch, "folder": str(folder.path),
            "semaphore_writer": semaphore_name(folder.short_id, native.WRITER),
            "sysv_semaphore_id": identity.sysv_semaphore_id,
        }

    def _check_serving(self) -> None:
        state = self._memory.state
        refused = native.load(self._memory.control.state, "refuse_puts") & native.REFUSE_STOPPING
        if state in (native.STATE_RUNNING, native.STATE_READ_ONLY) and not refused:
            return
        reason = native.reason(self._memory.control) if state == native.STATE_DEGRADED else ""
        raise EngineError(f"the engine takes no producers: it is {'stopping' if refused else STATE_NAMES[state]}"
                          + (f": {reason}" if reason else ""))

    def _close(self, peer: _Peer, epoch: int, slot: int, generation: int) -> dict[str, object]:
        if epoch != self._memory.identity.epoch:  # of an earlier engine, whose slots and generations were the same
            return {"closed": False}
        if (slot, generation, peer.pid) not in self._sessions.open_slots() and peer.uid != 0:
            return {"closed": False}
        return {"closed": self._sessions.close(slot, generation)}

    def _answer(self, peer: _Peer, answer: dict[str, object], descriptors: list[int] | None = None) -> bool:
        data = json.dumps(answer).encode() + b"\n"
        try:
            return socket.send_fds(peer.channel, [data], descriptors or []) == len(data)
        except OSError:
            return False

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        self._selector.unregister(peer.channel)
        peer.channel.close()

    def _watch(self, slot: int, generation: int, pid: int) -> None:
        """Learn at once when the process ends, whatever happens to its pid afterwards."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._sessions.close(slot, generation)
            return
        self._pidfds[pidfd] = slot, generation, pid
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._died(pidfd))
        if not self._sessions.owner_lives(slot):  # it ended, and its pid came back, between the two calls
            self._died(pidfd)

    def _died(self, pidfd: int) -> None:
        slot, generation, _ = self._pidfds[pidfd]
        self._sessions.close(slot, generation)
        self._forget(pidfd)

    def _forget(self, pidfd: int) -> None:
        del self._pidfds[pidfd]
        self._selector.unregister(pidfd)
        os.close(pidfd)

    def tick(self) -> None:
        """Drop silent peers; close dropped sessions; stop watching processes whose session is over; remove objects of
        drained ones."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers if peer.until_s < now_s]:
            self._drop(peer)
        self._sessions.close_dropped()
        living = set(self._sessions.open_slots())
        for pidfd in [pidfd for pidfd, session in self._pidfds.items() if session not in living]:
            self._forget(pidfd)
        self._sessions.sweep_objects()

    def close(self) -> None:
        """Refuse new sessions from here on; open ones go on."""
        for peer in list(self._peers):
            self._drop(peer)
        for pidfd in list(self._pidfds):
            self._forget(pidfd)
        self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._memory.folder.socket_path.unlink()


@contextlib.contextmanager
def _short_path(folder: os.PathLike[str]):
    """A name for the folder that fits into a socket address."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def connect(folder: os.PathLike[str], timeout_s: float) -> socket.socket:
    """A connection to the server whose socket lies in `folder`; OSError when nobody listens."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        channel.settimeout(timeout_s)
        with _short_path(folder) as short:
            channel.connect(f"{short}/socket")
    except OSError:
        channel.close()
        raise
    return channel
