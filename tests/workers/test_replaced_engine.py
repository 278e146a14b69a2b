"""A producer of an earlier engine meets the next engine on the same store: no call of it touches what is the new one's."""

from __future__ import annotations

import os
import signal
import threading

import pyengine
from pyengine.formats.batch import BatchMember
from pyengine.ipc import session_server
from pyengine.ipc.session_client import _ask
from pyengine.ipc.shared_objects import find_folder
from pyengine.native import control as native
from pyengine.native.session import RING_BYTES_MIN
from waiting import eventually

LARGE = 100_000  # more than half of the smallest ring: goes through a side object
CALLS = {
    "put": lambda producer, body: producer.put("T", body),
    "put_async": lambda producer, body: producer.put_async("T", body).result(30),
    "put_many": lambda producer, body: producer.put_many("T", [body]),
    "put_many_async": lambda producer, body: producer.put_many_async("T", [body]).result(30),
    "put_batch": lambda producer, body: producer.put_batch("T", [body]),
    "put_raw": lambda producer, body: producer.put_raw("T", body),
    "put_batch_raw": lambda producer, body: producer.put_batch_raw("T", [BatchMember(body, 0, "")]),
    "put_prepared": lambda producer, body: producer.put_prepared("T", body),
}


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
        assert (new._session.slot, new._session.generation) == (old._session.slot, old._session.generation)
        old_call = old._native
        offset = engine.positions()["wrote"]
        results = {}

        def put(producer, word, call=call, size=size, results=results):
            results[word] = CALLS[call](producer, word * (size // len(word)))

        threads = [threading.Thread(target=put, args=(new, b"new")), threading.Thread(target=put, args=(old, b"old"))]
        writer = engine.kill("writer", signal.SIGSTOP)
        try:
            threads[0].start()
            eventually(lambda: new._native.sequence == 1, "the new producer's entry waits for the writer")
            threads[1].start()
            eventually(lambda: old._native is not old_call and old._native.sequence == 1, "the old producer put into the new engine")
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
    prepared = old.put_prepared("T", b"to be ended")
    session = old._session
    epoch, slot, generation = session.identity.epoch, session.slot, session.generation
    engine.stop()
    engine.start()
    with pyengine.connect(engine.root) as new, engine.memory() as memory:
        row = memory.control.sessions[slot]
        assert (new._session.slot, native.load(row, "generation")) == (slot, generation)
        with session_server.connect(find_folder(engine.root).path, 5.0) as channel:
            # As a close() that had looked at its session just before the engine was replaced.
            assert _ask(channel, {"want": "close", "slot": slot, "generation": generation, "epoch": epoch})[0] == {"closed": False}
            assert "error" in _ask(channel, {"want": "close", "slot": slot, "generation": generation})[0]
        assert new._session.is_open
        assert old.end_transaction(prepared.msg_id, "commit").ok
        old.close()
        assert new._session.is_open and new.put("T", b"goes on").ok
        assert native.load(row, "state") == native.SESSION_OPEN
