"""A gateway among several: what name servers are told and when, and what happens when they, the gateway or the right to put go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import ssl
import struct
import subprocess
import zlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import trustme

from crash.replicas import free_port
from fix_cli import command_line, environment, run
from fix_gateway import Client, ServedStore, heartbeat, put_private, send_fields, start_served, subscription
from fix_golden import usual
from fix_name_server import NameServer
from fix_slave import secret_file
from ha_proxy import FaultProxy
from pyengine.cli.config import read_broker_conf
from pyengine.errors import ConfigError
from pyengine.gateway import codes, registration
from pyengine.gateway.connections import Connections, Limits, TurnExecutor
from pyengine.gateway.gateway import repeat
from pyengine.gateway.names import Address, Names
from pyengine.gateway.registration import ClusterRoutes, Registration, _Identity
from pyengine.gateway.wire import ANSWER, Frame, WireError, encode_frame
from pyengine.ipc.control_block import read_masters, read_rows, write_rows
from pyengine.ipc.shared_objects import NAME_SERVERS
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import load_config
from pyengine.storage.config_table import PERM_READ, PERM_WRITE, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from reported import Reported
from waiting import eventually, scaled_timeout_s

BOTH = PERM_READ | PERM_WRITE


@pytest.fixture(scope="module")
def servers():
    pair = [NameServer(), NameServer()]
    yield pair
    for server in pair:
        server.close()


@pytest.fixture(scope="module")
def joined(tmp_path_factory, servers):
    """A ServedStore that is registered with two name servers, for the tests that end neither."""
    store = start_served(tmp_path_factory.mktemp("joined") / "store", namesrvAddr=f" {servers[0].address};{servers[1].address} ; ",
                         brokerName="broker-j", brokerClusterName="shops")
    for server in servers:
        server.wait_for("broker-j")
    yield store
    store.close()


@pytest.fixture
def start(tmp_path):
    """Starts a store that registers with one name server."""
    started = []

    def begin(server: NameServer, **settings):
        started.append(start_served(tmp_path / "store", namesrv_addr=server.address, **settings))
        return started[-1]

    yield begin
    for store in started:
        store.close()


def test_a_broker_registers_all_of_its_topics_with_each_name_server(joined, servers):
    broker = joined.broker()
    assert broker.ask(codes.SEND_MESSAGE_V2, send_fields("first", d=3), b"x").code == codes.SUCCESS
    for server in servers:
        eventually(lambda server=server: "first" in server.topics("broker-j"), "the topic is there")
        found, version = server.brokers["broker-j", 0], TopicConfigs(joined.root).read().data_version
        assert found["topicConfigTable"] == json.loads(broker.ask(codes.GET_ALL_TOPIC_CONFIG).body)["topicConfigTable"]
        assert found["dataVersion"] == version | {"stateVersion": 0}
        address = f"127.0.0.1:{joined.ports[1]}"
        assert found["fields"].items() >= {"brokerAddr": address, "clusterName": "shops", "brokerId": "0",
                                           "haServerAddr": "127.0.0.1:0"}.items()


def test_a_gateway_that_registers_has_no_name_server_of_its_own(joined):
    assert joined.ports[0] == 0 and "no name server of its own, broker broker-j" in joined.engine.log()


def test_what_changes_is_registered_at_once_whoever_changes_it(joined, servers):
    topics, client = TopicConfigs(joined.root), joined.broker()
    topics.create(TopicConfig("by_a_program", 2, 2))
    for server in servers:
        eventually(lambda server=server: "by_a_program" in server.topics("broker-j"), "it is registered", 10)
    before = servers[0].version("broker-j")
    fields = {"topic": "by_a_program", "readQueueNums": 5, "writeQueueNums": 2, "perm": PERM_READ, "topicFilterType": "SINGLE_TAG"}
    assert client.ask(codes.UPDATE_AND_CREATE_TOPIC, fields).code == codes.SUCCESS
    for server in servers:
        row = eventually(lambda server=server: (found := server.topics("broker-j")["by_a_program"])["perm"] == PERM_READ and found,
                         "its rights have changed", 10)
        assert row["readQueueNums"] == 5
    assert servers[0].version("broker-j") != before
    topics.delete("by_a_program")
    eventually(lambda: "by_a_program" not in servers[0].topics("broker-j"), "it is gone", 10)


def test_status_and_metrics_say_with_which_name_servers_it_is_registered(joined, servers):
    rows = run("status", joined.root, "--json").document["name_servers"]
    assert [(row["address"], row["registered"], row["problem"]) for row in rows] == [(one.address, True, "") for one in servers]
    assert servers[1].address in run("status", joined.root).stdout
    text = run("metrics", joined.root, "--once").stdout
    assert 'pyengine_broker_takes_puts{broker="broker-j",cluster="shops",id="0"} 1.0' in text
    assert f'pyengine_name_server_registered{{address="{servers[0].address}"}} 1.0' in text
    assert f"registered with the name server {servers[0].address} as broker-j, number 0" in joined.engine.log()


def test_a_fenced_master_leaves_the_routes_without_a_request_that_would_remove_its_successor(joined, servers):
    with joined.engine.memory(writable=True) as memory:
        native.refuse_puts(memory.control, native.REFUSE_FENCED)
        servers[0].wait_until_gone("broker-j")
        assert codes.UNREGISTER_BROKER not in servers[0].codes()
        eventually(lambda: "a master of a higher term has taken" in joined.engine.log(), "the log says why")
        native.refuse_puts(memory.control, native.REFUSE_FENCED, on=False)
    servers[0].wait_for("broker-j")


def test_a_name_server_that_ends_a_connection_is_asked_again(joined, servers):
    number = len(servers[1].registrations())
    servers[1].drop()
    eventually(lambda: len(servers[1].registrations()) > number, "it is registered again")
    servers[1].wait_for("broker-j")


def test_a_gateway_that_dies_is_out_of_the_routes_until_it_is_back(joined, servers):
    incarnation, number = joined.engine.incarnation("gateway"), len(servers[0].registrations())
    joined.engine.kill("gateway")
    eventually(lambda: len(servers[0].registrations()) > number, "it is back")
    joined.engine.wait_back("gateway", incarnation)
    servers[0].wait_for("broker-j")


def test_an_orderly_stop_unregisters(start, name_server):
    store = start(name_server)
    name_server.wait_for()
    store.engine.stop()
    assert name_server.codes()[-1] == codes.UNREGISTER_BROKER and not name_server.brokers
    assert {"brokerName", "brokerAddr", "clusterName", "brokerId"} == name_server.frames[-1].fields.keys()


def test_an_orderly_stop_does_not_unregister_a_broker_that_has_taken_the_name(start, name_server):
    store = start(name_server)
    name_server.wait_for()
    name_server.routes = b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"127.0.0.1:1"},"brokerName":"broker-a"}}}'
    store.engine.stop()
    assert codes.UNREGISTER_BROKER not in name_server.codes() and not name_server.brokers


def test_a_name_server_that_is_away_harms_nothing_and_is_found_when_it_comes(start, name_server):
    away = free_port()
    store = start(name_server, namesrvAddr=f"127.0.0.1:{away};{name_server.address}")
    name_server.wait_for()
    assert store.broker().ask(codes.SEND_MESSAGE_V2, send_fields("sent"), b"x").code == codes.SUCCESS
    eventually(lambda: f"not registered with the name server 127.0.0.1:{away}" in store.engine.log(), "the log says it")
    document = run("status", store.root, "--json").document
    assert document["verdict"] == "warning" and f"127.0.0.1:{away}" in document["summary"]
    assert f'pyengine_name_server_registered{{address="127.0.0.1:{away}"}} 0.0' in run("metrics", store.root, "--once").stdout
    late = NameServer(away)
    late.wait_for()
    eventually(lambda: run("status", store.root, "--json").document["verdict"] == "ok", "all is well")
    late.close()


@pytest.mark.parametrize(("answer", "why"), [
    (lambda frame: Frame(codes.SYSTEM_ERROR, opaque=frame.opaque, flag=ANSWER, remark="crc32 not match"), "1 crc32 not match"),
    *usual([(lambda frame: b"\x7f\xff\xff\xff", "has ended"), (lambda frame: b"\x00\x00\x00\x04\xff\xff\xff\xff", "has ended")], [],
           pytest.mark.ci),
    (lambda frame: b"HTTP/1.1 400 Bad Request\r\n\r\n", "has ended")], ids=["refusal", "long", "garbage", "http"])
def test_a_strange_name_server_is_left_and_asked_again(start, name_server, answer, why):
    name_server.answer, usual = answer, name_server.answer
    store = start(name_server)
    eventually(lambda: f"not registered with the name server {name_server.address}" in store.engine.log(), "the log says it")
    assert why in store.engine.log() and store.broker().ask(codes.GET_BROKER_CONFIG).code == codes.SUCCESS
    name_server.answer = usual
    name_server.wait_for()


def test_a_slave_registers_with_a_number_above_0(start, name_server):
    store = start(name_server, brokerId=3)  # a master's is 0
    name_server.wait_for("broker-a", 0)
    assert store.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"x").code == codes.SUCCESS
    store.engine.stop()
    slave = {"broker_role": "SLAVE", "ha_master_address": f"127.0.0.1:{free_port()}"}
    for given, number in ((0, 1), (3, 3)):
        name_server.frames.clear()
        store.engine.start(**slave, brokerId=given)
        name_server.wait_for("broker-a", number)
        store.engine.stop()
        assert {frame.fields["brokerId"] for frame in name_server.frames if frame.code != codes.GET_BROKER_CLUSTER_INFO} == {str(number)}


@pytest.mark.ci
def test_a_slave_without_a_secret_takes_its_masters_tables_by_requests(start, name_server):
    store = start(name_server)
    assert store.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"x").code == codes.SUCCESS
    end = eventually(lambda: store.engine.positions()["flushed"], "the log is durable")
    store.engine.stop()
    tables = {
        codes.GET_ALL_TOPIC_CONFIG: b'{"dataVersion":{"counter":9,"timestamp":8},"topicConfigTable":{"far":{"topicName":"far","perm":6}}}',
        codes.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: b'{"dataVersion":{"counter":1},"subscriptionGroupTable":{"g":{"groupName":"g"}}}',
        codes.GET_ALL_CONSUMER_OFFSET: b'{"offsetTable":{"far@g":{0:7}}}', codes.GET_ALL_DELAY_OFFSET: b'{"offsetTable":{3:5}}',
        codes.GET_BROKER_RUNTIME_INFO: b'{"table":{"commitLogMaxOffset":"%d"}}' % end}
    name_server.answer = lambda frame: Frame(
        codes.SUCCESS, {"masterAddr": name_server.address} if frame.code == codes.REGISTER_BROKER else {}, tables.get(frame.code, b""),
        frame.opaque, ANSWER)
    store.engine.start(broker_role="SLAVE", ha_master_address=f"127.0.0.1:{free_port()}")
    eventually(lambda: DelayOffsets(store.root).read()[0] == {3: 5}, "the last table is there", 60)
    topics = TopicConfigs(store.root).read()
    assert topics.rows.keys() == {"far"} and topics.data_version == {"counter": 9, "timestamp": 8}
    assert SubscriptionGroups(store.root).read().rows.keys() == {"g"} and ConsumerOffsets(store.root).read("far", "g") == {0: 7}
    eventually(lambda: "far" in name_server.topics("broker-a", 1), "it registers with them")
    tables[codes.GET_ALL_TOPIC_CONFIG], tables[codes.GET_ALL_DELAY_OFFSET] = b"{", b'{"offsetTable":{3:6}}'
    eventually(lambda: "topics.json of" in store.engine.log(), "the log says why it keeps what it has", 60)
    eventually(lambda: DelayOffsets(store.root).read()[0] == {3: 6}, "the others are taken")
    tables[codes.GET_BROKER_RUNTIME_INFO] = b'{"table":{"commitLogMaxOffset":"%d"}}' % (end + 1)
    tables[codes.GET_ALL_DELAY_OFFSET], tables[codes.GET_ALL_CONSUMER_OFFSET] = b'{"offsetTable":{3:7}}', b'{"offsetTable":{"far@g":{0:8}}}'
    for group_offset in (8, 9):
        eventually(lambda wanted=group_offset: ConsumerOffsets(store.root).read("far", "g") == {0: wanted}, "the next are there", 60)
        tables[codes.GET_ALL_CONSUMER_OFFSET] = b'{"offsetTable":{"far@g":{0:9}}}'
    assert DelayOffsets(store.root).read()[0] == {3: 6}, "this log has not the records that the last delivery made"
    takes = name_server.answer
    name_server.answer = lambda frame: takes(frame) if frame.code == codes.REGISTER_BROKER else Frame(
        codes.SYSTEM_ERROR, opaque=frame.opaque, flag=ANSWER, remark="No accessKey is configured")
    eventually(lambda: f"topics.json is refused by {name_server.address}: 1 No" in store.engine.log(), "the log says that too", 60)
    assert TopicConfigs(store.root).read().rows.keys() == {"far"}


def test_the_term_of_a_master_is_the_state_version(start, name_server, tmp_path):
    (tmp_path / "store" / "config").mkdir(parents=True)
    ReplicationStateFile(tmp_path / "store").write(ReplicationState("ASYNC_MASTER", 0, term=7))
    start(name_server, brokerId=5)
    assert name_server.wait_for()["dataVersion"]["stateVersion"] == 7


def test_a_fenced_master_does_not_register_at_its_start(start, name_server, tmp_path):
    (tmp_path / "store" / "config").mkdir(parents=True)
    ReplicationStateFile(tmp_path / "store").write(ReplicationState("ASYNC_MASTER", 0, term=1, fenced_by=2))
    store = start(name_server)
    eventually(lambda: "a master of a higher term has taken" in store.engine.log(), "the log says why")
    assert name_server.frames == []


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_it_speaks_tls_to_name_servers_of_a_known_authority(start, tmp_path, name):
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server = NameServer(context=context)
    store = start(server, namesrvAddr=f"{name}:{server.port}", gateway_namesrv_ca_file=str(tmp_path / "ca.pem"))
    if name == "127.0.0.1":
        server.wait_for()
    else:  # the certificate does not name it
        eventually(lambda: f"not registered with the name server localhost:{server.port}: " in store.engine.log(), "the log says it")
        assert "certificate" in store.engine.log() and not server.brokers
    server.close()


# ---- without an engine ----------------------------------------------------------------


def while_registered(owner, server: NameServer, script: Callable[[], object]) -> Reported:
    """Keep the broker of a store without workers registered while `script()` runs; return what was reported."""
    reported, config = Reported(), load_config(owner.root, {"namesrv_addr": server.address})

    async def work() -> None:
        executor = TurnExecutor(1, "test")
        kept = Registration(config, Names(owner.root, config, executor), Address.of(config, 1),
                            owner.memory, Connections(Limits(), lambda host, text: None), executor, reported)
        kept.start()
        checks = asyncio.create_task(repeat(0.005, kept.check, reported, kept.FAILURE))
        await asyncio.to_thread(script)
        checks.cancel()
        await kept.close()
        executor.shutdown()

    asyncio.run(work())
    return reported


@pytest.mark.parametrize("line", ["full", "unwritable", "lost", "frozen"])
def test_producers_leave_a_broker_that_takes_no_puts_and_come_back(make_owner, name_server, line):
    owner, bits = make_owner(), {"full": native.REFUSE_DISK_FULL, "unwritable": native.REFUSE_UNWRITABLE, "lost": native.REFUSE_LOST}
    owner.publish()
    TopicConfigs(owner.root).create(TopicConfig("left"))

    def refuse(on: bool) -> None:
        if line == "frozen":
            native.store(owner.control.state, "frozen", int(on))
        else:
            native.refuse_puts(owner.control, bits[line], on)

    def script() -> None:
        eventually(lambda: "left" in name_server.topics(), "it is registered")
        version = name_server.version()
        refuse(True)
        eventually(lambda: {row["perm"] & BOTH for row in name_server.topics().values()} == {PERM_READ}, "nobody may write")
        assert name_server.version() != version, "otherwise a name server takes no topics"
        refuse(False)
        eventually(lambda: name_server.topics()["left"]["perm"] == BOTH, "all may")
        assert name_server.version() == version

    assert len(while_registered(owner, name_server, script)) == 1


def test_it_registers_again_after_each_interval(make_owner, name_server, monkeypatch):
    monkeypatch.setattr(registration, "INTERVAL_S", 0.05)
    script = partial(eventually, lambda: len(name_server.registrations()) >= 3, "three registrations")
    assert len(while_registered(make_owner(), name_server, script)) == 1
    assert len({frame.body for frame in name_server.registrations()}) == 1, "nothing has changed"
    assert name_server.codes()[-1] == codes.UNREGISTER_BROKER


def test_a_name_server_that_does_not_answer_is_left(make_owner, name_server, monkeypatch):
    monkeypatch.setattr(registration, "LIMIT_S", 0.05)
    name_server.answer = lambda frame: None
    script = partial(eventually, lambda: len(name_server.registrations()) >= 2, "it is asked again")
    assert while_registered(make_owner(), name_server, script) == [
        f"not registered with the name server {name_server.address}: it did not answer within 0.05 s"]


def test_a_name_server_that_reads_nothing_keeps_neither_connections_nor_bytes(make_owner, monkeypatch):
    monkeypatch.setattr(registration, "LIMIT_S", 0.05)
    monkeypatch.setattr(registration, "RETRY_MAX_S", 0.05)
    owner, made = make_owner(), []
    path = TopicConfigs(owner.root).path
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"topicConfigTable": {f"t{n}": {"perm": 6} for n in range(60_000)}}))  # more bytes than the kernel takes
    connect = registration._connect

    async def note(*arguments):
        made.append(await connect(*arguments))
        return made[-1]

    monkeypatch.setattr(registration, "_connect", note)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = SimpleNamespace(address=f"127.0.0.1:{silent.getsockname()[1]}")
        while_registered(owner, server, lambda: eventually(lambda: len(made) >= 4 and all(each.is_closed for each in made[:3]),
                                                           "the first ones are closed"))


def test_a_name_of_a_host_that_cannot_be_one_is_reported(make_owner):
    owner = make_owner()
    script = partial(eventually, lambda: "a..b" in json.dumps(read_rows(owner.memory.folder, NAME_SERVERS)[0]["problem"]), "it says so")
    assert "a..b cannot be the name of a host" in while_registered(owner, SimpleNamespace(address="a..b:1"), script)[0]


def test_a_resolver_that_hangs_does_not_delay_the_end(make_owner, hung_resolver):
    server = SimpleNamespace(address="hung.example:1")
    assert while_registered(make_owner(), server, lambda: eventually(lambda: hung_resolver.asked, "the name is looked up")) == []
    assert hung_resolver.is_hung, "it has ended all the same"


# ---- where a slave's master is ----------------------------------------------------------


def tell_slaves(server: NameServer, ha_address: str) -> None:
    """Let the name server answer registrations of slaves as RocketMQ's does while their master's HA address is this."""
    server.answer = lambda frame: Frame(
        codes.SUCCESS, {"masterAddr": "127.0.0.1:1", "haServerAddr": ha_address} if frame.fields.get("brokerId", "0") != "0" else {},
        opaque=frame.opaque, flag=ANSWER)


def test_a_slave_follows_the_master_that_name_servers_tell_and_goes_where_it_goes(tmp_path, name_server):
    port, secret = free_port(), secret_file(tmp_path)
    master = start_served(tmp_path / "master", ha_listen_port=port, ha_secret_file=secret)
    with FaultProxy(port) as other, contextlib.ExitStack() as stack:
        stack.callback(master.close)
        assert master.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"first").code == codes.SUCCESS
        tell_slaves(name_server, f"127.0.0.1:{port}")
        slave = start_served(tmp_path / "slave", namesrv_addr=name_server.address, broker_role="SLAVE", ha_secret_file=secret)
        stack.callback(slave.close)

        def link() -> dict[str, object]:
            found = run("status", slave.root, "--json").document["replication"]
            return {"linked": found["linked"], "addresses": [each["address"] for each in found["links"]]}

        eventually(lambda: link() == {"linked": True, "addresses": [f"127.0.0.1:{port}"]}, "it follows", 60)
        tell_slaves(name_server, f"127.0.0.1:{other.port}")
        name_server.drop()  # it registers again at once
        eventually(lambda: link() == {"linked": True, "addresses": [f"127.0.0.1:{other.port}"]}, "it follows to the new address", 60)
        assert f"name servers tell of the master 127.0.0.1:{other.port}" in slave.engine.log()
        tell_slaves(name_server, "nowhere:0")
        name_server.drop()
        eventually(lambda: len(name_server.registrations()) > 3, "it is told of no usable one", 60)
        assert master.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"second").code == codes.SUCCESS
        eventually(lambda: slave.engine.positions()["wrote"] == master.engine.positions()["wrote"], "it goes on with the last one", 60)
        assert link()["addresses"] == [f"127.0.0.1:{other.port}"]
        master.engine.stop()
        asked = eventually(lambda: [frame for frame in name_server.registrations()[-2:] if b'"topicConfigTable":{}' in frame.body],
                           "while it is not linked it asks again and again, without its topics", 60)
        assert asked[0].fields["brokerId"] == "1"
        slave.engine.stop()
        slave.engine.start()  # it has a log
        assert "no name server has told where the master is" in run("status", slave.root, "--json").document["summary"]
        assert "the log was not compared with the master's: no name server tells" in slave.engine.log()


def start_of_slave(root, name_servers: str, *more: str) -> list[str]:
    settings = ("broker_role=SLAVE", "gateway_enable=true", "gateway_broker_port=0", f"namesrvAddr={name_servers}", *more)
    return ["start", str(root), *(word for pair in settings for word in ("--set", pair))]


def test_a_new_slave_whose_master_no_name_server_knows_does_not_start(tmp_path, name_server):
    away = free_port()
    done = run(*start_of_slave(tmp_path / "slave", f"127.0.0.1:{away};{name_server.address}", "ha_housekeeping_interval_ms=300"))
    assert done.code == 1 and f"{name_server.address} knows no master of broker-a that takes slaves" in done.stderr
    assert f"127.0.0.1:{away}: " in done.stderr and "set ha_master_address" in done.stderr
    eventually(lambda: not name_server.brokers, "it is in no route")


def test_a_new_slave_waits_for_the_registration_of_its_master_and_then_for_the_master(tmp_path, name_server):
    secret, slave = secret_file(tmp_path), tmp_path / "slave"
    began = subprocess.Popen(command_line(*start_of_slave(slave, name_server.address, f"ha_secret_file={secret}")), env=environment(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        stack.callback(run, "stop", slave)
        stack.callback(began.wait)
        asked = len(eventually(name_server.registrations, "it asks"))
        eventually(lambda: len(name_server.registrations()) > asked, "it asks again", 20)
        port = free_port()
        tell_slaves(name_server, f"127.0.0.1:{port}")
        eventually(lambda: f"127.0.0.1:{port}: " in (slave / "engine.log").read_text(), "it does not reach the master", 20)
        master = start_served(tmp_path / "master", ha_listen_port=port, ha_secret_file=secret)
        stack.callback(master.close)
        out, told = (text.decode() for text in began.communicate(timeout=scaled_timeout_s(60)))
        assert began.returncode == 0 and out.startswith("running")
        assert "note: waiting up to 60 s for the master: " in told and f"({name_server.address} knows no master of broker-a" in told
        assert told.count("note: ") == 2 and f"127.0.0.1:{port}: Connection refused" in told, "each cause once"


def test_ctrl_c_ends_the_start_of_a_new_slave_that_waits(tmp_path, name_server):
    slave = tmp_path / "slave"
    began = subprocess.Popen(command_line(*start_of_slave(slave, name_server.address)), env=environment(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    eventually(lambda: len(name_server.registrations()) > 1, "it waits, and asks again")
    began.send_signal(signal.SIGINT)
    out, told = began.communicate(timeout=scaled_timeout_s(20))
    assert (began.returncode, out) == (130, b"") and b"Traceback" not in told and living_kinds(slave) == []


def test_a_slave_stays_with_its_master_while_one_name_server_tells_it(make_owner):
    folder = make_owner().folder
    for rows, told in (
            ([("a:1", True), ("b:1", True), ("a:1", True), ("", True)], ["a:1", "b:1"]), ([("a:1", False)], []), ([], [])):
        write_rows(folder, NAME_SERVERS, [{"registered": is_registered, "master": master} for master, is_registered in rows])
        assert read_masters(folder) == told


@pytest.mark.ci
def test_the_other_slave_follows_the_one_that_is_promoted(tmp_path):
    port, secret = free_port(), secret_file(tmp_path)
    with contextlib.ExitStack() as stack:

        def begin(name: str, **settings) -> ServedStore:
            found = start_served(tmp_path / name, namesrvAddr=f"127.0.0.1:{port}", ha_secret_file=secret, **settings)
            stack.callback(found.close)
            return found

        host = begin("host", gateway_namesrv_cluster=True, gateway_namesrv_port=port, brokerName="broker-h")
        master = begin("master", ha_listen_port=free_port())
        eventually(lambda: "broker-a" in route(host, "TBW102"), "the master is in the routes", 60)
        first, second = (begin(f"slave{number}", broker_role="SLAVE", brokerId=number) for number in (1, 2))
        assert master.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"first").code == codes.SUCCESS
        for slave in (first, second):
            eventually(lambda slave=slave: slave.engine.positions()["wrote"] == master.engine.positions()["wrote"], "both have it", 60)
        master.engine.kill_all()
        assert "is a master now" in run("promote", first.root, "--set", f"ha_listen_port={free_port()}").stdout
        config = load_config(first.root, {}, {})
        assert config.ha_peers == f"127.0.0.1:{master.engine.settings['ha_listen_port']}", "the old master will hear of it"
        assert first.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"second").code == codes.SUCCESS
        pid = second.engine.pid("replicator")
        eventually(lambda: second.engine.positions()["wrote"] == first.engine.positions()["wrote"], "the other one follows it", 60)
        assert second.engine.pid("replicator") == pid


# ---- the gateway's own name server takes brokers ----------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A ServedStore whose name server takes brokers, its own first."""
    port = free_port()
    store = start_served(tmp_path_factory.mktemp("host") / "store", gateway_namesrv_cluster=True, gateway_namesrv_port=port,
                         namesrvAddr=f"127.0.0.1:{port}", brokerName="broker-h")
    eventually(lambda: route(store, "TBW102"), "it has registered with itself")
    yield store
    store.close()


