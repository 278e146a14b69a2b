"""Opening, closing and losing sessions, over the real socket, with real producers that are really killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading

import pytest

from fix_owner import CHECKOUT
from pyengine.errors import EngineUnavailableError
from pyengine.ipc import session_client, sessions
from pyengine.ipc.session_client import open_session
from pyengine.ipc.sessions import PEERS_MAX, Sessions, SessionServer, connect_socket
from pyengine.native import control as native
from pyengine.native import session as native_session
from waiting import eventually, scaled_timeout_s

PRODUCER = """
import sys
from pyengine.ipc.session_client import open_session
session = open_session(sys.argv[1])
print(session.slot, session.generation, flush=True)
sys.stdin.read()
"""
FORKING_PRODUCER = """
import os, sys
from pyengine.ipc.session_client import open_session
session = open_session(sys.argv[1])
if os.fork():
    print(session.slot, session.generation, flush=True)
sys.stdin.read()
os._exit(0)
"""
ANOTHER_UID = 65534
CLOSER = """
import os, sys
from pyengine.ipc import sessions
folder, uid, epoch, slot, generation = sys.argv[1:]
if os.geteuid() == 0:
    os.setuid(int(uid))
with sessions.connect_socket(folder, 10) as channel:
    channel.sendall(b'{"want": "close", "epoch": %d, "slot": %d, "generation": %d}\\n'
                    % (int(epoch), int(slot), int(generation)))
    print(os.geteuid(), channel.recv(4096).decode())
"""


class Server:
    """The supervisor's part: a selector loop in a thread of the test."""

    def __init__(self, owner) -> None:
        self.owner = owner
        self.selector = selectors.DefaultSelector()
        self.sessions = Sessions(owner.memory)
        self.server = SessionServer(owner.memory, self.selector, self.sessions)
        self.going = True
        self.ticks = 0
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self) -> None:
        while self.going:
            for key, _ in self.selector.select(0.02):
                key.data()
            self.server.tick()
            self.ticks += 1

    def close(self) -> None:
        if self.going:
            self.going = False
            self.thread.join()
            self.server.close()
            self.selector.close()


