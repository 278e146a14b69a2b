"""RocketMQ's own Node client for RocketMQ 5, unchanged, on a store that serves gRPC."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from interop.clients import node_programs
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.node, pytest.mark.ci]


def test_all_types_of_messages_come_as_they_were_sent(tmp_path):
    from grpc_caller import start_grpc

    program = node_programs() / "grpc.js"
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