def route(store, topic: str) -> dict[str, dict[str, str]]:
    """The addresses of each broker in a topic's route, by name and number."""
    answer = store.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    return {row["brokerName"]: row["brokerAddrs"] for row in json.loads(answer.body)["brokerDatas"]} if answer.code == 0 else {}


def perms(store, topic: str) -> dict[str, int]:
    answer = store.name_server().ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic})
    return {row["brokerName"]: row["perm"] for row in json.loads(answer.body)["queueDatas"]} if answer.code == 0 else {}


def register(client, name: str, address: str, *topics: str, number: int = 0, version: int = 1, state: int = 0, alone: bool = False,
             **more) -> Frame:
    """Register as a broker with two topics more than those given, or with those `alone`."""
    own = () if alone else (f"{name}_1", f"{name}_2")
    table = {topic: {"order": False, "perm": 6, "readQueueNums": 4, "topicFilterType": "SINGLE_TAG", "topicName": topic,
                     "topicSysFlag": 0, "writeQueueNums": 4} for topic in (*topics, *own)}
    body = json.dumps({"filterServerList": [], "topicConfigSerializeWrapper": {
        "dataVersion": {"counter": version, "stateVersion": state, "timestamp": 5}, "topicConfigTable": table}}).encode()
    fields = {"brokerName": name, "brokerAddr": address, "clusterName": "DefaultCluster", "haServerAddr": f"{address}0", "brokerId": number,
              "compressed": "false", "bodyCrc32": zlib.crc32(body) & 0x7FFFFFFF, **more}
    return client.ask(codes.REGISTER_BROKER, fields, body)


