"""Open a producer's session: ask the supervisor, which sends the shared objects as descriptors.

    with open_session(root) as session:
        session.control, session.session    # cffi pointers, see pyengine.native

While a dead supervisor is being replaced, the opening waits, within the timeout. Puts never
need the supervisor again. until_ready() waits for an engine or a store that starts later: processes
that use one store may be started in any order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pyengine.arguments import Closing
from pyengine.errors import EngineError, EngineUnavailableError, NotAStoreError, command, passing
from pyengine.formats.small_file import TRANSIENT_ERRNOS, keep_standard_descriptors
from pyengine.ipc import sessions
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.shared_objects import CONTROL, SharedFolder, SharedObject, find_folder, session_name
from pyengine.ipc.store_lock import living_kinds, open_lock
from pyengine.native import control as native
from pyengine.native import session as native_session
from pyengine.storage.config import existing_store
from pyengine.storage.engine_id import read_epoch

if TYPE_CHECKING:
    from pyengine._native import ms_control
    from pyengine.engine_config import EngineConfig

CONNECT_TIMEOUT_S = 10.0
POLL_INTERVAL_FIRST_S, POLL_INTERVAL_LAST_S = 0.02, 0.1
LOG_AFTER_S = 1.0  # a wait that is longer is logged, so that a user who forgot to start the engine need not wait for the timeout
DESCRIPTORS = 2  # of an answer with a session
_LOG = logging.getLogger("pyengine.client.wait")
_Made = TypeVar("_Made")


class Patience:
    """A wait of up to `timeout_s`, in growing pauses, while the errors of a call are such as pass (errors.passing)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._pause_s = POLL_INTERVAL_FIRST_S
        self._is_logged = False

    @property
    def left_s(self) -> float:
        """The seconds that are left."""
        return max(0.0, self._began_s + self._timeout_s - time.monotonic())

    def pause_s(self, error: EngineError) -> float:
        """Return how long to sleep before the next try. Raises `error` if it does not pass; at the timeout, with the time waited."""
        left_s = self.left_s
        if not error.may_pass or not self._timeout_s:
            raise error
        if not left_s:
            raise type(error)(f"{error}; waited {self._timeout_s:g} s") from None
        if not self._is_logged and self._timeout_s - left_s >= LOG_AFTER_S:
            self._is_logged = True
            _LOG.warning("%s; waiting up to %.0f s more", error, left_s)
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, POLL_INTERVAL_LAST_S)
        return min(pause_s, left_s)


def until_ready(attempt: Callable[[float], _Made], timeout_s: float) -> _Made:
    """Return what `attempt(seconds left)` makes; while its errors are such as pass, try again for up to `timeout_s`."""
    patience = Patience(timeout_s)
    while True:
        try:
            return attempt(patience.left_s)
        except EngineError as error:
            pause_s = patience.pause_s(error)
        time.sleep(pause_s)


def require_engine(root: str | os.PathLike[str]) -> None:
    """Raise EngineUnavailableError, which passes when one is started, if no engine runs on the store."""
    if not living_kinds(root):
        try:
            existing_store(Path(root))
        except NotAStoreError as error:
            if not error.may_pass:
                raise EngineUnavailableError(f"no engine is running: {error}") from None
        find_folder(root)
        raise passing(EngineUnavailableError(f"no engine is running on {root}: start it with {command('start', root)}"))


class OpenSession(Closing):
    """One open session, mapped: the session read-write, the control block read-only.

    `settings`: what its producer puts with, if it has any.
    """

    settings: EngineConfig | None = None

    def __init__(self, root: Path, answer: sessions.SessionAnswer, descriptors: list[int]) -> None:
        """Take over `descriptors`, those of the session and of the control block; they are closed if this fails."""
        self.root = root
        self._pid = os.getpid()
        mapped: list[SharedObject] = []
        try:
            self.slot = answer["slot"]
            self.generation = answer["generation"]
            self.ring_bytes = answer["ring_bytes"]
            self.folder = SharedFolder(answer["folder"])  # for side objects too
            name = session_name(answer["epoch"], self.slot, self.generation)
            mapped.append(SharedObject(name, descriptors.pop(0), writable=True))
            mapped.append(SharedObject(CONTROL, descriptors.pop(0), writable=False))
            self.memory = EngineMemory(self.folder, mapped[1])
            native.check_control(self.memory.control, mapped[1].size_bytes)
            self.identity = self.memory.identity
            self.session = native_session.view(mapped[0].memory)
            native_session.check_session(self.session, mapped[0].size_bytes)
            # csrc/producer.c notices by it that the engine died. If no byte is locked now, the file is not the engine's `lock`.
            self.lock_descriptor = open_lock(root) if living_kinds(root) else -1
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            for shared in mapped:
                shared.close()
            raise
        self._object: SharedObject | None = mapped[0]
        self._counted = native_session.count_producer(self.identity.sysv_semaphore_id, 1)

    @property
    def control(self) -> ms_control:
        """The control block, mapped read-only."""
        return self.memory.control

    @property
    def is_open(self) -> bool:
        """Whether a writer still executes entries: the session is not closed and the engine is not replaced."""
        line = self.control.sessions[self.slot]
        return (not self.memory.retired and native.load(line, "generation") == self.generation
                and native.load(line, "state") == native.SESSION_OPEN)

    @property
    def is_replaced(self) -> bool:
        """Whether the store was recovered since, so that this engine has ended.

        The epoch on the disk tells it even if the engine's names in shared memory were removed: then no process could have
        retired the memory that is mapped here.
        """
        try:
            return read_epoch(self.root) > self.identity.epoch
        except EngineError:
            return False

    def close(self) -> None:
        """Close the session and unmap it; published entries are still executed. A forked child only unmaps."""
        if self._object is None:
            return
        if os.getpid() == self._pid:
            counted, self._counted = self._counted, False
            if counted:
                native_session.count_producer(self.identity.sysv_semaphore_id, -1)
            if self.is_open:
                request = {"want": "close", "epoch": self.identity.epoch, "slot": self.slot, "generation": self.generation}
                with contextlib.suppress(OSError, ValueError), sessions.connect_socket(self.folder.path, 1.0) as channel:
                    ask(channel, request)
            self._pid = -1  # a call after one that a signal handler has ended goes on from here
        self.__dict__.pop("session", None)  # a pointer into the mapping
        self._object.close()
        self.memory.close()
        descriptor, self.lock_descriptor = self.lock_descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._object = None

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # noqa: BLE001 - the object is incomplete, or the interpreter is ending, and contextlib is gone
            pass


