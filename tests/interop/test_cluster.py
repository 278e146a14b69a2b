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
from pyengine.storage.config_table import SubscriptionGroups, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
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
        slave = start_served(tmp_path / "s", **ours, broker_role="SLAVE")  # it learns its master from the real name server
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


def test_a_real_broker_registers_with_our_name_server_and_our_slave_takes_its_place(tmp_path):
    java, port, broker_port = needs.java_command(), free_port(), free_port()
    address = f"127.0.0.1:{port}"
    with contextlib.ExitStack() as stack, available():
        host = start_served(tmp_path / "h", gateway_namesrv_cluster=True, gateway_namesrv_port=port, namesrvAddr=address,
                            brokerName="broker-h")
        stack.callback(host.close)
        broker = RealBroker(java, tmp_path / "a", tmp_path / "real", free_port(), broker_port, namesrvAddr=address,
                            mappedFileSizeCommitLog=1 << 20)
        stack.callback(broker.kill)
        broker.start()
        clients = stack.enter_context(Clients(java, address, tmp_path))
        eventually(lambda: broker.address in admin(clients, "clusterList"), "the real broker is in our routes", 60)
        slave = start_served(tmp_path / "s", namesrvAddr=address, broker_role="SLAVE", sync_from="first")  # it learns its real master
        stack.callback(slave.close)
        admin(clients, "updateTopic", "-c", "DefaultCluster", "-t", "Both", "-r", "4", "-w", "4")
        both = {"broker-a": f'0:"{broker.address}",1:"127.0.0.1:{slave.ports[1]}"', "broker-h": f'0:"127.0.0.1:{host.ports[1]}"'}
        eventually(lambda: route(clients) == both, "all are in the route", 60)
        bodies = [f"m{number}" for number in range(80)]
        sent = clients.ask("send", group="senders", how="sync", topic="Both", tags="t", bodies=bodies)
        assert {row["status"] for row in sent} == {"SEND_OK"}
        clients.ask("subscribe", name="all", group="readers", topic="Both")
        assert Counter(row["body"] for row in clients.ask("take", name="all", count=80, timeout_s=60)) == Counter(bodies)
        eventually(lambda: sum(ConsumerOffsets(slave.root).read("Both", "readers").values()) == 40, "the slave has the group's offsets", 60)
        assert TopicConfigs(slave.root).read().rows["Both"].write_queue_nums == 4
        assert "readers" in SubscriptionGroups(slave.root).read().rows
        broker.kill()
        eventually(lambda: route(clients)["broker-a"] == f'1:"127.0.0.1:{slave.ports[1]}"', "the dead master is out", 10)
        clients.ask("subscribe", name="late", group="late_readers", topic="Both")
        found = clients.ask("take", name="late", count=80, timeout_s=90)
        assert Counter(row["body"] for row in found) == Counter(bodies), "half of them from the slave"
