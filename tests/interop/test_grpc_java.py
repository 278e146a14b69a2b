"""RocketMQ's own Java client for RocketMQ 5, unchanged, on a store that serves gRPC."""

from __future__ import annotations

import subprocess

import pytest

import needs
from fix_judge import available
from interop.clients import FLAGS, class_path_5
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]


@pytest.fixture(scope="module")
def grpc_store(tmp_path_factory):
    """A GrpcStore that asks soon about transactions without an end."""
    from grpc_caller import start_grpc

    store = start_grpc(tmp_path_factory.mktemp("grpc") / "store", transaction_timeout_ms=1000, transaction_check_interval_ms=1000)
    yield store
    store.close()


@pytest.mark.ci
def test_all_types_of_messages_come_as_they_were_sent(grpc_store, tmp_path):
    topic, ordered = grpc_store.make_topic("java5"), "ordered_java5"
    SubscriptionGroups(grpc_store.root).put(SubscriptionGroup(ordered, more={"consumeMessageOrderly": True}))
    with available():
        class_path = class_path_5()
    told = subprocess.run([needs.java_command(), *FLAGS, f"-Duser.home={tmp_path}", "-cp",
                           class_path, "clients5.Grpc",
                           str(grpc_store.grpc_port), topic, ordered], capture_output=True, text=True, timeout=scaled_timeout_s(250),
                          cwd=tmp_path)
    assert told.returncode == 0, told.stdout + told.stderr
    in_order = ",".join(map(str, range(30)))
    assert told.stdout.splitlines()[-2:] == [f"pushed {{1=103, 2=1}} ordered {in_order}", "simple 50"]