def open_session(root: str | os.PathLike[str], ring_bytes: int | None = None,
                 timeout_s: float = CONNECT_TIMEOUT_S) -> OpenSession:
    """Open a session with the engine that runs on `root`; `ring_bytes` None takes the engine's default.

    EngineUnavailableError says why it cannot: no engine, stopping, degraded, no free slot, another user's engine, no
    descriptor or memory here. While the supervisor is down but other processes of the engine live, it waits for a new one.
    """
    root = Path(root).absolute()
    patience = Patience(timeout_s)
    while True:
        try:
            return _open_now(root, ring_bytes, max(0.1, patience.left_s))
        except PermissionError as error:
            raise EngineUnavailableError(
                f"the engine on {root} runs, or last ran, as another user: no permission for its socket") from error
        except OSError as error:
            if error.errno in TRANSIENT_ERRNOS:  # not again: each try takes a slot until the supervisor's next tick
                raise EngineUnavailableError(
                    f"no session with the engine on {root} can be opened: {error.strerror}: raise this process's limit (ulimit -n, "
                    "ulimit -v), or end what uses it up") from error
            require_engine(root)
            no_session = passing(EngineUnavailableError(
                f"the engine on {root} gives no session ({error}): {command('status', root)} says whether its supervisor is alive"))
        time.sleep(patience.pause_s(no_session))


def _open_now(root: Path, ring_bytes: int | None, timeout_s: float) -> OpenSession:
    keep_standard_descriptors()
    folder = find_folder(root)
    with sessions.connect_socket(folder.path, timeout_s) as channel:
        answer, descriptors = ask(channel, {"want": "session", "ring_bytes": ring_bytes})
    if "error" in answer or len(descriptors) != DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        if answer.get("again"):
            raise BlockingIOError(str(answer["error"]))
        refused = EngineUnavailableError(str(answer.get("error", "the engine's answer came without its objects")))
        raise passing(refused) if answer.get("may_pass") else refused
    return OpenSession(root, cast(sessions.SessionAnswer, answer), descriptors)


def ask_for_settings(root: str | os.PathLike[str], live: Mapping[str, str], timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, Any]:
    """Ask the supervisor to read the settings again and to set those in `live`; {"changed": [...], "later": [...], "number": n}.

    EngineUnavailableError if no supervisor answers within `timeout_s`; EngineError if it refuses a setting.
    """
    try:
        with sessions.connect_socket(find_folder(root).path, timeout_s) as channel:
            answer, _ = ask(channel, {"want": "settings", "live": dict(live)})
    except OSError as error:
        raise EngineUnavailableError(f"the engine's supervisor does not answer: {error}") from None
    if "error" in answer:
        raise EngineError(str(answer["error"]))
    return answer


def ask(channel: socket.socket, request: Mapping[str, object]) -> tuple[dict[str, Any], list[int]]:
    """Send a request; return (answer, descriptors of the answer). OSError when the supervisor closes the connection."""
    channel.sendall(json.dumps(request).encode() + b"\n")
    line = b""
    descriptors = array("i")
    room = socket.CMSG_SPACE(DESCRIPTORS * descriptors.itemsize)
    try:
        while not line.endswith(b"\n"):
            # Not by socket.recv_fds, which ignores its flags: without MSG_CMSG_CLOEXEC a new program would inherit the descriptors.
            data, ancillary, flags, _ = channel.recvmsg(sessions.LINE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, received in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(received[:len(received) - len(received) % descriptors.itemsize])
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not data:
                raise ConnectionResetError("the supervisor closed the connection")
            line += data
        return json.loads(line), descriptors.tolist()
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