def test_routes_have_all_brokers_that_have_registered_while_they_are_connected(host):
    TopicConfigs(host.root).ensure(TopicConfig("shared"))
    own = {"0": f"127.0.0.1:{host.ports[1]}"}
    eventually(lambda: route(host, "shared") == {"broker-h": own}, "the own broker has it")
    master, slave = host.name_server(), host.name_server()
    assert register(master, "real", "10.0.0.1:1", "shared").code == codes.SUCCESS
    answer = register(slave, "real", "10.0.0.2:1", number=1)
    assert answer.fields == {"masterAddr": "10.0.0.1:1", "haServerAddr": "10.0.0.1:10"}
    assert route(host, "shared") == {"broker-h": own, "real": {"0": "10.0.0.1:1", "1": "10.0.0.2:1"}}
    found = json.loads(re.sub(rb"([{,])(\d+):", rb'\1"\2":', slave.ask(codes.GET_BROKER_CLUSTER_INFO).body))
    assert found["brokerAddrTable"].keys() == {"broker-h", "real"} and sorted(found["clusterAddrTable"]["DefaultCluster"]) == [
        "broker-h", "real"]
    assert {"shared", "real_1", "TBW102"} <= set(json.loads(slave.ask(codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER).body)["topicList"])
    master.close()
    eventually(lambda: route(host, "shared")["real"] == {"1": "10.0.0.2:1"}, "consumers read from the slave")
    slave.close()
    eventually(lambda: route(host, "shared") == {"broker-h": own} and not route(host, "real_1"), "both are gone")


