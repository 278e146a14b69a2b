"""Engine(shared=True): processes share one engine, which lives from the first one's start to the last one's end, however that ends."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import weakref

import pytest

import pyengine
from fix_client import Refusing
from fix_engine import SMALL, stored
from fix_owner import CHECKOUT
from pyengine.engine import embedded
from pyengine.engine.embedded import end_supervisor, start_engine, stop_engine, supervisor_pid
from pyengine.errors import EngineError, EngineUnavailableError, StoreBusyError, UsageError
from pyengine.events import Event
from pyengine.ipc import store_lock
from pyengine.ipc.store_lock import SharingLock, living_kinds
from pyengine.native import control as native
from pyengine.storage.config import load_config
from waiting import eventually

# Answers a line for each of its commands.
USER = """
import os, signal, sys, pyengine
engine = pyengine.Engine(sys.argv[1], shared=True, **{settings!r}).start()
producer = engine.connect()
print(engine.pid, flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "put":
        answer = producer.put("T", rest[0].encode(), queue_id=0).queue_offset
    elif word == "fork":
        answer = os.fork()
        if not answer:
            os.close(0)
            with engine.connect() as own:
                own.put("T", b"of the child", queue_id=0)
            signal.pause()
    elif word == "stop":
        answer = engine.stop()
    elif word == "exit":
        break
    elif word == "exec":
        os.execvp("sleep", ["sleep", "600"])
    print(answer, flush=True)
"""


class User:
    """A process that shares the engine, and does what it is told."""

    def __init__(self, root, **settings):
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER.format(settings={**SMALL, **settings}), str(root)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(CHECKOUT)})

    @functools.cached_property
    def engine_pid(self):
        """The supervisor's pid, once this process uses the engine."""
        return int(self.process.stdout.readline() or self.process.communicate()[1])

    def do(self, command):
        assert self.engine_pid
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self, how):
        if how == "kill":
            self.kill()
        elif how == "stop":
            assert self.do("stop") == "None"
        else:
            self.process.stdin.write(how + "\n")
            self.process.stdin.flush()


@pytest.fixture
def engine(make_engine):
    """A store of the test, not started; swept at the end."""
    return make_engine()


