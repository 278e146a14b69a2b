"""The gateway as a whole: where it listens, how it comes and goes, what it writes into the log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
import struct
from types import SimpleNamespace

import psutil
import pytest

from crash.replicas import free_port
from fix_cli import spawn
from fix_engine import SMALL
from fix_gateway import Client, heartbeat, pull_fields, send_fields, start_served, subscription
from fix_pop import pop_fields
from pyengine.errors import EngineError
from pyengine.gateway import codes
from pyengine.gateway import gateway as gateway_module
from pyengine.gateway.gateway import repeat
from pyengine.gateway.wire import Frame, encode_frame
from reported import Reported
from waiting import eventually, scaled_timeout_s


def test_it_listens_for_this_machine_alone_by_default(served):
    process = psutil.Process(served.engine.pid("gateway"))
    listening = {connection.laddr for connection in process.net_connections() if connection.status == psutil.CONN_LISTEN}
    assert {address.ip for address in listening} == {"127.0.0.1"} and set(served.ports) <= {address.port for address in listening}


def test_a_stop_does_not_wait_for_the_next_heartbeat(monkeypatch):
    monkeypatch.setattr(gateway_module, "HEARTBEAT_INTERVAL_S", 3600.0)
    did = []
    attached = SimpleNamespace(incarnation=1, heartbeat=lambda: None, set_blocked_reason=lambda text: None)

    async def do(name: str) -> None:
        did.append(name)

    async def work() -> None:
        ready = asyncio.Event()
        attached.ready, attached.stopping = ready.set, False
        serving = asyncio.create_task(gateway_module.serve(lambda: do("start"), lambda: do("close"), attached))
        await ready.wait()
        did.append("stop")
        attached.stopping = True
        attached.on_signal()
        await asyncio.wait_for(serving, scaled_timeout_s(60))

    asyncio.run(work())
    attached.on_signal()  # a second signal, when the loop has ended
    assert did == ["start", "stop", "close"]


def test_an_engine_without_the_setting_has_none(make_engine):
    engine = make_engine()
    engine.start()
    assert "gateway" not in engine.pids()


def test_the_port_less_two_is_served_too(tmp_path):
    served = start_served(tmp_path / "store", gateway_broker_port=free_port())
    try:
        socket.create_connection(("127.0.0.1", served.ports[1] - 2), 30).close()
    finally:
        served.close()


def test_a_start_with_a_taken_gateway_port_fails_with_the_reason_in_the_log(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as other:
        engine = make_engine(gateway_enable=True, gateway_namesrv_port=0, gateway_broker_port=other.getsockname()[1])
        with pytest.raises(EngineError):
            engine.start()
    assert re.search("cannot listen: .*in use: stop what listens there, or set gateway_listen_host, gateway_broker_port and", engine.log())


def test_a_client_with_many_slow_requests_holds_up_no_other(served, topic):
    """Each of them writes a file: they wait for a thread, and no others behind them."""
    one, other = served.name_server(), served.broker()
    sent = [one.send(codes.DELETE_KV_CONFIG, {"namespace": "none", "key": key}) for key in range(400)]
    assert one.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == codes.SUCCESS, "they are all read"
    found = other.ask(codes.SEARCH_OFFSET_BY_TIMESTAMP, {"topic": topic, "queueId": 1, "timestamp": 0})
    assert found.code == codes.SUCCESS
    assert one.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}).code == codes.SUCCESS
    assert not one.is_answered(sent[-1]), "the first client's wait on"


def test_clients_that_go_before_their_answers_do_not_fill_the_log(served):
    before, refused = len(served.engine.log()), encode_frame(Frame(codes.SEND_MESSAGE_V2, {"b": "", "e": "0"})) * 300
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", served.ports[1])) as gone:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(refused)
    assert served.broker().ask(codes.GET_BROKER_CONFIG).code == codes.SUCCESS
    assert served.engine.log()[before:].count("\n") < 20


@pytest.fixture
def slave(tmp_path):
    """A store that was a master and is a slave now, whose master is gone; it has the topic T, with a message in queue 0."""
    master = start_served(tmp_path / "store")
    assert master.broker().ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"first").code == codes.SUCCESS
    master.engine.stop()
    served = start_served(master.root, broker_role="SLAVE", ha_master_address=f"127.0.0.1:{free_port()}")
    yield served
    served.close()
    master.close()


def test_a_slave_refuses_what_a_slave_of_rocketmq_refuses(slave):
    client, config = slave.broker(), slave.root / "config"

    def files() -> dict[str, bytes]:
        return {name: (config / name).read_bytes() for name in ("topics.json", "subscriptionGroup.json") if (config / name).exists()}

    before, change = files(), "Can't modify topic or subscription group from slave broker, please execute it from master broker."
    for code, fields, body in ((codes.UPDATE_AND_CREATE_TOPIC, {"topic": "New"}, b""), (codes.DELETE_TOPIC_IN_BROKER, {"topic": "T"}, b""),
                               (codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, {"groupName": "new"}),
                               (codes.DELETE_SUBSCRIPTIONGROUP, {"groupName": "readers"}, b"")):
        answer = client.ask(code, fields, body)
        assert (answer.code, answer.remark) == (codes.SYSTEM_ERROR, change)
    for topic in ("T", "New"):
        for code, fields in ((codes.SEND_MESSAGE_V2, send_fields(topic)), (codes.SEND_BATCH_MESSAGE, send_fields(topic)),
                             (codes.SEND_MESSAGE, {"producerGroup": "p", "topic": topic, "defaultTopic": "TBW102", "queueId": 0}),
                             (codes.SEND_MESSAGE_V2, send_fields(topic, 0, "TRAN_MSG\x01true\x02PGROUP\x01p"))):
            answer = client.ask(code, fields, b"x")
            assert answer.code == codes.SERVICE_NOT_AVAILABLE and "messages are put to the slave" in answer.remark
    back = client.ask(codes.CONSUMER_SEND_MSG_BACK, {"group": "readers", "offset": 0, "delayLevel": 1})
    assert (back.code, back.remark) == (codes.SYSTEM_ERROR, "SERVICE_NOT_AVAILABLE")
    ended = client.ask(codes.END_TRANSACTION, {"tranStateTableOffset": 0, "commitLogOffset": 0, "commitOrRollback": 8})
    assert (ended.code, ended.remark) == (codes.SLAVE_NOT_AVAILABLE, None)
    resumed = client.ask(codes.RESUME_CHECK_HALF_MESSAGE, {"msgId": "7F00000100002A9F0000000000000000"})
    assert resumed.code == codes.SYSTEM_ERROR and resumed.remark.startswith("Put message back to")
    for topic in ("T", "New"):  # its producer is not there, and the slave does not store it
        assert "channel of <gone> not found" in client.ask(codes.SEND_REPLY_MESSAGE_V2, send_fields(
            topic, 0, "REPLY_TO_CLIENT\x01gone"), b"reply").remark
    assert heartbeat(client, "me", "fresh", subscription("T")).code == codes.SUCCESS
    assert files() == before, "topics and groups are the master's"


def test_a_slave_serves_pulls_and_commits_no_offset_of_them(slave):
    client = slave.broker()
    found = client.ask(codes.PULL_MESSAGE, pull_fields("T", group="fresh", sysFlag=5, commitOffset=1))
    assert found.code == codes.SUCCESS and b"first" in found.body and found.fields["suggestWhichBrokerId"] == "0"
    asked = {"consumerGroup": "fresh", "topic": "T", "queueId": 0}
    assert client.ask(codes.QUERY_CONSUMER_OFFSET, asked).fields == {"offset": "0"}, "the queue's begin: none is committed"
    for offset in (7, -7):
        ahead = client.ask(codes.PULL_MESSAGE, pull_fields("T", offset, group="fresh"))
        assert (ahead.code, ahead.fields["nextBeginOffset"]) == (codes.PULL_RETRY_IMMEDIATELY, str(offset)), "its consumer stays there"
    assert client.ask(codes.UPDATE_CONSUMER_OFFSET, asked | {"commitOffset": 1}).code == codes.SUCCESS, "as by RocketMQ's slave"
    refused = client.ask(codes.POP_MESSAGE, pop_fields("T", "g"))
    assert refused.code == codes.NO_PERMISSION and "this is a slave" in refused.remark
    handle = {"consumerGroup": "g", "topic": "T", "queueId": 0, "offset": 0, "extraInfo": "0 1 60000 0 0 broker-a 0 0"}
    for code in (codes.ACK_MESSAGE, codes.CHANGE_MESSAGE_INVISIBLETIME):
        assert client.ask(code, handle | {"invisibleTime": 1}).code == codes.NO_MESSAGE
    assert not (slave.root / "config" / "consumers" / "acks" / "T@g").exists()


@pytest.mark.parametrize(("settings", "far", "near"), [
    ({"slaveReadEnable": True, "accessMessageInMemoryMaxRatio": 0}, "3", "2"),
    pytest.param({"slaveReadEnable": True}, "2", "2", marks=pytest.mark.ci),
    ({"accessMessageInMemoryMaxRatio": 0}, "0", "0")], ids=["far behind", "near", "off"])
def test_a_group_that_is_far_behind_is_sent_to_the_broker_that_its_settings_name(tmp_path, settings, far, near):
    served = start_served(tmp_path / "store", **settings)
    client = served.broker()
    group = {"groupName": "readers", "retryMaxTimes": 7, "retryQueueNums": 1, "brokerId": 2, "whichBrokerWhenConsumeSlowly": 3}
    assert client.ask(codes.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, body=group).code == codes.SUCCESS
    for body in (b"old", b"new"):
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("T"), body).code == codes.SUCCESS
    eventually(lambda: client.ask(codes.PULL_MESSAGE, pull_fields("T", 1)).code == codes.SUCCESS, "both are dispatched")
    found = [client.ask(codes.PULL_MESSAGE, pull_fields("T", offset)) for offset in (0, 2)]
    assert [(answer.code, answer.fields["suggestWhichBrokerId"]) for answer in found] == [
        (codes.SUCCESS, far), (codes.PULL_NOT_FOUND, near)]
    served.close()


def test_a_repeated_step_continues_after_failures_and_reports_equal_ones_in_a_row_once():
    fails = [EngineError("no room"), EngineError("no room"), ValueError("odd"), None, ValueError("odd")]
    reported, done = Reported(), []

    async def whole():
        over = asyncio.Event()

        def step():
            done.append(None)
            if len(done) > len(fails):
                over.set()
            elif (error := fails[len(done) - 1]) is not None:
                raise error

        task = asyncio.create_task(repeat(0, step, reported, "it failed"))
        await asyncio.wait_for(over.wait(), 60)
        task.cancel()

    asyncio.run(whole())
    assert reported == ["it failed: no room", "it failed: ValueError('odd')", "it failed: ValueError('odd')"]


def test_it_may_open_a_file_for_each_connection(make_engine):
    engine = make_engine(gateway_enable=True, gateway_namesrv_port=0, gateway_broker_port=0, gateway_connections_max=3000)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    engine.start()
    soft = psutil.Process(engine.pid("gateway")).rlimit(psutil.RLIMIT_NOFILE)[0]
    assert soft == resource.RLIM_INFINITY or soft >= (3512 if hard == resource.RLIM_INFINITY else min(hard, 3512))


def test_it_takes_no_more_connections_than_it_may_have_files(tmp_path):
    root, port = tmp_path / "store", free_port()
    settings = SMALL | {"gateway_enable": "true", "gateway_namesrv_port": 0, "gateway_broker_port": port}
    done = spawn("start", root, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    assert done.code == 0, done
    try:
        assert "CONNECTIONS_FEWER at most 16 and not 1024" in (root / "engine.log").read_text()
        clients = [Client(port, own_host=f"127.0.0.{2 + number % 5}") for number in range(80)]
        for client in clients[16:]:
            client.socket.settimeout(scaled_timeout_s(30))
            with contextlib.suppress(ConnectionResetError):
                assert client.socket.recv(1) == b""
        assert [client.ask(codes.GET_BROKER_RUNTIME_INFO).code for client in clients[:16]] == [codes.SUCCESS] * 16
    finally:
        assert spawn("stop", root).code == 0


@pytest.mark.ci
def test_offsets_that_wait_to_be_written_are_a_blocked_reason_that_a_stop_repeats(tmp_path):
    served = start_served(tmp_path / "store")
    try:
        root, lock = served.engine.root, tmp_path / "store" / "config" / "consumerOffset.json.lock"
        lock.unlink(missing_ok=True)
        lock.mkdir(parents=True)  # a disk without room refuses the write as this does
        with Client(served.ports[1]) as client:
            assert client.ask(codes.SEND_MESSAGE_V2, send_fields("T"), b"x").code == codes.SUCCESS
            commit = {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": 3}
            assert client.ask(codes.UPDATE_CONSUMER_OFFSET, commit).code == codes.SUCCESS
        said = "the groups' offsets cannot be written"
        eventually(lambda: said in spawn("status", root).stdout, "the status says so")
        done = spawn("stop", root)
        assert done.code == 0 and f"note: the gateway was blocked when it ended: {said}" in done.stderr, done
    finally:
        served.close()