@pytest.fixture
def server(make_owner):
    owner = make_owner(sessions_max=4, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    made = Server(owner)
    yield made
    made.close()


def state(server, slot):
    return native.load(server.owner.control.sessions[slot], "state")


def free(server, slot):
    """Free a dead session's slot, as the writer does once it has drained the session."""
    assert native.compare_and_swap(server.owner.control.sessions[slot], "state", native.SESSION_DEAD, native.SESSION_FREE)


def producer(server, script=PRODUCER):
    child = subprocess.Popen([sys.executable, "-c", script, str(server.owner.root)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    slot, generation = map(int, child.stdout.readline().split())
    return child, slot, generation


def end(child):
    child.stdin.close()
    child.wait(timeout=scaled_timeout_s(30))
    child.stdout.close()


def test_a_session_is_opened_used_and_closed(server):
    latch = server.owner.memory.latch(native.WRITER)
    latch.arm()
    before = native.load(server.owner.control.session_seq, "value")
    with open_session(server.owner.root) as session:
        assert (session.slot, session.generation, session.ring_bytes) == (0, 1, 65536)
        line = server.owner.control.sessions[0]
        assert (line.pid, line.uid, line.ring_bytes) == (os.getpid(), os.geteuid(), 65536)
        assert state(server, 0) == native.SESSION_OPEN and session.is_open
        assert latch.wait(10) and native.load(server.owner.control.session_seq, "value") > before
        assert native.has_identity(session.control, server.owner.memory.identity)
        assert native_session.producer_count(session.identity.sysv_semaphore_id) == 1
        # the writer's mapping of the object is the producer's
        with server.owner.folder.attach("session-1-0-1") as shared:
            view = native_session.view(shared.memory)
            native_session.check_session(view, shared.size_bytes)
            session.session.tail = 4711
            assert view.tail == 4711 and view.epoch == session.identity.epoch
        assert os.stat(server.owner.folder.path / "session-1-0-1").st_blocks * 512 >= shared.size_bytes
    assert state(server, 0) == native.SESSION_DEAD
    assert native_session.producer_count(server.owner.memory.identity.sysv_semaphore_id) == 0


def test_the_ring_is_as_large_as_asked(server):
    with open_session(server.owner.root, ring_bytes=1 << 20) as session:
        assert session.session.ring_bytes == 1 << 20
    for wrong in (1000, 65537, 1 << 40, -65536):
        with pytest.raises(EngineUnavailableError, match="power of two"):
            open_session(server.owner.root, ring_bytes=wrong)


def test_a_slot_comes_back_with_another_generation_and_its_old_object_goes(server):
    open_session(server.owner.root).close()
    with open_session(server.owner.root) as session:
        assert (session.slot, session.generation) == (1, 1), "slot 0 is not drained yet"
        free(server, 0)
        with open_session(server.owner.root) as again:
            assert (again.slot, again.generation) == (0, 2)
            (server.owner.folder.path / "side-1-0-1-5").touch()
            (server.owner.folder.path / "side-1-0-2-5").touch()
            eventually(lambda: "session-1-0-1" not in server.owner.folder.names()
                       and "side-1-0-1-5" not in server.owner.folder.names(), "old objects swept")
            assert {"session-1-0-2", "session-1-1-1", "side-1-0-2-5"} <= set(server.owner.folder.names())


def test_a_killed_producer_is_noticed_and_counted_out(server):
    child, slot, generation = producer(server)
    semaphore = server.owner.memory.identity.sysv_semaphore_id
    assert native_session.producer_count(semaphore) == 1
    child.send_signal(signal.SIGKILL)
    eventually(lambda: state(server, slot) == native.SESSION_DEAD, "its session is dead")
    child.wait()
    assert native_session.producer_count(semaphore) == 0
    end(child)


def test_a_producer_that_ends_without_a_word_is_noticed(server):
    child, slot, _ = producer(server)
    end(child)
    eventually(lambda: state(server, slot) == native.SESSION_DEAD, "its session is dead")


EXEC = """
import os, sys
from pyengine.ipc.session_client import open_session
session = open_session(sys.argv[1])
print(session.slot, session.generation, flush=True)
sys.stdin.readline()
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another program', flush=True); sys.stdin.read()"])
"""


def test_a_producer_that_becomes_another_program_is_noticed(server):
    child, slot, _ = producer(server, EXEC)
    assert state(server, slot) == native.SESSION_OPEN
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "another program\n"
    eventually(lambda: state(server, slot) == native.SESSION_DEAD, "its session is closed")
    assert child.poll() is None
    end(child)


def test_a_look_of_each_second_costs_what_is_open_not_what_there_is_room_for(make_owner, monkeypatch):
    owner = make_owner()
    looked_at = []
    load = native.load
    monkeypatch.setattr(native, "load", lambda line, field: looked_at.append(field) or load(line, field))
    rows = Sessions(owner.memory)
    for slot, state_of_it in ((3, native.SESSION_OPEN), (5, native.SESSION_DEAD), (7, native.SESSION_OPEN)):
        native.store(owner.control.sessions[slot], "state", state_of_it)
        native.store(owner.control.sessions[slot], "generation", slot)
        owner.control.sessions[slot].pid = 100 + slot
    assert native.used_sessions(owner.control, owner.memory.identity.sessions_max) == [3, 5, 7]
    assert native.used_sessions(owner.control, 7) == [3, 5], "slots beyond the engine's are not its own"
    assert rows.open_slots() == [(3, 3, 103), (7, 7, 107)]
    rows.sweep_objects()
    assert len(looked_at) == 3 + 2 * 2 + 3


def test_a_process_that_is_not_visible_is_told_both_causes(make_owner):
    with pytest.raises(EngineUnavailableError, match=r"process 0 is not visible here: .* share one pid namespace, and /proc .*hidepid="):
        Sessions(make_owner().memory).open(0, os.getuid())


def test_a_session_that_is_forgotten_is_closed(server):
    session = open_session(server.owner.root)
    slot, descriptors = session.slot, len(os.listdir("/proc/self/fd"))
    del session
    assert len(os.listdir("/proc/self/fd")) < descriptors
    eventually(lambda: state(server, slot) == native.SESSION_DEAD, "its session is closed")


def test_a_slot_that_is_about_to_be_free_is_waited_for(server):
    sessions = [open_session(server.owner.root) for _ in range(4)]
    sessions.pop(2).close()
    opened = []
    thread = threading.Thread(target=lambda: opened.append(open_session(server.owner.root)))
    thread.start()
    eventually(lambda: state(server, 2) == native.SESSION_DEAD, "not drained yet")
    free(server, 2)
    thread.join(30)
    assert opened[0].slot == 2
    for session in sessions + opened:
        session.close()


def test_a_session_beyond_sessions_max_is_refused(server):
    held = [open_session(server.owner.root) for _ in range(4)]
    with pytest.raises(EngineUnavailableError, match="sessions_max"):
        open_session(server.owner.root)
    for session in held:
        session.close()


def test_sessions_in_a_removed_folder_are_refused_and_the_server_survives(server):
    for name in ("control", "session-1-0-1"):
        server.owner.folder.unlink(name)
    with pytest.raises(EngineUnavailableError, match="no session can be opened") as refused:
        open_session(server.owner.root)
    assert server.thread.is_alive() and refused.value.may_pass, "the engine starts again, or has a descriptor again"


def test_a_user_closes_no_session_of_another_process_but_root_does(server, monkeypatch):
    """Tried by a process of an ordinary user, also where the tests run as root."""
    child, slot, generation = producer(server)
    folder = server.owner.folder
    uid = os.geteuid() or ANOTHER_UID
    if os.geteuid() == 0:
        os.chmod(folder.path, 0o711)
        os.chmod(folder.socket_path, 0o666)
        monkeypatch.setattr(sessions.os, "geteuid", lambda: uid)  # as if the engine were that user's
    numbers = [str(number) for number in (uid, server.owner.memory.identity.epoch, slot, generation)]
    done = subprocess.run([sys.executable, "-c", CLOSER, folder.path, *numbers], cwd=CHECKOUT, capture_output=True, text=True,
                          timeout=scaled_timeout_s(60))
    assert (done.stdout.split(), done.stderr) == ([str(uid), '{"closed":', "false}"], "")
    assert state(server, slot) == native.SESSION_OPEN
    end(child)


@pytest.mark.parametrize("line", [
    b"", b"{}", b"[]", b"null", b'{"want": "more"}', b"\xff\xfe", b'{"want": "session", "ring_bytes": "big"}',
    b'{"want": "close"}', b'{"want": "close", "epoch": 1, "slot": -1, "generation": 1}',
    b'{"want": "close", "epoch": 1, "slot": 99999, "generation": 1}',
    b'{"want": "session", "ring_bytes": 65536.5}', b"[" * 4000, b'{"want": "close", "epoch": 1, "slot": 1e999, "generation": 1}',
    b'{"want": "session", "ring_bytes": 1e999}', b'{"want": "close", "epoch": 1, "slot": 1' + b"0" * 40 + b', "generation": 1}',
])
def test_nonsense_gets_an_answer_and_harms_no_session(server, line):
    with connect_socket(server.owner.folder.path, 10) as channel:
        channel.sendall(line + b"\n")
        answer = json.loads(channel.recv(4096))
    assert "error" in answer or answer == {"closed": False}
    open_session(server.owner.root).close()


def test_endless_lines_and_silent_peers_are_dropped(server, monkeypatch):
    monkeypatch.setattr(sessions, "TIMEOUT_S", 0.05)
    with connect_socket(server.owner.folder.path, 10) as endless, \
            connect_socket(server.owner.folder.path, 10) as silent:
        endless.sendall(b"x" * 5000)
        assert endless.recv(10) == b""
        assert silent.recv(10) == b""
    open_session(server.owner.root).close()


def test_connections_that_say_nothing_keep_no_producer_out(server):
    def connected():
        with contextlib.suppress(BlockingIOError):  # the server has not come to those before
            return connect_socket(server.owner.folder.path, 10)

    with contextlib.ExitStack() as silent:
        for _ in range(PEERS_MAX + 10):
            silent.enter_context(eventually(connected, "connected"))
        with open_session(server.owner.root) as session:
            assert session.is_open


def test_a_connection_that_speaks_in_the_turn_in_which_it_is_dropped_does_no_harm(make_owner):
    owner = make_owner(sessions_max=4, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        server = SessionServer(owner.memory, selector, Sessions(owner.memory))
        stack.callback(server.close)

        def turn() -> None:
            ready = [key.data for key, _ in selector.select(10)]
            for act in sorted(ready, key=lambda act: act != server._accept):  # new connections first
                act()

        def connected():
            return stack.enter_context(connect_socket(owner.folder.path, 10))

        first = connected()
        turn()
        for _ in range(PEERS_MAX - 1):
            connected()
            turn()
        first.sendall(b"{}\n")
        last = connected()
        turn()
        last.sendall(b"{}\n")
        turn()
        assert b"unknown request" in last.recv(4096)


def test_a_producer_that_vanishes_before_it_is_answered_leaves_no_session(make_owner):
    owner = make_owner(sessions_max=4, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        sessions = Sessions(owner.memory)
        server = SessionServer(owner.memory, selector, sessions)
        stack.callback(server.close)
        channel = stack.enter_context(connect_socket(owner.folder.path, 10))
        channel.sendall(b'{"want": "session"}\n')
        channel.shutdown(socket.SHUT_RD)  # what is sent to it from here on fails
        while not native.load(owner.control.sessions[0], "generation"):
            for key, _ in selector.select(10):
                key.data()
        assert sessions.open_slots() == [] and native.load(owner.control.sessions[0], "state") == native.SESSION_DEAD


@pytest.mark.parametrize(("set_state", "says"), [
    (lambda control: native.store(control.state, "refuse_puts", native.REFUSE_STOPPING), "stopping"),
    (lambda control: native.store(control.state, "state", native.STATE_DEGRADED), "degraded"),
    (lambda control: native.store(control.state, "state", native.STATE_RECOVERING), "recovering"),
])
def test_an_engine_that_does_not_serve_says_so(server, set_state, says):
    set_state(server.owner.control)
    with pytest.raises(EngineUnavailableError, match=says):
        open_session(server.owner.root, timeout_s=1)


def test_without_engine_there_is_no_waiting(make_owner):
    owner = make_owner()
    owner.lock.close()
    with pytest.raises(EngineUnavailableError, match="pyengine start"):
        open_session(owner.root, timeout_s=3600)


def test_a_missing_supervisor_is_waited_for_and_its_successor_takes_the_sessions_over(server):
    owner = server.owner
    child, slot, generation = producer(server)
    doomed, doomed_slot, _ = producer(server)
    server.close()
    with pytest.raises(EngineUnavailableError, match="supervisor"):
        open_session(owner.root, timeout_s=0.1)
    doomed.kill()
    doomed.wait()
    opened = []
    waiter = threading.Thread(target=lambda: opened.append(open_session(owner.root, timeout_s=60)))
    waiter.start()
    successor = Server(owner)
    try:
        waiter.join(timeout=scaled_timeout_s(60))
        assert opened and opened[0].is_open
        assert native.load(owner.control.sessions[slot], "state") == native.SESSION_OPEN
        assert native.load(owner.control.sessions[doomed_slot], "state") == native.SESSION_DEAD
        end(child)
        eventually(lambda: native.load(owner.control.sessions[slot], "state") == native.SESSION_DEAD,
                   "the successor watches it too")
        opened[0].close()
    finally:
        successor.close()
        end(doomed)


def test_a_server_without_a_free_descriptor_waits_for_the_next_tick(make_owner, monkeypatch):
    owner = make_owner(sessions_max=4, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        server = SessionServer(owner.memory, selector, Sessions(owner.memory))
        stack.callback(server.close)
        channel = stack.enter_context(connect_socket(owner.folder.path, 10))
        channel.sendall(b'{"want": "session"}\n')
        monkeypatch.setattr(socket.socket, "_accept", lambda _: raise_error(OSError(errno.EMFILE, "Too many open files")))
        for key, _ in selector.select(10):
            key.data()
        monkeypatch.undo()
        assert selector.select(0) == [], "it does not spin"
        server.tick()
        while not native.load(owner.control.sessions[0], "generation"):
            for key, _ in selector.select(10):
                key.data()


LIMITED = """
import os, resource, sys
from pyengine.errors import EngineError
from pyengine.ipc.session_client import open_session
open_session(sys.argv[1]).close()  # imports what is imported late
first, (soft, hard) = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
os.close(first)
for free in range(8):
    resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, hard))
    try:
        open_session(sys.argv[1], timeout_s=0.1).close()
        print(free, "opened")
    except EngineError as error:
        print(free, error)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
assert os.dup(0) == first, "no descriptor is left open"
"""


def test_a_producer_without_descriptors_for_its_session_says_so(make_owner):
    owner = make_owner(sessions_max=64, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    server = Server(owner)
    done = subprocess.run([sys.executable, "-c", LIMITED, str(server.owner.root)], capture_output=True, text=True,
                          timeout=scaled_timeout_s(60),
                          env={**os.environ, "PYTHONPATH": str(CHECKOUT)})
    server.close()
    said = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    print(done.stdout, done.stderr)
    taken = [native.load(line, "generation") for line in owner.control.sessions]
    assert sum(taken) <= 8, "no try is repeated: each takes a slot"
    assert done.returncode == 0 and len(said) == 8, (done.stdout, done.stderr)
    assert said[-1] == "opened"
    assert all("ulimit -n" in line or os.strerror(errno.EMFILE) in line for line in said[:said.index("opened")]), said


def test_a_connection_that_the_selector_cannot_take_is_closed(make_owner, monkeypatch):
    """A user's watches (fs.epoll.max_user_watches), or the kernel's memory, may be used up."""
    owner = make_owner(sessions_max=4, session_ring_bytes_default=65536)
    owner.position(0)
    owner.publish()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        server = SessionServer(owner.memory, selector, Sessions(owner.memory))
        stack.callback(server.close)
        channel = stack.enter_context(connect_socket(owner.folder.path, 10))
        with monkeypatch.context() as patch:
            patch.setattr(selector, "register", lambda *_: raise_error(OSError(errno.ENOSPC, "No space left on device")))
            for key, _ in selector.select(10):
                key.data()
            assert channel.recv(1) == b""
            server.tick()
        channel = stack.enter_context(connect_socket(owner.folder.path, 10))
        channel.sendall(b'{"want": "session"}\n')
        while not native.load(owner.control.sessions[0], "generation"):
            for key, _ in selector.select(10):
                key.data()


def test_a_successor_without_a_free_descriptor_closes_no_living_session(server, monkeypatch):
    with open_session(server.owner.root) as session:
        server.close()
        monkeypatch.setattr(Sessions, "owner_lives", lambda *_: raise_error(OSError(errno.EMFILE, "Too many open files")))
        successor = Server(server.owner)
        monkeypatch.undo()
        assert session.is_open
        session.close()
        slot = session.slot
        eventually(lambda: state(server, slot) == native.SESSION_DEAD, "its close is served")
        successor.close()


def test_the_session_of_a_dead_producer_is_closed_although_its_child_has_the_lock(server, monkeypatch):
    """Also after the supervisor had no descriptor to look at the process with."""
    with monkeypatch.context() as patch:
        patch.setattr(server.sessions, "owner_lives", lambda slot: raise_error(OSError(errno.EMFILE, "Too many open files")))
        child, slot, _ = producer(server, FORKING_PRODUCER)
        eventually(lambda: server.ticks > 2, "the server has ticked without a descriptor")
    assert state(server, slot) == native.SESSION_OPEN
    child.kill()
    child.wait(timeout=scaled_timeout_s(30))
    eventually(lambda: state(server, slot) == native.SESSION_DEAD, "the session of a dead producer is closed")
    end(child)


@pytest.mark.root
def test_another_user_is_turned_away(server):
    script = ("import os, socket, sys\n"
              "channel = socket.socket(socket.AF_UNIX)\n"
              "os.setuid(65534)\n"
              "try:\n"
              "    channel.connect(sys.argv[1])\n"
              "    print(channel.recv(4096))\n"
              "except PermissionError:\n"
              "    print('refused')\n")
    done = subprocess.run([sys.executable, "-c", script, str(server.owner.folder.socket_path)],
                          capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert done.stdout == "refused\n"
    # and even one that gets past the folder's rights is told apart by its credentials
    os.chmod(server.owner.folder.path, 0o755)
    os.chmod(server.owner.folder.socket_path, 0o666)
    done = subprocess.run([sys.executable, "-c", script, str(server.owner.folder.socket_path)],
                          capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert "belongs to uid 0, not to uid 65534" in done.stdout
    os.chmod(server.owner.folder.path, 0o700)


def test_a_forked_child_does_not_close_its_parents_session(server):
    with open_session(server.owner.root) as session:
        child = os.fork()
        if child == 0:
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert session.is_open


@pytest.mark.parametrize("fails", ["pyengine.native.session.check_session", "pyengine.ipc.session_client.EngineMemory",
                                   "pyengine.ipc.session_client.living_kinds", "pyengine.ipc.session_client.json.loads"])
def test_a_session_that_fails_half_way_leaves_no_descriptor_open(server, monkeypatch, fails):
    def fail(*_):
        raise EngineUnavailableError("half-way")

    open_session(server.owner.root).close()
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(fails, fail)
        if fails.endswith("loads"):
            client, engine = socket.socketpair()
            with client, engine, open("/dev/null") as file:
                socket.send_fds(engine, [b"{}\n"], [file.fileno()])
                with pytest.raises(EngineUnavailableError, match="half-way"):
                    session_client.ask(client, {})
        else:
            with pytest.raises(EngineUnavailableError, match="half-way"):
                open_session(server.owner.root)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), "all are closed")
    eventually(lambda: not server.sessions.open_slots(), "no session stays open")


# ---- the count of living producers -----------------------------------------------

COUNTED = """
import sys
from pyengine.native import session as native_session
assert native_session.count_producer(int(sys.argv[1]), 1)
print("joined", flush=True)
if sys.stdin.read(1) == "l":
    native_session.count_producer(int(sys.argv[1]), -1)
    print("left", flush=True)
    sys.stdin.read()
"""


def test_the_reason_that_no_session_can_be_opened_is_known_before_a_request(server, monkeypatch):
    assert server.server.no_session_reason() == ""
    monkeypatch.setattr(sessions.os, "open", lambda *arguments, **named: raise_error(OSError(errno.EMFILE, "Too many open files")))
    assert server.server.no_session_reason() == "no session can be opened: Too many open files"
    monkeypatch.undo()
    server.owner.folder.unlink("control")
    assert server.server.no_session_reason() == ""


def raise_error(error):
    raise error


@pytest.fixture
def semaphore():
    made = sessions.make_attach_count()
    assert made != sessions.NO_ATTACH_COUNT
    yield made
    sessions.remove_attach_count(made)


def counted(semaphore):
    child = subprocess.Popen([sys.executable, "-c", COUNTED, str(semaphore)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "joined\n"
    return child


def test_joined_left_ended_and_killed(semaphore):
    assert native_session.producer_count(semaphore) == 0
    first, second, third = counted(semaphore), counted(semaphore), counted(semaphore)
    assert native_session.producer_count(semaphore) == 3
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=scaled_timeout_s(30))
    assert native_session.producer_count(semaphore) == 2
    second.stdin.write("l")
    second.stdin.flush()
    assert second.stdout.readline() == "left\n"
    assert native_session.producer_count(semaphore) == 1
    for child in (first, second, third):
        child.communicate(timeout=scaled_timeout_s(30))
    assert native_session.producer_count(semaphore) == 0, "leaving twice (by hand and by the kernel) counts once"


def test_a_count_that_is_gone_is_none_and_harmless(semaphore):
    sessions.remove_attach_count(semaphore)
    assert native_session.producer_count(semaphore) is None
    assert not native_session.count_producer(semaphore, 1)
    assert not native_session.count_producer(semaphore, -1)
    sessions.remove_attach_count(semaphore)
    assert native_session.producer_count(sessions.NO_ATTACH_COUNT) is None
