"""A producer of an earlier engine meets the next engine on the same store: no call of it touches what is the new one's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import pyengine
from crash.board import Board
from fix_client import submitter
from pyengine.client.outgoing import RawMessage
from pyengine.formats.record import BatchMember
from pyengine.ipc import sessions
from pyengine.ipc.session_client import ask
from pyengine.ipc.shared_objects import find_folder
from pyengine.native import control as native
from pyengine.native.failpoints import VARIABLE
from pyengine.native.session import RING_BYTES_MIN
from pyengine.results import PutStatus
from waiting import eventually

HOUR_MS = 3_600_000  # a put that only such a timeout ends runs into the timeout of its test
LARGE = 100_000  # more than half of the smallest ring: goes through a side object
CALLS = {
    "put": lambda producer, body: producer.put("T", body),
    "put_async": lambda producer, body: producer.put_async("T", body).result(30),
    "put_many": lambda producer, body: producer.put_many("T", [body]),
    "put_many_async": lambda producer, body: producer.put_many_async("T", [body]).result(30),
    "put_batch": lambda producer, body: producer.put_batch("T", [body]),
    "put_raw": lambda producer, body: producer.put_raw(RawMessage("T", body)),
    "put_batch_raw": lambda producer, body: producer.put_batch_raw(RawMessage("T"), [BatchMember(body, 0, "")]),
}


def kill_all(engine, stopped: str) -> None:
    """SIGKILL to all, but first to the one that is stopped: when its supervisor ends, the kernel lets it go on."""
    engine.suspend("supervisor")
    engine.kill(stopped)
    engine.kill_all()


def bodies_from(engine, offset: int) -> list[bytes]:
    """Bodies of all records in the log from there on, prepared ones too."""
    with pyengine.open_store(engine.root) as store:
        rows = store.scan(columns=["physicalOffset", "body"], level="committed")
        return [body for batch in rows for at, body in zip(batch["physicalOffset"].to_pylist(), batch["body"].to_pylist())
                if at >= offset]


def test_puts_of_old_producers_leave_the_new_producers_puts_alone(make_engine):
    engine = make_engine(session_ring_bytes=RING_BYTES_MIN)
    engine.start()
    cases = [(call, size) for call in CALLS for size in (100, LARGE)]
    olds = [pyengine.connect(engine.root) for _ in cases]
    engine.stop()
    engine.start()
    news = [pyengine.connect(engine.root) for _ in cases]
    for (call, size), old, new in zip(cases, olds, news):
        session, before = submitter(new).session, submitter(old).session
        assert (session.slot, session.generation) == (before.slot, before.generation)
        old_call = submitter(old).native
        offset = engine.positions()["wrote"]
        results = {}

        def put(producer, word, call=call, size=size, results=results):
            results[word] = CALLS[call](producer, word * (size // len(word)))

        threads = [threading.Thread(target=put, args=(new, b"new")), threading.Thread(target=put, args=(old, b"old"))]
        writer = engine.suspend("writer")
        try:
            threads[0].start()
            eventually(lambda: submitter(new).native.sequence == 1, "the new producer's entry waits for the writer")
            threads[1].start()
            eventually(lambda: submitter(old).native is not old_call and submitter(old).native.sequence == 1,
                       "the old producer put into the new engine")
        finally:
            os.kill(writer, signal.SIGCONT)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        assert all(result.ok for result in results.values()), (call, size, results)
        eventually(lambda: engine.positions()["committed"] == engine.positions()["wrote"], "all is readable")
        assert sorted(body[:3] for body in bodies_from(engine, offset)) == [b"new", b"old"], (call, size)
    for producer in olds + news:
        producer.close()


def test_ending_and_closing_with_an_old_producer_leaves_the_new_producers_session_alone(make_engine):
    engine = make_engine()
    engine.start()
    old = pyengine.connect(engine.root)
    old.put("T", b"of the old engine")
    session = submitter(old).session
    epoch, slot, generation = session.identity.epoch, session.slot, session.generation
    engine.stop()
    engine.start()
    with pyengine.connect(engine.root) as new, engine.memory() as memory:
        row = memory.control.sessions[slot]
        assert (submitter(new).session.slot, native.load(row, "generation")) == (slot, generation)
        with sessions.connect_socket(find_folder(engine.root).path, 5.0) as channel:
            # As a close() that had looked at its session just before the engine was replaced.
            assert ask(channel, {"want": "close", "slot": slot, "generation": generation, "epoch": epoch})[0] == {"closed": False}
            assert "error" in ask(channel, {"want": "close", "slot": slot, "generation": generation})[0]
        assert submitter(new).session.is_open
        assert old.put("T", b"of the old producer").ok
        old.close()
        assert submitter(new).session.is_open and new.put("T", b"goes on").ok
        assert native.load(row, "state") == native.SESSION_OPEN


@pytest.mark.parametrize("mode", [pytest.param("async", marks=pytest.mark.ci), "sync"])
def test_puts_under_way_get_their_answer_when_the_engine_dies(make_engine, mode):
    engine = make_engine(mode, sync_flush_timeout_ms=HOUR_MS, put_timeout_ms=HOUR_MS)
    engine.start()
    names = ("writer", "flusher") if mode == "sync" else ("writer",)  # the stopped workers: no answers, or no syncs
    for name in names:
        with pyengine.connect(engine.root, refusals="return") as producer:
            assert producer.put("T", b"before").ok
            engine.suspend(name)
            futures = [producer.put_async("T", b"x") for _ in range(20)]
            results = []
            thread = threading.Thread(target=lambda: results.append(producer.put("T", b"waits")))
            thread.start()
            eventually(lambda: submitter(producer).native.sequence == 22, "all is submitted")
            if name == "flusher":  # else the writer, which is slow on a busy machine, is killed before it has answered
                eventually(lambda: submitter(producer).session.session.acked == 22, "all is stored")
            kill_all(engine, name)
            results += [future.result(60) for future in futures]
            thread.join(60)
            assert len(results) == 21
            for result in results:
                assert result.indeterminate, result
                assert ("no process of the engine" if name == "writer" else "engine died") in result.reason
            refused = producer.put("T", b"y")
            assert (refused.status, refused.indeterminate) == (PutStatus.SERVICE_NOT_AVAILABLE, False)
            assert "pyengine start" in refused.reason
            engine.start()
            assert producer.put("T", b"again").ok


def test_an_engine_that_was_killed_in_a_pass_is_dead_not_busy(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"before").ok
        engine.kill_all()
        with engine.memory(writable=True) as memory:
            long_ago_ms = time.time_ns() // 1_000_000 - 2 * memory.identity.os_page_cache_busy_timeout_ms
            native.store(memory.control.writer, "pass_started_ms", long_ago_ms)
        eventually(lambda: producer.put("T", b"x").status is not PutStatus.OS_PAGECACHE_BUSY, "it is looked at, some times a second")
        for answer in (producer.put("T", b"x"), producer.put_async("T", b"x").result(30), producer.put_many("T", [b"x"])):
            assert (answer.status, answer.indeterminate) == (PutStatus.SERVICE_NOT_AVAILABLE, False)
            assert "pyengine start" in answer.reason


def test_puts_under_way_do_not_wait_for_the_recovery_of_the_next_start(make_engine, tmp_path):
    board = Board(tmp_path / "board")
    engine = make_engine(put_timeout_ms=HOUR_MS)
    engine.start()
    with pyengine.connect(engine.root, refusals="return") as producer:
        assert producer.put("T", b"before").ok
        engine.suspend("writer")
        future = producer.put_async("T", b"x")
        kill_all(engine, "writer")
        board.arm("epoch_raised", action="stop", process="supervisor")
        child = subprocess.Popen([sys.executable, "-P", "-m", "pyengine.workers.supervisor", str(engine.root)],
                                 env={**os.environ, VARIABLE: str(board.path)}, stderr=subprocess.DEVNULL)
        try:
            eventually(lambda: board.struck_pid, "the next start is in its recovery")
            assert future.result(60).indeterminate
        finally:
            child.kill()
            child.wait()