def test_topics_are_taken_with_a_new_version_only_so_that_wipe_write_perm_lasts(host):
    client = host.name_server()
    register(client, "wiped", "10.0.1.1:1", "lasting")
    assert client.ask(codes.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "wiped"}).fields == {"wipeTopicCount": "3"}
    register(client, "wiped", "10.0.1.1:1", "lasting", "not yet")
    assert perms(host, "lasting") == {"wiped": 4} and not route(host, "not_yet")
    identity = {"brokerName": "wiped", "brokerAddr": "10.0.1.1:1", "clusterName": "DefaultCluster", "brokerId": 0}
    for counter, changed in ((1, "false"), (2, "true")):
        answer = client.ask(codes.QUERY_DATA_VERSION, identity, {"counter": counter, "timestamp": 5})
        assert answer.fields == {"changed": changed} and json.loads(answer.body)["counter"] == 1
    register(client, "wiped", "10.0.1.1:1", "not_yet", version=2)
    assert perms(host, "not_yet") == {"wiped": 6} and not route(host, "lasting"), "a whole table says what there is not"
    assert client.ask(codes.DELETE_TOPIC_IN_NAMESRV, {"topic": "not_yet"}).code == codes.SUCCESS and not route(host, "not_yet")
    assert client.ask(codes.UNREGISTER_BROKER, identity).code == codes.SUCCESS and not route(host, "wiped_1")


