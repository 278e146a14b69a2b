"""RocketMQ's own Node client for RocketMQ 5, unchanged, on a store that serves gRPC."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from interop.judge import cache_folder
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from waiting import scaled_timeout_s

SOURCES = Path(__file__).parent / "node"

pytestmark = [pytest.mark.node, pytest.mark.ci]


@pytest.fixture(scope="module")
def program():
    """The program below the client's packages, which npm brings; skips without its registry."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()))).hexdigest()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / f"node-{digest[:16]}"
    with open(cache / "node.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "installed").exists():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(SOURCES, place)
            done = subprocess.run(["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=place, capture_output=True,
                                  text=True, timeout=scaled_timeout_s(200))
            if done.returncode != 0:
                pytest.skip(f"node: npm did not bring the client: {done.stderr[-1000:]}")
            (place / "installed").touch()
    return place / "grpc.js"


def test_all_types_of_messages_come_as_they_were_sent(program, tmp_path):
    from grpc_caller import start_grpc

    store = start_grpc(tmp_path / "store", transaction_timeout_ms=1000, transaction_check_interval_ms=1000)
    try:
        SubscriptionGroups(store.root).put(SubscriptionGroup("ordered", more={"consumeMessageOrderly": True}))
        told = subprocess.run(["node", program, str(store.grpc_port), store.make_topic("node5"), "ordered", str(scaled_timeout_s(100))],
                              capture_output=True, text=True, timeout=scaled_timeout_s(200), env=os.environ | {"HOME": str(tmp_path)})
    finally:
        store.close()
    assert told.returncode == 0, told.stdout + told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["sent"] == 100
    assert sorted(found["plain"]) == sorted([*([str(at), 1] for at in range(100)), ["7", 2], ["late", 1], ["committed", 1], ["orphan", 1]])
    assert found["ordered"] == ["0", "1", "2", "3", "3", "4", "5", "6", "7", "7", "8", "9"]
    assert sorted(found["found"]) == [[str(at), 2 if at == 55 else 1, ["k1", "k2"], "plain", str(at)] for at in range(50, 60)]
