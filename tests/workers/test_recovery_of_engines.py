"""Recovery of a real engine's store after kill -9 of every process: what was acknowledged is there, and checked."""

from __future__ import annotations

import hashlib
import json
import signal

import pytest

import pyengine
from fix_owner import eventually
from pyengine.cli.recover import recover_alone
from pyengine.config import load_config
from pyengine.errors import ExitCode
from pyengine.ipc.shared_objects import find_folder
from pyengine.results import PutStatus
from pyengine.storage.check import check


def put_and_list(engine, path, count):
    """Acknowledged puts, and the list of them that `check --acked` reads."""
    with pyengine.connect(engine.root) as producer, open(path, "a") as acked:
        for number in range(count):
            body = b"%d " % number * (number % 50 + 1)
            result = producer.put(f"T{number % 3}", body, queue_id=number % 2, keys=f"k{number}")
            assert result.status is PutStatus.PUT_OK
            acked.write(json.dumps({
                "topic": f"T{number % 3}", "queue_id": number % 2, "queue_offset": result.queue_offset,
                "physical_offset": result.physical_offset, "body_sha256": hashlib.sha256(body).hexdigest()}) + "\n")


def recovered_and_checked(engine, acked, count):
    config = load_config(engine.root, {})
    report = recover_alone(engine.root, config)
    assert report.exit_code is ExitCode.OK, report.sentence
    found = check(engine.root, config.geometry, acked=acked)
    # A crash leaves the allocator's files whole, so nothing at all is to be found.
    assert [finding for finding in found.findings] == []
    assert (found.acked, found.acked_missing, found.messages, found.index_keys) == (count, 0, count, count)
    return report


@pytest.mark.parametrize("mode", ["async", "sync", "pool"])
def test_with_shared_memory_queues_and_index_stay_and_the_pool_is_drained(make_engine, tmp_path, mode):
    engine = make_engine(mode)
    engine.start()
    if mode == "pool":
        engine.kill("committer", signal.SIGSTOP)
    put_and_list(engine, tmp_path / "acked", 300)
    engine.kill_all()
    report = recovered_and_checked(engine, tmp_path / "acked", 300)
    assert report.shared_state == "used"
    assert (report.drained_bytes > 0) == (mode == "pool")
    assert report.index_files_removed == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_without_shared_memory_the_files_alone_are_enough(make_engine, tmp_path, mode):
    engine = make_engine(mode)
    engine.start()
    put_and_list(engine, tmp_path / "acked", 300)
    eventually(lambda: engine.positions()["reput_from"] == engine.positions()["wrote"], "all of it is in the index")
    engine.kill_all()
    find_folder(engine.root).sweep()
    report = recovered_and_checked(engine, tmp_path / "acked", 300)
    assert report.shared_state == "none"
    assert report.index_files_removed == 1