@pytest.fixture
def root(engine, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_INTERVAL_S", 0.1)
    return engine.root


@pytest.fixture
def make_user(root):
    """make_user(**settings) -> a User of the store."""
    users = []

    def make(**settings):
        users.append(User(root, **settings))
        return users[-1]

    yield make
    for user in users:
        user.process.kill()
        user.process.communicate()


def wait_stopped(root):
    eventually(lambda: living_kinds(root) == [], "the engine has stopped")
    assert not (root / "abort").exists()


def is_put(producer):
    """A put that finds out that the engine has died raises; the next one opens a session with the new engine."""
    try:
        return producer.put("T", b"", queue_id=1).ok
    except pyengine.PutError:
        return False


def share(root, **settings):
    return pyengine.Engine(root, shared=True, **{**SMALL, **settings})


def test_the_first_starts_the_others_connect_and_the_last_one_out_stops_it(root):
    first, second = share(root).start(), share(root).start()
    assert first.state == second.state == "running" and first.pid == second.pid == supervisor_pid(root)
    with pytest.raises(UsageError, match="already"):
        first.start()
    with first.connect() as producer:
        producer.put("T", b"one")
    first.stop()
    assert (first.state, first.pid, second.state) == ("stopped", None, "running")
    with second.connect() as producer:
        producer.put("T", b"two")
    second.stop()
    assert living_kinds(root) == [] and not (root / "abort").exists()
    second.stop()
    with first:
        assert first.state == "running"
    assert living_kinds(root) == []


@pytest.mark.parametrize("end", ["kill", pytest.param("exec", marks=pytest.mark.ci),
                                 *(pytest.param(end, marks=pytest.mark.long) for end in ("exit", "stop"))])
def test_the_engine_outlives_the_process_that_started_it_and_ends_with_the_last(engine, root, make_user, end):
    starter = make_user()
    pid = starter.engine_pid
    others = [make_user(), make_user()]
    assert [user.engine_pid for user in others] == [pid, pid]
    starter.kill()
    assert others[0].do("put one") == "0" and supervisor_pid(root) == pid
    others[0].end(end)
    assert others[1].do("put two") == "1" and supervisor_pid(root) == pid
    others[1].end(end)
    wait_stopped(root)
    assert stored(engine) == [b"one", b"two"]
    assert Event.ENGINE_UNUSED.name in engine.log()


def test_processes_that_come_at_the_same_time_start_one_engine(engine, root, make_user):
    users = [make_user() for _ in range(6)]
    assert len({user.engine_pid for user in users}) == 1
    assert sorted(int(user.do(f"put {number}")) for number, user in enumerate(users)) == list(range(6))
    assert engine.log().count(Event.ENGINE_RECOVERED.name) == 1
    for user in users:
        user.kill()
    wait_stopped(root)


def test_one_that_leaves_others_does_not_take_their_stop_for_its_own(root, monkeypatch):
    """The others leave just after the look that has found them, and their engine has not stopped yet."""
    first, second = share(root).start(), share(root).start()
    has_users, leaving = SharingLock.has_users.fget, threading.Thread(target=second.stop)
    looker = threading.get_ident()

    def look(lock):
        found = has_users(lock)
        if found and threading.get_ident() == looker and leaving.ident is None:
            os.kill(supervisor_pid(root), signal.SIGSTOP)
            leaving.start()
            eventually(lambda: not has_users(lock), "the other one has left")
        return found

    monkeypatch.setattr(SharingLock, "has_users", property(look))
    pid = first.pid
    try:
        first.stop()
    finally:
        os.kill(pid, signal.SIGCONT)
        leaving.join()
    wait_stopped(root)


def test_last_ones_out_and_next_ones_in_lose_nothing(engine, root, rng):
    """Each round some leave while others come, so that engines stop and start under their users' hands."""
    puts, failed = [0] * 4, []

    def work(number, seed):
        chance = random.Random(seed)
        try:
            for _ in range(8):
                with share(root) as shared, shared.connect(timeout_s=60) as producer:
                    for _ in range(chance.randrange(3)):
                        producer.put("T", b"%d" % number, queue_id=0)
                        puts[number] += 1
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number, rng.random())) for number in range(len(puts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert living_kinds(root) == [] and not (root / "abort").exists()
    assert len(stored(engine)) == sum(puts)


def test_a_starter_that_is_killed_while_the_engine_starts_leaves_it_to_the_next(root, make_user):
    make_user().kill()
    with share(root) as shared:
        assert shared.state == "running"
    wait_stopped(root)


@pytest.mark.parametrize("kills", [1, embedded.STARTS_MAX])
def test_a_supervisor_that_is_killed_while_it_starts_is_started_again(root, monkeypatch, kills):
    spawn, killed = embedded.spawn_supervisor, []

    def spawn_and_kill(*arguments, **options):
        process, reading = spawn(*arguments, **options)
        if len(killed) < kills:
            process.kill()
            killed.append(process.pid)
        return process, reading

    monkeypatch.setattr(embedded, "spawn_supervisor", spawn_and_kill)
    engine = share(root)
    if kills == embedded.STARTS_MAX:
        with pytest.raises(EngineError, match="killed while it started"):
            engine.start()
        del killed[1:]  # of the next start too, but not so often
        kills -= 1
    with engine as shared:
        assert shared.state == "running"
    wait_stopped(root)


def test_settings_that_differ_are_refused_by_name(root):
    with share(root, flush_disk_type="ASYNC_FLUSH") as first:
        with pytest.raises(StoreBusyError, match=r"flush_disk_type = SYNC_FLUSH .* is asked for, ASYNC_FLUSH runs.*engine\.toml"):
            share(root, flush_disk_type="SYNC_FLUSH").start()
        with pyengine.Engine(root, shared=True) as second:  # asks for none
            assert second.pid == first.pid
        with pytest.raises(StoreBusyError, match="shared=True"):
            pyengine.Engine(root, **SMALL).start()
    assert living_kinds(root) == []


def test_forked_children_share_the_engine_that_their_parent_started(engine, root, make_user):
    """As in gunicorn with preload_app: the parent may be killed, and its workers go on."""
    parent = make_user()
    child = int(parent.do("fork"))
    eventually(lambda: stored(engine) == [b"of the child"], "the child's message")
    parent.kill()
    assert os.path.exists(f"/proc/{child}") and supervisor_pid(root) == parent.engine_pid
    with pyengine.connect(root) as producer:
        producer.put("T", b"x")
    os.kill(child, signal.SIGKILL)
    wait_stopped(root)


def test_a_forked_child_that_leaves_stops_nothing(root):
    with share(root) as shared:
        child = os.fork()
        if child == 0:
            try:
                shared.stop()
                os._exit(0 if shared.state == "stopped" else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert shared.state == "running"
    assert living_kinds(root) == []


@pytest.mark.parametrize("how", [pytest.param("supervisor", marks=pytest.mark.ci), "all"])
def test_a_crashed_engine_comes_back_and_still_ends_with_the_last_one(engine, root, how):
    with share(root) as shared, shared.connect() as producer:
        producer.put("T", b"before", queue_id=0)
        pid = engine.kill("supervisor") if how == "supervisor" else shared.pid
        if how == "all":
            engine.kill_all()
        eventually(lambda: shared.pid not in (None, pid) and shared.state == "running", "the engine is back")
        eventually(lambda: is_put(producer), "the producer uses the new engine")
        producer.put("T", b"after", queue_id=0)
    assert living_kinds(root) == [] and not (root / "abort").exists()
    assert stored(engine) == [b"before", b"after"]


def test_a_last_one_that_leaves_an_engine_without_supervisor_stops_it(engine, root):
    shared = share(root).start()
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(root), "the supervisor is dead")
    shared.stop()
    assert living_kinds(root) == [] and not (root / "abort").exists()


def test_a_program_that_can_start_no_supervisor_leaves_an_engine_without_one_all_the_same(engine, root, monkeypatch):
    shared = share(root).start()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(root), "the supervisor is dead")
    with pytest.raises(UsageError, match="cannot start an engine"):
        shared.stop()
    shared.stop()
    assert shared.state == "stopped" and not SharingLock(root).has_users
    monkeypatch.delattr(sys, "frozen")
    assert stop_engine(root) is True


def test_an_engine_that_cannot_come_back_says_why(engine, root):
    shared = share(root).start()
    engine.kill_all()
    (root / "config" / "engine.toml").write_text("no_such_setting = 1\n")
    assert eventually(lambda: shared.reason, "the reason").startswith("unknown setting 'no_such_setting'")
    with pytest.raises(EngineError, match="did not stop in order"):
        shared.stop()
    (root / "config" / "engine.toml").unlink()
    with shared:
        assert (shared.state, shared.reason) == ("running", "")


def test_pyengine_stop_stops_it_for_all_and_only_the_next_start_starts_it(root, monkeypatch):
    looks = []
    monkeypatch.setattr(embedded, "living_kinds", lambda *of: looks.append(of) or living_kinds(*of))
    with share(root) as first:
        assert stop_engine(root)
        looks.clear()
        eventually(lambda: len(looks) > 20, "the process looks after the engine")
        assert (first.state, first.pid, first.reason) == ("stopped", None, "")
        with share(root) as second:
            assert (first.state, second.state) == ("running", "running")
        assert first.state == "running"
    assert living_kinds(root) == [] and not (root / "abort").exists()


def test_an_engine_of_pyengine_start_is_used_and_not_stopped(root):
    start_engine(root, SMALL)
    with share(root) as shared, shared.connect() as producer:
        producer.put("T", b"one")
    assert supervisor_pid(root)
    with share(root):
        assert stop_engine(root)
    assert living_kinds(root) == []


def test_an_engine_that_pyengine_start_takes_over_is_not_stopped(root, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_INTERVAL_S", 3600.0)  # it does not start one first
    with share(root) as shared, shared.connect() as producer:
        end_supervisor(root, load_config(root, {}))
        assert start_engine(root, SMALL)["adopted"]
        producer.put("T", b"one")
    assert supervisor_pid(root)


def test_an_engine_of_another_container_is_not_waited_for(root, monkeypatch):
    """Its lock is seen here, its process and its shared memory are not."""
    with share(root):
        pass
    monkeypatch.setattr(embedded, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(embedded, "kind_holder", lambda *of: None)
    monkeypatch.setattr(store_lock, "kind_holder", lambda *of: None)
    with store_lock.StoreLock(root) as theirs:
        theirs.take_kind(native.SUPERVISOR)
        with pytest.raises(EngineUnavailableError, match="another container"):
            share(root).start()
    assert not SharingLock(root).has_users


def test_a_store_that_was_moved_is_not_made_anew(root, make_engine):
    shared = share(root).start()
    moved = make_engine(name="moved").root
    root.rename(moved)
    eventually(lambda: living_kinds(moved) == [], "the engine has ended")
    assert shared.state == "stopped"
    with pytest.raises(EngineError, match=f"{moved}"):
        shared.stop()
    assert not root.exists()


def test_a_removed_file_of_locks_costs_no_process_its_engine(root):
    first = share(root).start()
    (root / "config" / "sharing.lock").unlink()
    second = share(root).start()
    first.stop()
    eventually(lambda: SharingLock(root).is_watched, "the supervisor watches the new file")
    assert second.state == "running"
    second.stop()
    wait_stopped(root)


def test_an_engine_goes_on_for_a_kept_producer_and_otherwise_until_this_process_starts_or_stops_another(root):
    """As in a program that keeps only its producer, and in a cell of a notebook that runs again."""
    producer = share(root).start().connect()
    gc.collect()
    with share(root) as engine:
        assert engine.connect().put("T", b"one").ok
    assert producer.put("T", b"two").ok and living_kinds(root)
    kept: list[tuple[int, int]] = []
    for _ in range(4):
        engine = share(root).start()
        producer = engine.connect()
        kept.append((len(os.listdir("/proc/self/fd")), [thread.name for thread in threading.enumerate()].count("pyengine-sharing")))
    assert kept[1] == kept[2] == kept[3]
    producer.close()
    engine.stop()
    assert living_kinds(root) == [] and not (root / "abort").exists()


def test_an_engine_that_has_its_producer_is_dropped_with_it(root):
    engine = share(root).start()
    engine.producer = engine.connect()
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    share(root).start().stop()
    assert living_kinds(root) == []


def test_a_dropped_engine_is_left_by_one_of_another_path_too(root, tmp_path):
    share(root).start()
    link = tmp_path / "link"
    link.symlink_to(root)
    share(link).start().stop()
    assert living_kinds(root) == []


@pytest.mark.parametrize("shared", [False, True])
def test_a_stop_that_cannot_write_its_log_tells_the_reason_and_no_line_of_before(root, engine, shared):
    started = pyengine.Engine(root, shared=shared, **SMALL).start()
    engine.fail("the flusher could not make a segment durable")
    with pytest.raises(EngineError, match="in order.*: the flusher could not make a segment durable; the next start recovers it"):
        started.stop()
    assert engine.log()


def test_no_other_user_can_keep_the_engine_running(root):
    with share(root):
        assert stat.S_IMODE((root / "config" / "sharing.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("shared", [True, False])
def test_async_with_starts_and_stops_it_also_if_no_thread_of_the_loop_is_free(root, shared):
    async def run():
        asyncio.get_running_loop().set_default_executor(Refusing())
        async with pyengine.Engine(root, shared=shared, **SMALL) as engine:
            async with engine.connect() as producer:
                assert (await producer.put_async("T", b"one")).ok
            assert engine.state == "running"

    asyncio.run(run())
    assert living_kinds(root) == [] and not (root / "abort").exists()


@pytest.mark.parametrize("shared", [True, False])
def test_a_start_that_is_cancelled_leaves_no_engine(root, shared):
    async def run():
        engine = pyengine.Engine(root, shared=shared, **SMALL)
        entering = asyncio.create_task(engine.__aenter__())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(run())  # waits for the thread
    assert living_kinds(root) == [] and not (root / "abort").exists()