def test_a_topic_that_comes_alone_has_changed_alone(host):
    with host.name_server() as client:
        register(client, "single", "10.0.6.1:1")
        assert register(client, "single", "10.0.6.1:1", "grown", version=2, alone=True).code == codes.SUCCESS
        assert perms(host, "grown") == perms(host, "single_1") == {"single": 6}


def test_no_other_host_ends_a_registration(host):
    identity = {"brokerName": "kept", "brokerAddr": "10.0.7.1:1", "clusterName": "DefaultCluster", "brokerId": 0}
    with host.name_server() as client, Client(host.ports[0], own_host="127.0.0.66") as other:
        register(client, "kept", "10.0.7.1:1")
        assert other.ask(codes.UNREGISTER_BROKER, identity).code == codes.SUCCESS and route(host, "kept_1"), "it is answered, no more"
        assert client.ask(codes.UNREGISTER_BROKER, identity).code == codes.SUCCESS and not route(host, "kept_1")


def test_the_master_with_the_highest_term_has_the_name(host):
    old, new = host.name_server(), host.name_server()
    register(old, "pair", "10.0.2.1:1")
    register(new, "pair", "10.0.2.2:1", number=1)
    register(new, "pair", "10.0.2.2:1", state=1)
    assert route(host, "pair_1") == {"pair": {"0": "10.0.2.2:1"}}
    assert register(old, "pair", "10.0.2.1:1", version=2).code == codes.SUCCESS
    assert route(host, "pair_1") == {"pair": {"0": "10.0.2.2:1"}}
    gone = {"brokerName": "pair", "brokerAddr": "10.0.2.1:1", "clusterName": "DefaultCluster", "brokerId": 0}
    assert old.ask(codes.UNREGISTER_BROKER, gone).code == codes.SUCCESS
    old.close()
    assert route(host, "pair_1") == {"pair": {"0": "10.0.2.2:1"}}, "an old master takes nobody with it"
    new.close()
    eventually(lambda: not route(host, "pair_1"), "the routes are empty")


