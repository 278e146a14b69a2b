"""A broker's store under this engine: ready after its tail, read whole in the background, vouched for as far as that goes."""

from __future__ import annotations

import pytest

import pyengine
from crash.board import Board
from damage import flip
from fix_cli import run
from fix_engine import RunningEngine
from fix_golden import usual
from pyengine.ipc.control_block import now_ms
from pyengine.native.failpoints import VARIABLE
from pyengine.storage.checkpoint import read_watermark
from waiting import eventually

STORE_TIME_AT = 56  # in a record, with born hosts of IPv4


@pytest.fixture
def adopted(golden):
    """adopted(name) -> an engine on a golden store, not started; swept at the end."""
    engines: list[RunningEngine] = []

    def make(name: str) -> RunningEngine:
        engines.append(RunningEngine(golden(name).root, {}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.sweep()


def status(engine) -> dict:
    ran = run("status", engine.root, "--json")
    assert ran.code == 0, ran
    return ran.document


def put(engine, body: bytes) -> None:
    with pyengine.connect(engine.root) as producer:
        assert producer.put("after", body).status == pyengine.PutStatus.PUT_OK


def test_an_adopted_whole_store_is_read_and_covered_while_puts_continue(adopted):
    """The broker's clock was set back, so a segment may have later messages than the next one."""
    engine = adopted("roll")
    first = min((engine.root / "commitlog").iterdir())
    with open(first, "r+b") as log:
        log.seek(STORE_TIME_AT)
        log.write((later_ms := now_ms() + 3_600_000).to_bytes(8, "big"))

    def found():
        with pyengine.open_store(engine.root) as store:
            return sum(batch.num_rows for batch in store.scan(columns=["size"], since=later_ms))

    assert engine.start()["state"] == "running"
    put(engine, b"new")
    eventually(lambda: (status(engine)["verified"] or {}).get("whole"), "all of it is read")
    assert status(engine)["reason"] == ""
    engine.stop()
    mark = read_watermark(engine.root).watermark
    assert mark.verified_from == 0 and mark.flushed == status(engine)["positions"]["wrote"]
    assert run("check", engine.root).code == 0
    assert mark.ordered_from and found() == 1


@pytest.mark.parametrize("end", usual(["stop", "kill"], ["kill"], pytest.mark.ci))
def test_a_bit_wrong_before_adoption_is_reported_and_later_starts_work(adopted, end):
    """The watermark vouched for all of it at once: the start after the next was degraded."""
    engine = adopted("roll")
    segments = sorted((engine.root / "commitlog").iterdir())
    flip(segments[1], 100)
    engine.start()
    put(engine, b"one")
    eventually(lambda: "damaged at" in status(engine)["reason"], "the damage is found")
    eventually(lambda: status(engine)["verified"]["from"] == int(segments[2].name), "the watermark covers what was read")
    assert not status(engine)["verified"]["whole"]
    assert "was there before this engine" in run("status", engine.root).stdout
    engine.wait_noted()
    engine.stop() if end == "stop" else engine.kill_all()
    if end == "stop":
        assert status(engine)["verified"]["from"] == int(segments[2].name)
    again = engine.start()
    assert again["state"] == "running"
    put(engine, b"two")
    eventually(lambda: "damaged at" in status(engine)["reason"], "it is told again")
    with pyengine.open_store(engine.root) as store:
        eventually(lambda: store.queue_range("after", 0) == (0, 2), "both are in their queue")
    engine.stop()
    flip(segments[1], 100)  # the segment is restored from a copy
    engine.start()
    eventually(lambda: (status(engine)["verified"] or {}).get("whole"), "all of it is read")
    engine.stop()
    assert run("check", engine.root).code == 0


def test_damage_that_comes_after_a_part_was_read_is_refused(adopted):
    engine = adopted("roll")
    segments = sorted((engine.root / "commitlog").iterdir())
    flip(segments[1], 100)
    engine.start()
    eventually(lambda: "damaged at" in status(engine)["reason"], "the rest is read")
    engine.stop()
    flip(segments[-1], 100)
    assert run("recover", engine.root).code == 3


def test_a_checkpointer_that_dies_between_a_segment_and_the_watermark_reads_it_again(adopted, tmp_path, monkeypatch):
    engine = adopted("roll")
    board = Board(tmp_path / "failpoint")
    board.arm("adopted_segment_read", 2)
    monkeypatch.setenv(VARIABLE, str(board.path))
    engine.start()
    engine.wait_back("checkpointer", 1)
    eventually(lambda: (status(engine)["verified"] or {}).get("whole"), "all of it is read")
    engine.stop()
    assert run("check", engine.root).code == 0
