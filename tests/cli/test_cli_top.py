"""`pyengine top`: what lies between two samples, and the three ways of showing it: a terminal, lines, JSON."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

import pyengine
from fix_cli import command_line, environment, run
from fix_owner import add_sync
from pyengine.cli.engine_status import live_status
from pyengine.cli.status import Sample, between, samples
from pyengine.errors import DiskError
from pyengine.native import control as native
from pyengine.native import store_stats
from waiting import scaled_timeout_s

ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def owner(make_owner):
    """A store that this test's process owns as a supervisor does, its log ending at 4096."""
    owner = make_owner()
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    owner.position(4096)
    owner.publish()
    return owner


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_and_percentiles_are_those_between_two_samples(owner):
    clock = Clock()
    found = samples(owner.root, {}, clock)
    stats = owner.memory.counters
    topics = owner.memory.open_topic_stats()
    add_sync(stats, 900_000_000)  # before the first look: not in the percentiles
    slot = topics.slot[0]
    slot.topic, slot.topic_bytes, slot.messages, slot.bytes = b"orders", 6, 100, 1000
    first = next(found)
    assert (first.rates_per_s, first.latencies_ms, first.topic_rates_per_s) == ({}, {}, {})
    clock.now_s += 2
    native.store_position(owner.control.wrote, 8096)
    add_sync(stats, 3_000_000)
    stats.dispatch.messages = 50
    slot.messages, slot.bytes = 150, 6000
    second = next(found)
    assert second.rates_per_s["wrote"] == 2000 and second.rates_per_s["committed"] == 0
    assert second.rates_per_s["dispatched"] == 25
    assert second.topic_rates_per_s == {"orders": {"messages": 25, "bytes": 2500}}
    assert second.latencies_ms["sync"]["p99"] == pytest.approx(3, rel=1 / 16)
    assert second.latencies_ms["put"] == {"p50": None, "p99": None, "p99.9": None}
    assert store_stats.topic_counts(topics)["orders"].messages == 150


def test_there_are_no_rates_across_a_restart(owner):
    document, figures = live_status(owner.root)
    now = Sample(12.0, document | {"epoch": document["epoch"] + 1}, figures)
    assert between(Sample(10.0, document, figures), now) == now
    assert between(None, now) == now


def test_a_disk_that_does_not_answer_for_a_moment_ends_no_scrape(owner, monkeypatch):
    def fails(root):
        raise DiskError("cannot open lock: Input/output error")

    assert live_status(owner.root) is not None
    monkeypatch.setattr("pyengine.cli.engine_status.living_kinds", fails)
    assert live_status(owner.root) is None


def test_the_files_of_a_stopped_store_are_read_once(owner, monkeypatch):
    from pyengine.cli import status

    owner.memory.retire()
    owner.lock.close()
    reads = []
    monkeypatch.setattr(status, "engine_status",
                        lambda root, settings: reads.append(root) or {"state": "stopped", "positions": {}, "workers": []})
    found = samples(owner.root, {})
    for _ in range(3):
        assert next(found).document["state"] == "stopped"
    assert len(reads) == 1


def test_json_is_a_document_a_line(owner):
    ran = run("top", owner.root, "--count", 2, "--interval", 0.05, "--json")
    first, second = [json.loads(line) for line in ran.stdout.splitlines()]
    assert first["rates_per_s"] == {} and second["rates_per_s"]["wrote"] == 0
    assert second["between_samples"]["put"]["p50"] is None and second["statistics"]["put_message_times_total"] == 0


def test_without_a_terminal_looks_follow_each_other(owner):
    ran = run("top", owner.root, "--count", 2, "--interval", 0.05)
    assert ran.code == 0 and "\x1b" not in ran.stdout
    for word in ("supervisor", "reput_from", "put time", "to be durable"):
        assert ran.stdout.count(word) == 2, word


def test_a_stopped_store_is_shown_too(owner):
    owner.memory.retire()
    owner.lock.close()
    ran = run("top", owner.root, "--count", 1)
    assert ran.code == 0 and "stopped" in ran.stdout


# ---- on a terminal -----------------------------------------------------------


class Terminal:
    """`pyengine top` on a terminal of 40 lines and 120 columns."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.child = subprocess.Popen(command_line("top", *arguments), stdin=slave, stdout=slave, stderr=slave,
                                      env=environment(TERM="xterm-256color"), start_new_session=True)
        os.close(slave)
        self.text = ""

    def read_until(self, done) -> str:
        """Return what was drawn, once `done` says it is enough."""
        deadline_s = time.monotonic() + scaled_timeout_s(60)
        while not done():
            assert time.monotonic() < deadline_s, self.text
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    break
        return self.text

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    made = []

    def make(*arguments: object) -> Terminal:
        made.append(Terminal(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_on_a_terminal_it_has_a_screen_of_its_own_and_gives_it_back(make_engine, terminal):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for _ in range(10):
            assert producer.put("orders", b"x").ok
    engine.wait_noted()  # topics are counted where they are dispatched
    shown = terminal(engine.root, "--interval", "0.05", "--count", "3")
    text = shown.read_until(lambda: LEAVE_SCREEN in shown.text)
    assert shown.child.wait(30) == 0
    assert text.index(ENTER_SCREEN) < text.index("running") < text.index(LEAVE_SCREEN)
    for word in ("puts/s", "reputter", "flushed", "orders"):
        assert word in text, word


def test_ctrl_c_ends_it_and_gives_the_screen_back(owner, terminal):
    shown = terminal(owner.root, "--interval", "0.05")
    shown.read_until(lambda: "reput_from" in shown.text)
    shown.child.send_signal(signal.SIGINT)
    shown.read_until(lambda: LEAVE_SCREEN in shown.text)
    assert shown.child.wait(30) == 130
