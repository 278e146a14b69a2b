"""Three brokers, each on a host of its own, with unchanged clients: two of ours with slaves and one of RocketMQ's.

Hosts are network namespaces: a real broker-a 4.9.7 with a name server 4.9.7; broker-b and broker-c of ours, each with a slave on
another host; a name server 5.5.0; broker-b's own name server. Each broker registers with all three name servers. The clients (Java
4.9.8 and 5.5.0, Go, `mqadmin`) have a host, too. test_cluster.py has what needs two brokers and no hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import needs
from fix_cli import run
from fix_engine import RunningEngine
from fix_gateway import Client, ServedStore, send_fields, start_served
from fix_judge import available
from fix_slave import secret_file
from interop.clients import FLAGS, Clients, class_path_5
from interop.network import network
from interop.real_broker import RealBroker, RealNameServer
from interop.test_go_client import build as build_go
from pyengine.formats.small_file import decode_config
from pyengine.gateway import codes
from pyengine.native import control as native
from pyengine.storage.config_table import SubscriptionGroups, TopicConfig, TopicConfigs
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven, pytest.mark.network, pytest.mark.long, pytest.mark.timeout(900)]

NAMES, BROKER = 9876, 10911
MASTERS = ("broker-a", "broker-b", "broker-c")
AT_ONCE_S = 1.0  # routes have a change


class Cluster:
    """The whole of it. `stores` by the host's name: b, b2 (its slave), c, c2."""

    def __init__(self, hosts, folder: Path, java: str) -> None:
        self.hosts, self.folder, self.java = hosts, folder, java
        self.name_servers = [f"{hosts[name].address}:{NAMES}" for name in ("a", "n", "b")]
        self.names = ";".join(self.name_servers)
        self.broker = RealBroker(java, folder / "a", folder / "real", NAMES, BROKER, brokerIP1=hosts["a"].address, namesrvAddr=self.names,
                                 mappedFileSizeCommitLog=1 << 20, transactionTimeOut=1000, transactionCheckInterval=1000)
        self.name_server = RealNameServer(java, folder / "n", hosts["n"].address, NAMES)
        self.stores: dict[str, ServedStore] = {}
        self.open = contextlib.ExitStack()

    def start(self) -> None:
        """Slaves come first: they wait for their masters."""
        for host, server in (("a", self.broker), ("n", self.name_server)):
            self.open.callback(server.kill)
            with self.hosts[host].inside():
                server.start()
        with ThreadPoolExecutor() as threads:
            slaves = [threads.submit(self.begin, name, broker_role="SLAVE") for name in ("b2", "c2")]
            self.begin("b", gateway_namesrv_cluster=True)
            self.begin("c")
            for slave in slaves:
                slave.result()
        self.clients = self.open.enter_context(self.clients_of(self.folder))

    def begin(self, name: str, **settings) -> None:
        root, secret = self.folder / name / "store", secret_file(self.folder / name)
        self.open.callback(RunningEngine(root, {}).sweep)
        with self.hosts[name].inside() as host:
            self.stores[name] = start_served(
                root, namesrvAddr=self.names, brokerName=f"broker-{name[0]}", ha_secret_file=secret,
                gateway_listen_host="0.0.0.0", gateway_advertised_host=host.address, gateway_namesrv_port=NAMES,
                gateway_broker_port=BROKER, ha_listen_host="0.0.0.0", ha_listen_port=10912, transaction_timeout_ms=1000,
                transaction_check_interval_ms=1000, **settings)

    def again(self, name: str) -> None:
        with self.hosts[name].inside():
            self.stores[name].engine.start()

    @contextlib.contextmanager
    def clients_of(self, folder: Path):
        """A JVM of client 4.9.8 on the clients' host."""
        with self.hosts["k"].inside(), Clients(self.java, self.names, folder) as clients:
            yield clients

    def address(self, host: str) -> str:
        return f"{self.hosts[host].address}:{BROKER}"

    def ask(self, address: str, code: int, fields: dict | None = None, body: bytes = b""):
        """A frame to a broker or name server, and its answer."""
        host, _, port = address.rpartition(":")
        with self.hosts["k"].inside(), Client(int(port), host) as client:
            return client.ask(code, fields, body)

    def routes(self, topic: str) -> list[dict]:
        """What each name server tells of a topic: {broker: (addresses by number, right)}."""
        return [self.route(server, topic) for server in self.name_servers]

    def route(self, server: str, topic: str) -> dict[str, tuple[dict[str, str], int]]:
        try:
            answer = self.ask(server, codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
        except (OSError, EOFError):  # it is away
            return {}
        if answer.code != codes.SUCCESS:
            return {}
        told = decode_config(answer.body.decode())
        rights = {row["brokerName"]: row["perm"] for row in told["queueDatas"]}
        return {row["brokerName"]: ({str(number): address for number, address in row["brokerAddrs"].items()}, rights[row["brokerName"]])
                for row in told["brokerDatas"] if row["brokerName"] in rights}

    def whole(self, topic: str = "TBW102") -> bool:
        """Whether each name server has all masters and slaves."""
        wanted = {"broker-a": {"0": self.address("a")}, "broker-b": {"0": self.address("b"), "1": self.address("b2")},
                  "broker-c": {"0": self.address("c"), "1": self.address("c2")}}
        return all({name: addresses for name, (addresses, _) in route.items()} == wanted for route in self.routes(topic))

    def admin(self, *words: str) -> str:
        return self.clients.ask("admin", arguments=list(words))

    def admin5(self, *words: str) -> str:
        """A command of RocketMQ 5.5.0's tools."""
        return self.java5("org.apache.rocketmq.tools.command.MQAdminStartup", *words, environ={"NAMESRV_ADDR": self.names})

    def java5(self, main: str, *words: str, environ: dict[str, str] | None = None) -> str:
        command = [self.java, *FLAGS, f"-Duser.home={self.folder}", f"-Drocketmq.home.dir={self.folder}", "-cp", class_path_5(), main,
                   *words]
        for _ in range(4):
            with self.hosts["k"].inside():
                done = subprocess.run(command, capture_output=True, text=True, timeout=scaled_timeout_s(200), cwd=self.folder,
                                      env=os.environ | (environ or {}))
            if "RemotingTimeoutException" not in done.stderr:  # of a new JVM's first request, on a busy machine
                break
        assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
        return done.stdout

    def create(self, topic: str, queues: int = 4) -> None:
        told = self.admin("updateTopic", "-c", "DefaultCluster", "-t", topic, "-r", str(queues), "-w", str(queues))
        assert told.count("success") == 3, told
        eventually(lambda: all(route.keys() == set(MASTERS) for route in self.routes(topic)), "each name server has it of each", AT_ONCE_S)

    def send(self, topic: str, count: int, how: str = "sync", **more) -> list[str]:
        bodies = [f"{topic}-{number}" for number in range(count)]
        sent = self.clients.ask("send", group=f"{topic}_senders", how=how, topic=topic, tags="t", bodies=bodies, **more)
        assert {row["status"] for row in sent} == {"SEND_OK"}
        return bodies

    def taken(self, name: str, count: int, timeout_s: int = 60) -> list[dict]:
        return self.clients.ask("take", name=name, count=count, timeout_s=int(min(100, scaled_timeout_s(timeout_s))))

    def counts(self, topic: str) -> Counter[str]:
        """Messages of a topic by broker, as the tools tell them."""
        rows = re.findall(r"^(broker-\S+)\s+\d+\s+(\d+)\s+(\d+)", self.admin("topicStatus", "-t", topic), re.MULTILINE)
        found: Counter[str] = Counter()
        for broker, low, high in rows:
            found[broker] += int(high) - int(low)
        return found

    def close(self) -> None:
        self.open.close()


@pytest.fixture(autouse=True, scope="module")
def forked_supervisors():
    """None here: a forked one would be on the host of its forker."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    java = needs.java_command()
    with available(), network("a", "b", "b2", "c", "c2", "n", "k") as hosts:
        made = Cluster(hosts, tmp_path_factory.mktemp("three"), java)
        try:
            made.start()
            eventually(made.whole, "all are in all routes", 60)
            yield made
        finally:
            made.close()


# ---- tools ------------------------------------------------------------------------------


def test_the_tools_of_both_versions_show_all_brokers_and_change_topics_of_all(cluster):
    listed = cluster.admin("clusterList")
    for host in ("a", "b", "b2", "c", "c2"):
        assert cluster.address(host) in listed
        assert "putMessageTimesTotal" in cluster.admin("brokerStatus", "-b", cluster.address(host))
    assert [len(re.findall(rf"{name}\s+{number}\s", listed)) for name in MASTERS for number in (0, 1)] == [1, 0, 1, 1, 1, 1]
    assert "putMessageTimesTotal" in cluster.admin("brokerStatus", "-c", "DefaultCluster")
    cluster.create("tools")
    bodies = cluster.send("tools", 60)
    assert cluster.counts("tools") == dict.fromkeys(MASTERS, 20)
    assert "DefaultCluster" in cluster.admin("topicClusterList", "-t", "tools")
    told = "".join(cluster.admin("topicRoute", "-t", "tools").split())
    assert all(f'"brokerName":"{name}"' in told for name in MASTERS) and cluster.address("c2") in told
    cluster.clients.ask("subscribe", name="tools", group="tool_readers", topic="tools")
    assert Counter(row["body"] for row in cluster.taken("tools", 60)) == Counter(bodies)
    progress = eventually(lambda: (told := cluster.admin("consumerProgress", "-g", "tool_readers")).count("Diff Total: 0") and told,
                          "all offsets are committed", 60)
    assert len(re.findall(r"^tools\s+broker-[abc]\s+\d", progress, re.MULTILINE)) == 12
    assert "ConsumeType: CONSUME_PASSIVELY" in cluster.admin("consumerConnection", "-g", "tool_readers")
    assert "tools" in cluster.admin("brokerConsumeStats", "-b", cluster.address("b"))  # once in a JVM: it keeps a closed client
    assert "tools" in cluster.admin5("brokerConsumeStats", "-b", cluster.address("c"))
    assert "tools" in cluster.admin("topicList", "-c") and "tools" in cluster.admin("statsAll", "-t", "tools")
    listed = cluster.admin5("clusterList")
    assert all(cluster.address(host) in listed for host in ("a", "b", "b2", "c", "c2"))
    assert cluster.admin5("updateTopic", "-c", "DefaultCluster", "-t", "tools", "-r", "6", "-w", "6").count("success") == 3
    assert "putMessageTimesTotal" in cluster.admin5("brokerStatus", "-b", cluster.address("b2"))
    assert "success" in cluster.admin("updateSubGroup", "-c", "DefaultCluster", "-g", "tool_group")
    cluster.clients.ask("stop", name="tools")
    assert "success" in cluster.admin("deleteSubGroup", "-c", "DefaultCluster", "-g", "tool_readers")
    cluster.admin("deleteTopic", "-c", "DefaultCluster", "-t", "tools")
    eventually(lambda: cluster.routes("tools") == [{}] * 3, "it is in no route", AT_ONCE_S)


def test_a_broker_without_the_right_to_write_is_left_by_producers_and_read_on(cluster):
    cluster.create("wiped")
    bodies = cluster.send("wiped", 30)
    for name in ("broker-a", "broker-b", "broker-c"):
        before = cluster.counts("wiped")
        assert cluster.admin("wipeWritePerm", "-b", name).count("wipe write perm") == 3
        assert [route[name][1] for route in cluster.routes("wiped")] == [4] * 3
        cluster.clients.ask("send", group=f"after_{name}", how="sync", topic="wiped", tags="t", bodies=[f"{name}-{n}" for n in range(20)])
        bodies += [f"{name}-{number}" for number in range(20)]
        assert {each for each, number in (cluster.counts("wiped") - before).items() if number} == set(MASTERS) - {name}
        cluster.admin("addWritePerm", "-b", name)
        assert [route[name][1] for route in cluster.routes("wiped")] == [6] * 3
    cluster.clients.ask("subscribe", name="wiped", group="wiped_readers", topic="wiped")
    assert Counter(row["body"] for row in cluster.taken("wiped", len(bodies))) == Counter(bodies)


def test_each_change_is_in_the_routes_of_each_name_server_at_once(cluster):
    def seen(host: str, what: str, right: int) -> None:
        name = f"broker-{host}"
        eventually(lambda: [route.get(name, ({}, 0))[1] for route in cluster.routes("seen")] == [right] * 3, f"{what} of {name}",
                   AT_ONCE_S)

    eventually(cluster.whole, "all are there")
    for host in ("a", "b", "c"):
        words = ("-b", cluster.address(host), "-t", "seen", "-r", "3", "-w", "3")
        cluster.admin("updateTopic", *words)
        seen(host, "a new topic", 6)
        cluster.admin("updateTopic", *words, "-p", "4")
        seen(host, "a right that was taken", 4)
        cluster.admin("updateTopic", *words, "-p", "6")
        seen(host, "a right that was given", 6)
    for host in ("b", "c"):
        topics = TopicConfigs(cluster.stores[host].root)
        topics.create(TopicConfig(f"of_{host}"))  # by a program of that host
        eventually(lambda: all(f"broker-{host}" in route for route in cluster.routes(f"of_{host}")), "a program's topic", AT_ONCE_S)
        with cluster.stores[host].engine.memory(writable=True) as memory:
            native.refuse_puts(memory.control, native.REFUSE_LOST)
            seen(host, "puts that are refused", 4)
            native.refuse_puts(memory.control, native.REFUSE_LOST, on=False)
            seen(host, "puts that are taken", 6)


def test_name_servers_compare_our_versions_and_take_what_is_new(cluster):
    for host in ("b", "c"):
        identity = {"brokerName": f"broker-{host}", "brokerAddr": cluster.address(host), "clusterName": "DefaultCluster", "brokerId": "0"}

        def own(host=host):
            return json.loads(cluster.ask(cluster.address(host), codes.GET_ALL_TOPIC_CONFIG).body)["dataVersion"]

        def changed(version, identity=identity):
            return [cluster.ask(server, codes.QUERY_DATA_VERSION, identity, json.dumps(version).encode()).fields["changed"]
                    for server in cluster.name_servers]

        first = own()
        eventually(lambda: changed(first | {"stateVersion": 0}) == ["false"] * 3, "they have this version", 10)
        TopicConfigs(cluster.stores[host].root).create(TopicConfig(f"version_{host}"))
        eventually(lambda: own() != first, "there is another")
        eventually(lambda: changed(own() | {"stateVersion": 0}) == ["false"] * 3, "they have that one", AT_ONCE_S)
        assert changed(first | {"stateVersion": 0}) == ["true"] * 3


# ---- clients ----------------------------------------------------------------------------


def test_members_of_a_group_share_the_queues_of_all_brokers(cluster):
    cluster.create("shared")
    members = [f"member{number}" for number in range(3)]
    for name in members:
        cluster.clients.ask("subscribe", name=name, group="sharers", topic="shared")

    bodies = cluster.send("shared", 120)

    def all_taken() -> dict[str, list[str]]:
        taken = {name: [row["body"] for row in cluster.taken(name, 0)] for name in members}
        return set(bodies) <= {body for each in taken.values() for body in each} and taken

    taken = eventually(all_taken, "all is consumed", 90)
    assert all(taken.values()), "each has a share"
    for name in members[1:]:
        cluster.clients.ask("stop", name=name)
    more = [f"more-{number}" for number in range(60)]
    cluster.clients.ask("send", group="sharers_feed", how="sync", topic="shared", tags="t", bodies=more)
    eventually(lambda: set(more) <= {row["body"] for row in cluster.taken(members[0], 0)}, "the last one has all queues", 90)


def test_orders_hold_within_each_queue_of_each_broker(cluster):
    cluster.create("ordered")
    cluster.clients.ask("subscribe", name="ordered", group="ordered_readers", topic="ordered", ordered=True)
    sent = {key: [f"{key}-{number}" for number in range(15)] for key in range(12)}
    for part in range(3):
        for key, bodies in sent.items():
            rows = cluster.clients.ask("send", group="ordered_feed", how="ordered", topic="ordered", tags="t", queue=key,
                                       bodies=bodies[5 * part:5 * part + 5])
            assert {row["status"] for row in rows} == {"SEND_OK"}
    taken = [row["body"] for row in cluster.taken("ordered", 180, 90)]
    assert {key: [body for body in taken if body.startswith(f"{key}-")] for key in sent} == sent
    assert cluster.counts("ordered") == dict.fromkeys(MASTERS, 60)


def test_an_order_of_a_topic_says_which_brokers_have_it(cluster):
    cluster.create("with_order")
    assert cluster.admin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "true").count("success") == 1
    cluster.admin("updateOrderConf", "-t", "with_order", "-v", "broker-b:2;broker-c:1", "-m", "put")
    assert "broker-b:2;broker-c:1" in cluster.admin("updateOrderConf", "-t", "with_order", "-m", "get")
    for server in cluster.name_servers:
        told = decode_config(cluster.ask(server, codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "with_order"}).body.decode())
        assert told["orderTopicConf"] == "broker-b:2;broker-c:1"
    bodies = cluster.send("with_order", 30)
    assert cluster.counts("with_order") == {"broker-a": 0, "broker-b": 20, "broker-c": 10}
    cluster.admin("updateOrderConf", "-t", "with_order", "-m", "delete")
    cluster.clients.ask("subscribe", name="with_order", group="with_order_readers", topic="with_order")
    assert Counter(row["body"] for row in cluster.taken("with_order", 30)) == Counter(bodies)


def test_each_member_of_a_broadcast_gets_the_messages_of_all_brokers(cluster):
    cluster.create("cast")
    for name in ("cast1", "cast2"):
        cluster.clients.ask("subscribe", name=name, group="casters", topic="cast", broadcast=True)
    bodies = cluster.send("cast", 60)
    for name in ("cast1", "cast2"):
        assert Counter(row["body"] for row in cluster.taken(name, 60)) == Counter(bodies)


def test_transactions_are_asked_about_and_decided_on_each_broker(cluster):
    cluster.create("decided")
    cluster.clients.ask("subscribe", name="decided", group="decided_readers", topic="decided")
    for outcome, expected in (("COMMIT_MESSAGE", 24), ("ROLLBACK_MESSAGE", 24), ("UNKNOW", 48)):
        sent = cluster.clients.ask("transact", group="deciders", topic="decided", tags="t", outcome=outcome,
                                   bodies=[f"{outcome}-{number}" for number in range(24)])
        assert {row["status"] for row in sent} == {"SEND_OK"}
        taken = cluster.taken("decided", expected, 90)
        assert len({row["body"] for row in taken}) == expected, Counter(row["body"].partition("-")[0] for row in taken)
    assert all(number >= 12 for number in cluster.counts("decided").values())


def test_what_a_consumer_gives_back_and_delayed_messages_come_from_each_broker(cluster):
    cluster.create("given_back")
    cluster.clients.ask("subscribe", name="given_back", group="givers", topic="given_back", failures=1, delay=1)
    bodies = cluster.send("given_back", 24, delay=1)
    taken = cluster.taken("given_back", 48, 90)
    assert Counter((row["body"], row["times"]) for row in taken) == Counter((body, times) for body in bodies for times in (0, 1))


def test_clients_of_rocketmq_5_use_all_brokers(cluster):
    cluster.create("spread5")
    told = cluster.java5("clients5.Spread", cluster.names, "spread5", "90", "broker-a")  # 4.9 has no lite pull of 5
    sent = Counter({name: int(count) for name, count in re.findall(r"(broker-[abc])=(\d+)", told)})
    assert sum(sent.values()) == 90 and min(sent[name] for name in MASTERS) > 20, told
    assert "pushed 90 to 2" in told and f"pulled {90 - sent['broker-a']}" in told, told


@pytest.mark.go
def test_the_go_client_uses_all_brokers(cluster, tmp_path):
    program = build_go(tmp_path)
    cluster.create("orders")
    for server in cluster.name_servers:
        with cluster.hosts["k"].inside():
            done = subprocess.run([program, "-namesrv", server, "-count", "24", "-limit", f"{scaled_timeout_s(100):.0f}s", "-group",
                                   f"billing{cluster.name_servers.index(server)}"], capture_output=True, text=True,
                                  timeout=scaled_timeout_s(200))
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("put true") == 24 and done.stdout.count("got order") == 24
    assert min(cluster.counts("orders").values()) >= 12


# ---- slaves -----------------------------------------------------------------------------


def test_slaves_refuse_what_rocketmqs_refuse(cluster):
    slave = cluster.address("b2")
    fields = {"topic": "x", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicFilterType": "SINGLE_TAG", "defaultTopic": "TBW102"}
    for code, given, body in ((codes.UPDATE_AND_CREATE_TOPIC, fields, b""), (codes.DELETE_TOPIC_IN_BROKER, {"topic": "x"}, b""),
                              (codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, b'{"groupName":"g"}'),
                              (codes.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}, b"")):
        answer = cluster.ask(slave, code, given, body)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, "Can't modify topic or subscription group from slave broker, "
                                                "please execute it from master broker."), code
    assert cluster.ask(slave, codes.SEND_MESSAGE_V2, send_fields("x"), b"x").code not in (codes.SUCCESS, 10, 11, 12)
    assert cluster.ask(slave, codes.END_TRANSACTION, {"producerGroup": "g", "tranStateTableOffset": 0, "commitLogOffset": 0,
                                                      "commitOrRollback": 8}).code != codes.SUCCESS


# ---- faults -----------------------------------------------------------------------------


def test_kills_of_gateways_engines_and_name_servers_under_load_lose_nothing_acknowledged(cluster, tmp_path):
    eventually(cluster.whole, "all are there", 60)
    cluster.create("killed")
    acknowledged: set[str] = set()
    with cluster.clients_of(tmp_path) as feed:
        cluster.clients.ask("subscribe", name="killed", group="killed_readers", topic="killed")
        for number, victim in enumerate(("gateway b", "engine c", "name server n", "cable c", "gateway c", "engine b")):
            feed.begin("stream", group="killed_feed", topic="killed", ms=15_000, first=number * 1_000_000)
            taken = len(cluster.taken("killed", 1 + len(cluster.taken("killed", 0))))
            what, host = victim.rsplit(" ", 1)
            if what == "gateway":
                store = cluster.stores[host]
                before = store.engine.incarnation("gateway")
                store.engine.kill("gateway")
                store.engine.wait_back("gateway", before)
            elif what == "engine":
                cluster.stores[host].engine.kill_all()
                left = cluster.name_servers[:2] if host == "b" else cluster.name_servers  # the third one died with it
                eventually(lambda: all("0" not in cluster.route(server, "killed").get(f"broker-{host}", [{}])[0] for server in left),
                           "it is in no route", AT_ONCE_S)
            elif what == "cable":
                cluster.hosts[host].cut()
            else:
                cluster.name_server.kill()
            assert len(cluster.taken("killed", taken + 20)) >= taken + 20, f"consumers go on after the end of {victim}"
            if what == "engine":
                cluster.again(host)
            elif what == "cable":
                cluster.hosts[host].join()
            elif what == "name server":
                with cluster.hosts["n"].inside():
                    cluster.name_server.start()
            acknowledged |= set(feed.answer())
            eventually(cluster.whole, f"all are in the routes again after the end of {victim}", 60)

    def all_taken() -> list[str]:
        found = [row["body"] for row in cluster.taken("killed", 0)]
        return acknowledged <= set(found) and found

    found = eventually(all_taken, "everything acknowledged is consumed", 120)
    print(f"{len(acknowledged)} acknowledged, {len(found) - len(set(found))} consumed again")
    assert len(acknowledged) > 500


def test_a_dead_masters_messages_come_from_its_slave_which_takes_its_place_and_the_way_back(cluster):
    eventually(cluster.whole, "all are there", 60)
    cluster.create("failed_over")
    bodies = cluster.send("failed_over", 90)
    master, slave = cluster.stores["c"], cluster.stores["c2"]
    eventually(lambda: slave.engine.positions()["reput_from"] == master.engine.positions()["wrote"], "the slave has all")
    eventually(lambda: "failed_over" in TopicConfigs(slave.root).read().rows, "and the topic")
    master.engine.kill_all()
    eventually(lambda: all(route.get("broker-c", [{}])[0] == {"1": cluster.address("c2")} for route in cluster.routes("failed_over")),
               "only the slave is left", AT_ONCE_S)
    cluster.clients.ask("subscribe", name="late", group="late_readers", topic="failed_over")
    assert Counter(row["body"] for row in cluster.taken("late", 90, 90)) == Counter(bodies), "a third of them from the slave"
    told = cluster.java5("clients5.Spread", cluster.names, "failed_over", "60", "broker-a")
    assert re.search(r"sent \{broker-a=\d+, broker-b=\d+\}", told), "none to the slave"
    with cluster.hosts["c2"].inside():
        assert "is a master now" in run("promote", slave.root, "--timeout", "30").stdout
    eventually(lambda: all(route.get("broker-c") == ({"0": cluster.address("c2")}, 6) for route in cluster.routes("failed_over")),
               "it is the master in the routes", AT_ONCE_S)
    cluster.clients.ask("send", group="new_feed", how="sync", topic="failed_over", tags="t", bodies=[f"new-{n}" for n in range(30)])
    assert cluster.counts("failed_over")["broker-c"] >= 30 + 5
    assert "success" in cluster.admin("updateSubGroup", "-b", cluster.address("c2"), "-g", "new_readers")
    with cluster.hosts["c"].inside():
        master.engine.settings |= {"broker_role": "SLAVE"}
        master.engine.start(ha_listen_port=0)
    eventually(lambda: all(route.get("broker-c", [{}])[0] == {"0": cluster.address("c2"), "1": cluster.address("c")}
                           for route in cluster.routes("failed_over")), "the old one is its slave", 30)
    eventually(lambda: master.engine.positions()["wrote"] == slave.engine.positions()["wrote"], "which follows")
    eventually(lambda: "new_readers" in SubscriptionGroups(master.root).read().rows, "with the groups")
