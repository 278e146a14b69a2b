"""A storm of SIGKILLs over a whole engine: what was acknowledged is there, once, in order; the store is whole.

Several producers, each a process of its own with its own queue, put numbered messages and
note each acknowledgement in a file with one write. Meanwhile workers are killed one by
one, the supervisor is killed and succeeded, and everything is killed and recovered.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

import pyengine
from fix_engine import EACH_MODE, WORKERS
from fix_owner import CHECKOUT
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.check.check import check
from pyengine.storage.config import load_config
from pyengine.storage.message_store import MessageStore
from waiting import eventually

PRODUCERS = 3

# argv: STORE QUEUE_ID ACKED_FILE. Numbers that were not acknowledged are never put again.
PRODUCER = """
import hashlib, json, os, sys, time
import pyengine
from pyengine.errors import EngineError
root, queue_id, acked = sys.argv[1], int(sys.argv[2]), os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
number = 0
while True:
    try:
        with pyengine.connect(root, timeout_s=60) as producer:
            while True:
                body = b"%d:%08d" % (queue_id, number) + b"x" * (number * 37 % 900)
                number += 1
                result = producer.put("T", body, queue_id=queue_id, keys=str(number), timeout_s=30)
                if result.ok:
                    os.write(acked, json.dumps({
                        "topic": "T", "queue_id": queue_id, "queue_offset": result.queue_offset,
                        "physical_offset": result.physical_offset,
                        "body_sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\\n")
    except EngineError:
        time.sleep(0.01)
"""


def start_producers(engine, folder):
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    return [subprocess.Popen([sys.executable, "-c", PRODUCER, str(engine.root), str(queue_id), str(folder / f"acked-{queue_id}")],
                             env=environment) for queue_id in range(PRODUCERS)]


def acked_lines(folder, queue_id):
    """The whole lines so far: a write may be seen half, or be cut short by the end of the producer."""
    path = folder / f"acked-{queue_id}"
    content = path.read_bytes() if path.exists() else b""
    return content[:content.rfind(b"\n") + 1]


def count_acked(folder):
    return [acked_lines(folder, queue_id).count(b"\n") for queue_id in range(PRODUCERS)]


def wait_for_more(folder, before, more=10):
    eventually(lambda: all(now >= then + more for now, then in zip(count_acked(folder), before)),
               "every producer goes on", timeout_s=90)


def strike(engine, mode, rng):
    """Kill something; what it was."""
    what = rng.choice([*sorted(WORKERS[mode]), "two workers", "supervisor", "everything"])
    if what == "everything":
        engine.kill_all()
        engine.start()
    elif what == "supervisor":
        engine.kill("supervisor")
        eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "the supervisor is gone")
        engine.start()
    else:
        kinds = rng.sample(sorted(WORKERS[mode]), 2) if what == "two workers" else [what]
        before = {kind: engine.incarnation(kind) for kind in kinds}
        for kind in kinds:
            engine.kill(kind)
        for kind in kinds:
            engine.wait_back(kind, before[kind])
    return what


@pytest.mark.parametrize("mode", EACH_MODE)
@pytest.mark.parametrize("rounds", [5, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_acknowledged_messages_are_not_lost_doubled_or_reordered(make_engine, tmp_path, rng, mode, rounds):
    engine = make_engine(mode)
    engine.start()
    producers = start_producers(engine, tmp_path)
    try:
        wait_for_more(tmp_path, [0] * PRODUCERS)
        for _ in range(rounds):
            before = count_acked(tmp_path)
            print(strike(engine, mode, rng))
            wait_for_more(tmp_path, before)
        for producer in producers:
            producer.send_signal(signal.SIGKILL)
            producer.wait()
        engine.stop()
    finally:
        for producer in producers:
            producer.kill()
            producer.wait()
    together = tmp_path / "acked.jsonl"
    together.write_bytes(b"".join(acked_lines(tmp_path, queue_id) for queue_id in range(PRODUCERS)))
    report = check(MessageStore(engine.root, load_config(engine.root).geometry), acked=together)
    assert report.exit_code == 0, report
    for queue_id in range(PRODUCERS):
        told = [json.loads(line)["queue_offset"] for line in acked_lines(tmp_path, queue_id).splitlines()]
        with pyengine.open_store(engine.root) as store:
            numbers = []
            while messages := store.get_message("T", queue_id, len(numbers), level="committed").messages:
                numbers += [int(message.body.split(b"x")[0].split(b":")[1]) for message in messages]
        assert numbers == sorted(set(numbers)), "in order, none twice"
        assert len(numbers) >= len(told) and told == sorted(set(told))