@pytest.mark.parametrize("changed", [
    {"bodyCrc32": 7}, {"compressed": "true"}, {"brokerName": "a b"}, {"brokerName": "x" * 500}, {"brokerName": ""},
    {"brokerAddr": "nowhere"}, {"brokerAddr": "h" * 300 + ":1"}, {"brokerAddr": "a:0"},
    {"brokerId": -1}, {"brokerId": "many"}, {"clusterName": "a/b"}],
    ids=lambda changed: " ".join(f"{name} {str(value)[:8]}" for name, value in changed.items()))
def test_a_forged_registration_is_refused(host, changed):
    client = host.name_server()
    assert register(client, "forged", "10.0.3.1:1", **changed).code == codes.SYSTEM_ERROR
    assert not route(host, "forged_1") and "broker-h" in route(host, "TBW102")


@pytest.mark.parametrize("body", [
    b"", b"[]", b"{", b'{"topicConfigSerializeWrapper":{}}', b"[" * 100_000,
    b'{"topicConfigSerializeWrapper":{"dataVersion":{},"topicConfigTable":{},"x":[%b0]}}' % (b"[]," * 300_000),
    b'{"topicConfigSerializeWrapper":{"dataVersion":{},"topicConfigTable":{},"x":[%b0]}}' % (b"0," * 1_100_000),
    b'{"topicConfigSerializeWrapper":{"dataVersion":{"counter":1e400},"topicConfigTable":{}}}'],
    ids=["empty", "list", "half", "nothing", "deep", "many objects", "many values", "infinite"])
def test_a_registration_that_is_no_table_is_refused(host, body):
    fields = {"brokerName": "strange", "brokerAddr": "10.0.3.2:1", "clusterName": "DefaultCluster", "brokerId": 0}
    assert host.name_server().ask(codes.REGISTER_BROKER, fields, body).code == codes.SYSTEM_ERROR


def test_topics_that_no_client_could_use_are_left_out(host):
    client, name = host.name_server(), "partly"
    table = {"fine": {"perm": 6}, "a/b": {"perm": 6}, "wide": {"readQueueNums": 1 << 30}, "no_row": 7, "none": {"perm": "x"}}
    body = json.dumps({"topicConfigSerializeWrapper": {"dataVersion": {}, "topicConfigTable": table}}).encode()
    fields = {"brokerName": name, "brokerAddr": "10.0.3.3:1", "clusterName": "DefaultCluster", "brokerId": 0}
    assert client.ask(codes.REGISTER_BROKER, fields, body).code == codes.SUCCESS
    assert perms(host, "fine") == {name: 6} and not any(route(host, topic) for topic in table.keys() - {"fine"})


def test_one_host_has_a_quarter_of_the_room(monkeypatch):
    monkeypatch.setattr(registration, "BROKERS_MAX", 8)
    monkeypatch.setattr(registration, "TOPICS_MAX", 40)
    routes = ClusterRoutes(SimpleNamespace(key_values=SimpleNamespace(table=dict)), None)

    def routed(connection, who, counter: int, topics) -> str:
        if not (why := routes._refusal(connection, who, topics)):
            routes._take(SimpleNamespace(connection=connection, frame=Frame(0)), who, {"stateVersion": 0, "counter": counter}, topics)
        return why

    def take(host: str, number: int, count: int, first: int = 0) -> str:
        connection = SimpleNamespace(host=host, is_closed=False, idle_s=1.0)
        who = _Identity(f"{host}-{number}", f"{host}:{number}", "c", 0)
        topics = {f"t{each}": TopicConfig(f"t{each}") for each in range(first, first + count)}
        return routed(connection, who, number, topics)

    assert [bool(take("a", number, 2)) for number in (1, 2, 3)] == [False, False, True]
    assert "topics are too many" in take("b", 1, 11) and not take("b", 1, 10)
    assert "topics are too many" in take("b", 2, 2) and not take("c", 1, 10)
    assert not take("b", 1, 1) and len(routes.brokers) == 4
    assert "topics are too many" in take("b", 1, 1, first=10), "a table that grows by single topics has the same bound"
    quiet = SimpleNamespace(host="d", is_closed=False, idle_s=3600.0)
    assert not routed(quiet, _Identity("b-1", "d:1", "other", 1), 0, {})
    assert quiet.idle_s == registration.SILENT_S, "however long other clients may be silent"
    assert routes.brokers["b-1"].cluster == "c", "a slave moves nobody to another cluster"
    assert "registered from another host" in routed(
        SimpleNamespace(host="evil"), _Identity("any", "a:1", "c", 0), 0, {}), "nobody takes an address"


