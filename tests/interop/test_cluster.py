"""Our gateways as brokers of a real cluster: RocketMQ's name server and broker, its client and tools, unchanged."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

import pytest

import needs
from crash.replicas import free_port
from fix_cli import run
from fix_gateway import start_served
from fix_judge import available
from fix_slave import secret_file
from interop.clients import Clients
from interop.real_broker import RealBroker
from waiting import eventually

pytestmark = [pytest.mark.java, pytest.mark.maven, pytest.mark.ci, pytest.mark.timeout(300)]


@pytest.fixture
def real(tmp_path):
    """A name server and its broker-a, and clients of that name server."""
    java = needs.java_command()
    with available():
        broker = RealBroker(java, tmp_path / "a", tmp_path / "real", free_port(), free_port(), mappedFileSizeCommitLog=1 << 20)
        broker.start()
        try:
            with Clients(java, broker.name_server, tmp_path) as clients:
                yield broker, clients
        finally:
            broker.kill()


def admin(clients, *words) -> str:
    return clients.ask("admin", arguments=list(words))


def route(clients, topic: str = "Both") -> dict[str, str]:
    """The addresses of each broker in a topic's route, as text, by name."""
    told = "".join(admin(clients, "topicRoute", "-t", topic).split())
    return {name: addresses for addresses, name in re.findall(r'"brokerAddrs":\{(.*?)\},"brokerName":"(.*?)"', told)}


def test_messages_spread_over_both_and_a_slave_serves_and_follows_its_dead_master(real, tmp_path):
    broker, clients = real
    ours = {"namesrvAddr": broker.name_server, "brokerName": "broker-b", "ha_secret_file": secret_file(tmp_path)}
    with contextlib.ExitStack() as stack:
        port = free_port()
        master = start_served(tmp_path / "b", **ours, ha_listen_port=port)
        stack.callback(master.close)
        slave = start_served(tmp_path / "s", **ours, broker_role="SLAVE", ha_master_address=f"127.0.0.1:{port}")
        stack.callback(slave.close)
        listed = eventually(lambda: (told := admin(clients, "clusterList")).count("broker-b") == 2 and told, "both are in the cluster", 60)
        assert str(master.ports[1]) in listed and str(slave.ports[1]) in listed and broker.address in listed
        admin(clients, "updateTopic", "-c", "DefaultCluster", "-t", "Both", "-r", "4", "-w", "4")
        eventually(lambda: route(clients).keys() == {"broker-a", "broker-b"}, "both have the topic")
        bodies = [f"m{number}" for number in range(80)]
        sent = clients.ask("send", group="senders", how="sync", topic="Both", tags="t", bodies=bodies)
        assert {row["status"] for row in sent} == {"SEND_OK"}
        clients.ask("subscribe", name="all", group="readers", topic="Both")
        found = clients.ask("take", name="all", count=80, timeout_s=60)
        assert Counter(row["body"] for row in found) == Counter(bodies)
        assert admin(clients, "topicStatus", "-t", "Both").count("broker-b") == 4
        eventually(lambda: "Diff Total: 0" in admin(clients, "consumerProgress", "-g", "readers"), "all offsets are committed", 60)

        master.engine.kill_all()
        assert eventually(lambda: "0:" not in (left := route(clients)["broker-b"]) and left, "the dead master is out") == (
            f'1:"127.0.0.1:{slave.ports[1]}"')
        clients.ask("subscribe", name="late", group="late_readers", topic="Both")
        found = clients.ask("take", name="late", count=80, timeout_s=90)
        assert Counter(row["body"] for row in found) == Counter(bodies), "half of them from the slave"

        assert "is a master now" in run("promote", slave.root, "--set", f"ha_listen_port={port}").stdout
        eventually(lambda: route(clients).get("broker-b", "").startswith("0:"), "it is the master in the routes", 60)
        again = clients.ask("send", group="others", how="sync", topic="Both", tags="t", bodies=bodies)
        assert {row["status"] for row in again} == {"SEND_OK"}
        slave.engine.stop()
        assert route(clients).keys() == {"broker-a"}