def test_with_access_keys_a_broker_needs_an_admins_or_a_known_address(tmp_path):
    port = free_port()
    (tmp_path / "store" / "config").mkdir(parents=True)
    put_private(tmp_path / "store/config/plain_acl.yml", b"globalWhiteRemoteAddresses:\n- 10.9.9.9\naccounts:\n"
                b"- {accessKey: operator, secretKey: a-secret-of-the-operator, admin: true}\n")
    store = start_served(tmp_path / "store", gateway_namesrv_cluster=True, gateway_namesrv_port=port, namesrvAddr=f"127.0.0.1:{port}",
                         acl_enable=True)
    assert "AclException" in register(store.name_server(), "stranger", "10.0.4.1:1").remark and not route(store, "stranger_1")
    eventually(lambda: "not registered with the name server" in store.engine.log(), "its own broker comes from no known address")
    put_private(store.root / "config/plain_acl.yml", b"globalWhiteRemoteAddresses:\n- 127.0.0.1\naccounts: []\n")
    eventually(lambda: route(store, "TBW102"), "it has registered")
    store.close()


# ---- hostile frames -----------------------------------------------------------------------

HARMLESS = (codes.REGISTER_BROKER, codes.UNREGISTER_BROKER, codes.QUERY_DATA_VERSION, codes.GET_ROUTEINFO_BY_TOPIC,
            codes.GET_BROKER_CLUSTER_INFO, codes.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, codes.GET_TOPICS_BY_CLUSTER, codes.GET_KV_CONFIG,
            codes.GET_KVLIST_BY_NAMESPACE, codes.GET_NAMESRV_CONFIG, codes.GET_UNIT_TOPIC_LIST, 9999, -1, 1 << 31)
HARMFUL = (codes.WIPE_WRITE_PERM_OF_BROKER, codes.DELETE_TOPIC_IN_NAMESRV, codes.PUT_KV_CONFIG, codes.DELETE_KV_CONFIG,
           codes.UPDATE_NAMESRV_CONFIG, codes.REGISTER_BROKER, codes.UNREGISTER_BROKER)  # for those who may


def strange(rng, known: str) -> str:
    """Mostly the usual value, so that a frame with one strange one comes far."""
    return known if rng.random() < 0.9 else rng.choice(
        ["", " ", "x" * 5000, "x" * 70_000, "a/b", "\0", "\ud800", "é%|", "-1", "0", str(1 << 70), "1e9", "true"])


def hostile(rng, number: int, victim: dict[str, str], asked: tuple[int, ...]) -> bytes:
    """One frame with wrong fields, body or lengths, or a forged name. A flipped bit may make another code of it."""
    fields = {name: strange(rng, forged) for name, forged in (
        ("brokerName", victim.get("name", f"forged-{number % 9}")), ("brokerAddr", victim.get("address", f"10.66.0.{number % 200}:1")),
        ("clusterName", "DefaultCluster"), ("brokerId", "0"), ("haServerAddr", "10.66.0.1:2"), ("topic", victim.get("topic", "h_a")),
        ("namespace", "n"), ("key", "k"), ("value", "v"), ("compressed", "false"), ("bodyCrc32", "0"),
        ("cluster", "DefaultCluster")) if rng.random() < 0.9}
    rows = {f"h{each}": {"perm": rng.choice([6, -1, "x", 1 << 40]), "readQueueNums": rng.choice([4, 1 << 30, None])} for each in "abc"}
    table = {"dataVersion": {"counter": number, "stateVersion": rng.choice([0, 1 << 62, 1 << 80, -5, "x"])}, "topicConfigTable": rows}
    body = rng.choice([b"", b"{", b"[" * 5000, rng.randbytes(2000), b'{"topicConfigSerializeWrapper":1e999}',
                       json.dumps({"topicConfigSerializeWrapper": table}).encode()])
    code = codes.REGISTER_BROKER if rng.random() < 0.5 else rng.choice(asked)
    frame = bytearray(encode_frame(Frame(code, fields, body, opaque=number, form=rng.choice([0, 0, 1]))))
    if rng.random() < 0.3:  # flipped bits, of lengths too
        for _ in range(rng.randrange(1, 4)):
            frame[rng.randrange(min(len(frame), 200))] ^= 1 << rng.randrange(8)
    return bytes(frame)


def attack(store, rng, count: int, victim: dict[str, str], asked: tuple[int, ...]) -> None:
    """Send `count` hostile frames from another host, over connections that end in the middle."""
    number = 0
    while number < count:
        with contextlib.suppress(OSError), Client(store.ports[0], own_host="127.0.0.66") as client:
            client.socket.settimeout(0.05)
            for _ in range(rng.randrange(1, 30)):
                number += 1
                with contextlib.suppress(UnicodeError, OverflowError, struct.error, WireError):
                    client.socket.sendall(hostile(rng, number, victim, asked))
            client.socket.recv(1 << 16)


def test_hostile_frames_to_the_name_server_hurt_nobody_else(host, rng):
    with Client(host.ports[0], own_host="127.0.0.2") as victim:
        register(victim, "victim", "10.0.5.1:1", "v_1")
        before = route(host, "v_1"), route(host, "TBW102")["broker-h"]
        attack(host, rng, 1500, {}, HARMLESS)
        assert (route(host, "v_1"), route(host, "TBW102")["broker-h"]) == before
        assert register(victim, "victim", "10.0.5.1:1", "v_1", "v_2", version=2).code == codes.SUCCESS and route(host, "v_2")
    eventually(lambda: not {name for name in route(host, "TBW102") if name.startswith("forged")}, "what they registered ends with them")
    assert host.engine.incarnation("gateway") == 1


def test_with_access_keys_forged_names_hurt_nobody(tmp_path, rng):
    port = free_port()
    (tmp_path / "store" / "config").mkdir(parents=True)
    put_private(tmp_path / "store/config/plain_acl.yml", b"globalWhiteRemoteAddresses:\n- 127.0.0.1\n- 127.0.0.2\naccounts: []\n")
    store = start_served(tmp_path / "store", gateway_namesrv_cluster=True, gateway_namesrv_port=port, namesrvAddr=f"127.0.0.1:{port}",
                         acl_enable=True)
    try:
        eventually(lambda: route(store, "TBW102"), "it has registered")
        with Client(store.ports[0], own_host="127.0.0.2") as victim:
            register(victim, "victim", "10.0.5.1:1", "v_1")
            before = route(store, "v_1"), route(store, "TBW102"), perms(store, "v_1")
            attack(store, rng, 1000, {"name": "victim", "address": "10.0.5.1:1", "topic": "v_1"}, HARMFUL)
            assert (route(store, "v_1"), route(store, "TBW102"), perms(store, "v_1")) == before
            asked = victim.ask(codes.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
            assert asked.code == codes.QUERY_NOT_FOUND and store.engine.incarnation("gateway") == 1
    finally:
        store.close()


def test_three_hosts_are_a_cluster_by_themselves(tmp_path):
    ports = [free_port() for _ in range(3)]
    addresses = ";".join(f"127.0.0.1:{port}" for port in ports)
    stores = [start_served(tmp_path / str(number), gateway_namesrv_cluster=True, gateway_namesrv_port=port, namesrvAddr=addresses,
                           brokerName=f"broker-{number}") for number, port in enumerate(ports)]
    try:
        for store in stores:
            eventually(lambda store=store: len(route(store, "TBW102")) == 3, "each knows each")
        client = stores[0].broker()
        for each in stores[:2]:
            assert each.broker().ask(codes.SEND_MESSAGE_V2, send_fields("shared", d=2), b"x").code == codes.SUCCESS
        for name in ("a", "b"):
            heartbeat(stores[0].broker(), name, "sharers", subscription("shared"))
        asked = {"topic": "shared", "consumerGroup": "sharers", "clientId": "a", "strategyName": "AVG", "messageModel": "CLUSTERING"}

        def shares(**changes):
            rows = json.loads(client.ask(codes.QUERY_ASSIGNMENT, body=asked | changes).body)["messageQueueAssignments"]
            return [(row["messageQueue"]["brokerName"], row["messageQueue"]["queueId"]) for row in rows or ()]

        eventually(lambda: shares() == [("broker-0", 0), ("broker-0", 1)], "half of the queues of both brokers are its share")
        assert shares(clientId="b") == [("broker-1", 0), ("broker-1", 1)]
        stores[0].engine.kill_all()
        for store in stores[1:]:
            eventually(lambda store=store: route(store, "TBW102").keys() == {"broker-1", "broker-2"}, "they know who has gone", 10)
    finally:
        for store in stores:
            store.close()


@pytest.mark.parametrize("counts, found", usual([
    ((2, 1), 3), ((20_000_000,), 0), ((65_536, 1), 0), ((-5, 2), 2)], [((65_536, 1), 0)], pytest.mark.ci))
def test_of_a_route_with_more_queues_than_a_topic_can_have_nobody_has_a_share(start, name_server, counts, found):
    """The lists of its queues would fill the memory."""
    usual, rows = name_server.answer, [{"brokerName": f"b{at}", "perm": 6, "readQueueNums": count} for at, count in enumerate(counts)]
    name_server.answer = lambda frame: usual(frame) if frame.code != codes.GET_ROUTEINFO_BY_TOPIC else Frame(
        codes.SUCCESS, {}, json.dumps({"queueDatas": rows}).encode(), frame.opaque, ANSWER)
    client = start(name_server).broker()
    name_server.wait_for()
    assert heartbeat(client, "a", "sharers", subscription("wide")).code == codes.SUCCESS
    asked = {"topic": "wide", "consumerGroup": "sharers", "clientId": "a", "strategyName": "AVG", "messageModel": "CLUSTERING"}
    assert len(json.loads(client.ask(codes.QUERY_ASSIGNMENT, body=asked).body)["messageQueueAssignments"] or ()) == found


# ---- settings -------------------------------------------------------------------------


def test_rocketmqs_variable_counts_for_a_gateway_without_the_setting(tmp_path):
    environment = {"NAMESRV_ADDR": "10.0.0.1:9876;10.0.0.2:9876;10.0.0.1:9876"}
    assert load_config(tmp_path, {"gateway_enable": True}, environment).name_servers == ["10.0.0.1:9876", "10.0.0.2:9876"]
    assert load_config(tmp_path, {}, environment).name_servers == []
    assert load_config(tmp_path, {"gateway_enable": True, "namesrvAddr": "10.0.0.3:9876"}, environment).name_servers == ["10.0.0.3:9876"]


    assert load_config(tmp_path, {"gateway_enable": True, "namesrvAddr": ""}, environment).name_servers == [], "it is its own"


def test_a_brokers_file_says_of_which_cluster_it_is(tmp_path):
    (tmp_path / "broker.conf").write_text("namesrvAddr=10.0.0.1:9876;10.0.0.2:9876\nbrokerId=2\nslaveReadEnable=true\n")
    settings, rows = read_broker_conf(tmp_path / "broker.conf", None, {})
    assert settings == {"namesrv_addr": "10.0.0.1:9876;10.0.0.2:9876", "broker_id": "2", "slave_read_enable": "true"}
    assert not any(row["is_note"] for row in rows)


@pytest.mark.parametrize("settings", [
    {"gateway_namesrv_cluster": True}, {"namesrv_addr": "10.0.0.1"}, {"namesrv_addr": "a:1;b:0"}, {"namesrv_addr": "a:99999"},
    {"namesrv_addr": "a:1", "gateway_enable": True, "gateway_listen_host": "0.0.0.0"}])
def test_an_address_that_cannot_be_used_is_refused_at_the_start(tmp_path, settings):
    with pytest.raises(ConfigError, match="namesrv_addr"):
        load_config(tmp_path, settings, {})
