"""Access keys and TLS of clients of RocketMQ 5, and what one of them cannot do to the others."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
import subprocess
import sys

import psutil
import pytest
import trustme

from crash.replicas import free_port
from fix_gateway import put_certificate, put_private, send_fields
from grpc_caller import V2, Caller, Relay, duration, message, start_grpc
from pyengine.engine_config import EngineConfig
from pyengine.gateway import codes
from pyengine.gateway.connections import Limits
from pyengine.gateway.grpc_clients import GrpcClients
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups
from waiting import eventually, scaled_timeout_s

LIST = b"""
accounts:
- {accessKey: the-shop, secretKey: its-secret, topicPerms: [orders=PUB|SUB], groupPerms: [billing=SUB]}
- {accessKey: the-boss, secretKey: boss-secret, admin: true, tlsOnly: true}
"""
STAMP = "20261128T122215Z"


def signed(key: str, secret: str, stamp: str = STAMP) -> dict[str, str]:
    """The metadata of a call as RocketMQ's clients sign it."""
    signature = hmac.digest(secret.encode(), stamp.encode(), "sha1").hex()
    return {"x-mq-date-time": STAMP,
            "authorization": f"MQv2-HMAC-SHA1 Credential={key}, SignedHeaders=x-mq-date-time, Signature={signature}"}


SHOP = signed("the-shop", "its-secret")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A GrpcStore with an access list and TLS, and what its clients trust."""
    import grpc

    root = tmp_path_factory.mktemp("guarded") / "store"
    (root / "config").mkdir(parents=True)
    put_private(root / "config" / "plain_acl.yml", LIST)
    authority = trustme.CA()
    store = start_grpc(root, acl_enable=True, gateway_tls_mode="enforcing", **put_certificate(root / "config", authority))
    for name in ("orders", "others"):
        store.make_topic(name)
    store.credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    store.authority = authority
    yield store
    store.close()


def test_an_account_does_what_its_rights_allow(guarded):
    shop = guarded.caller(credentials=guarded.credentials, metadata=SHOP)
    assert shop.QueryRoute(topic=V2.Resource(name="orders")).status.code == V2.OK
    assert shop.send("orders", b"body").status.code == V2.OK
    refused = shop.send("others", b"body").status
    assert (refused.code, refused.message) == (V2.UNAUTHORIZED, "No default permission for topic:others")
    found, = eventually(lambda: shop.receive("orders", "billing")[0], "it comes")
    assert shop.ack("orders", "billing", found).status.code == V2.OK
    assert shop.receive("orders", "thieves")[1].code == V2.UNAUTHORIZED
    assert shop.receive("others", "billing")[1].code == V2.UNAUTHORIZED
    boss = guarded.caller(credentials=guarded.credentials, metadata=signed("the-boss", "boss-secret"))
    assert boss.send("others", b"body").status.code == V2.OK  # by TLS


@pytest.mark.parametrize("metadata", [{}, signed("nobody", "its-secret"), signed("the-shop", "wrong"),
                                      signed("the-shop", "its-secret", "20261128T122216Z"),
                                      {"authorization": "x", "x-mq-date-time": STAMP}])
def test_a_call_without_a_right_signature_is_refused(guarded, metadata):
    caller = guarded.caller(credentials=guarded.credentials, metadata=metadata)
    assert caller.QueryRoute(topic=V2.Resource(name="orders")).status.code == V2.UNAUTHORIZED
    assert caller.SendMessage().status.code == V2.UNAUTHORIZED
    assert caller.receive("orders", "billing")[1].code == V2.UNAUTHORIZED
    assert caller.settings(client_type=V2.PRODUCER, publishing=V2.Publishing()).status.code == V2.UNAUTHORIZED


def test_a_changed_list_counts_within_seconds(guarded):
    new = signed("the-clerk", "clerk-secret")
    caller = guarded.caller(credentials=guarded.credentials, metadata=new)
    assert caller.QueryRoute(topic=V2.Resource(name="orders")).status.code == V2.UNAUTHORIZED
    put_private(guarded.root / "config" / "plain_acl.yml",
                LIST + b"- {accessKey: the-clerk, secretKey: clerk-secret, defaultTopicPerm: PUB}\n")
    eventually(lambda: caller.send("others", b"body").status.code == V2.OK if caller.QueryRoute(
        topic=V2.Resource(name="orders")).status.code == V2.OK else False, "the new account may send")


def test_a_renewed_certificate_is_shown_and_a_plain_client_is_not_served(guarded):
    import ssl

    import grpc

    def serial() -> str:
        context = ssl.create_default_context()
        guarded.authority.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", guarded.grpc_port), 30) as plain, \
                context.wrap_socket(plain, server_hostname="localhost") as secure:
            return secure.getpeercert()["serialNumber"]

    before = serial()
    put_certificate(guarded.root / "config", guarded.authority)
    eventually(lambda: serial() != before, "a new connection gets the new certificate")
    with pytest.raises(grpc.RpcError) as refused:
        guarded.caller(metadata=SHOP).QueryRoute(topic=V2.Resource(name="orders"), timeout=5)
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    assert "Handshake failed" not in guarded.engine.log()  # of which a client could cause any number


# ---- limits ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A GrpcStore with low limits."""
    store = start_grpc(tmp_path_factory.mktemp("small") / "store", gateway_connections_max=64, gateway_address_connections_max=8,
                       grpc_calls_max=24, gateway_memory_max_bytes=16 << 20, gateway_frame_max_bytes=64 << 20)
    store.make_topic("orders")
    yield store
    store.close()


def test_clients_beyond_the_limit_of_an_address_are_refused(small):
    caller = small.caller()  # one connection: the ninth one would be ended

    def each_client(method: str, **fields) -> list:
        answers = []
        for number in range(9):
            caller.metadata = [("x-mq-client-id", f"many@{number}"), ("x-mq-language", "PYTHON")]
            answers.append(getattr(caller, method)(**fields).status)
        return answers

    statuses = each_client("QueryRoute", topic=V2.Resource(name="orders"))
    assert [status.code for status in statuses] == [V2.OK] * 8 + [V2.TOO_MANY_REQUESTS]
    assert "gateway_address_connections_max" in statuses[-1].message
    each_client("NotifyClientTermination")
    assert caller.QueryRoute(topic=V2.Resource(name="orders")).status.code == V2.OK
    caller.NotifyClientTermination()


def held_receives(store, caller, number: int) -> list:
    """Receives of an empty topic, which the gateway holds."""
    request = V2.ReceiveMessageRequest(
        group=V2.Resource(name="many"), message_queue=V2.MessageQueue(topic=V2.Resource(name="orders"), id=-1), batch_size=1,
        invisible_duration=duration(30), long_polling_timeout=duration(20))
    return [caller.stub("ReceiveMessage")(request, metadata=caller.metadata, timeout=60) for _ in range(number)]


def route_of(caller):
    """The status of a route, or gRPC's code if it gives none."""
    import grpc

    try:
        return caller.QueryRoute(topic=V2.Resource(name="orders")).status.code
    except grpc.RpcError as error:
        return error.code()


def test_an_address_has_half_of_the_calls_and_another_is_served_meanwhile(small):
    callers = [small.caller() for _ in range(2)]
    held = [call for caller in callers for call in held_receives(small, caller, 6)]
    late = small.caller()
    eventually(lambda: route_of(late) == V2.TOO_MANY_REQUESTS, "a thirteenth call from there is refused")
    with Relay(small.grpc_port, "127.0.0.2") as relay:
        other = Caller(relay.port)
        assert route_of(other) == V2.OK
        other.NotifyClientTermination()
        other.close()
    for call in held:
        call.cancel()
    eventually(lambda: route_of(late) == V2.OK, "later calls are served")
    for caller in (late, *callers):
        caller.NotifyClientTermination()


def test_calls_beyond_the_limit_of_all_are_refused_and_later_ones_served(small):
    import grpc

    with Relay(small.grpc_port, "127.0.0.2") as relay:
        callers = [small.caller(), Caller(relay.port)]
        held = [call for caller in callers for call in held_receives(small, caller, 12)]
        late = small.caller()
        eventually(lambda: route_of(late) is grpc.StatusCode.RESOURCE_EXHAUSTED, "one more call is refused")
        for call in held:
            call.cancel()
        eventually(lambda: route_of(late) == V2.OK, "later calls are served")
        for caller in (late, *callers):
            caller.NotifyClientTermination()
        callers[1].close()


def test_with_permissive_tls_one_more_port_takes_plain_clients(tmp_path):
    import grpc

    root, authority, port = tmp_path / "store", trustme.CA(), free_port()
    (root / "config").mkdir(parents=True)
    put_private(root / "config" / "plain_acl.yml", LIST)
    store = start_grpc(root, acl_enable=True, gateway_tls_mode="permissive", grpc_plain_port=port,
                       **put_certificate(root / "config", authority))
    try:
        store.make_topic("orders")
        boss = signed("the-boss", "boss-secret")
        secure = store.caller(credentials=grpc.ssl_channel_credentials(authority.cert_pem.bytes()), metadata=boss)
        plain, boss_by_plain = Caller(port, metadata=SHOP), Caller(port, metadata=boss)
        assert plain.send("orders", b"plain").status.code == secure.send("orders", b"secure").status.code == V2.OK
        ports = [caller.QueryRoute(topic=V2.Resource(name="orders")).message_queues[0].broker.endpoints.addresses[0].port
                 for caller in (secure, plain)]
        assert ports == [store.grpc_port, port]
        assert boss_by_plain.send("orders", b"x").status.code == V2.UNAUTHORIZED  # tlsOnly
        for caller in (plain, boss_by_plain):
            caller.close()
    finally:
        store.close()


def test_a_port_that_is_not_free_keeps_no_other_one(tmp_path):
    from pyengine.gateway.grpc_service import GrpcServer

    (tmp_path / "config").mkdir()
    first, second = free_port(), free_port()
    config = EngineConfig(grpc_enable=True, grpc_port=first, gateway_tls_mode="permissive", grpc_plain_port=second,
                          **put_certificate(tmp_path / "config", trustme.CA()))

    async def begin() -> None:
        server = GrpcServer(tmp_path, config, tmp_path, report=lambda *_: None)
        with pytest.raises(OSError, match=f":{second} is not free"):
            await server.start()
        socket.create_server(("127.0.0.1", first)).close()
        await server.close()

    with socket.create_server(("127.0.0.1", second)):
        asyncio.run(begin())


def test_messages_beyond_the_memory_of_all_are_refused(small):
    caller = small.caller()
    answer = caller.SendMessage(messages=[message("orders", bytes(3 << 20)) for _ in range(6)])
    assert answer.status.code == V2.TOO_MANY_REQUESTS and "gateway_memory_max_bytes" in answer.status.message
    assert caller.send("orders", b"small").status.code == V2.OK
    caller.NotifyClientTermination()


@pytest.mark.parametrize("is_fifo", [False, True])
def test_messages_that_did_not_reach_a_client_are_not_counted(tmp_path, is_fifo):
    """Those that the limit of memory refuses, and those of a receive that its client ends, which has left meanwhile."""
    import grpc

    store = start_grpc(tmp_path / "store", gateway_memory_max_bytes=2 << 20)
    try:
        store.make_topic("T", 2)
        SubscriptionGroups(store.root).put(SubscriptionGroup("g", retry_max_times=1, more={"consumeMessageOrderly": is_fifo}))
        broker, reader, slow = store.broker(), store.caller(), store.caller()
        for queue_id in range(2):
            assert broker.ask(codes.SEND_MESSAGE_V2, send_fields("T", queue_id), bytes(800_000)).code == codes.SUCCESS
        request = V2.ReceiveMessageRequest(
            group=V2.Resource(name="g"), message_queue=V2.MessageQueue(topic=V2.Resource(name="T"), id=0), batch_size=1,
            invisible_duration=duration(3600), long_polling_timeout=duration(20))
        channel = grpc.insecure_channel(f"127.0.0.1:{store.grpc_port}", [("grpc.http2.bdp_probe", 0)])
        call = channel.unary_stream(f"/{V2.service}/ReceiveMessage")(request.SerializeToString(), metadata=slow.metadata)
        next(call)  # it is under way, and no message of it is read
        for _ in range(5):
            status = reader.receive("T", "g", queue_id=1, batch=1, invisible_s=3600, poll_s=20)[1]
            assert status.code == V2.TOO_MANY_REQUESTS and "gateway_memory_max_bytes" in status.message
        slow.NotifyClientTermination()
        call.cancel()
        channel.close()
        found = [eventually(lambda: reader.receive("T", "g", queue_id=queue_id, batch=1)[0], "it comes")[0] for queue_id in range(2)]
        assert [each.system_properties.delivery_attempt for each in found] == [1, 1]
    finally:
        store.close()


def test_a_client_that_does_not_read_costs_little_and_its_messages_come_to_others(small):
    import grpc

    sender, group, topic = small.caller(), "slow_readers", small.make_topic("slow")
    for at in range(40):
        assert sender.send(topic, b"%03d" % at + bytes(100_000)).status.code == V2.OK
    pid = small.engine.pid("grpc")
    before = psutil.Process(pid).memory_info().rss
    slow = small.caller()
    request = V2.ReceiveMessageRequest(
        group=V2.Resource(name=group), message_queue=V2.MessageQueue(topic=V2.Resource(name=topic), id=-1), batch_size=32,
        invisible_duration=duration(3), long_polling_timeout=duration(1))
    channel = grpc.insecure_channel(f"127.0.0.1:{small.grpc_port}", [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)])
    calls = [channel.unary_stream(f"/{V2.service}/ReceiveMessage")(request.SerializeToString(), metadata=slow.metadata, timeout=4)
             for _ in range(4)]
    found = set()

    def has_all() -> bool:
        messages = sender.receive(topic, group, poll_s=1)[0]
        found.update(each.body[:3] for each in messages)
        if messages:
            sender.ack(topic, group, *messages)
        return len(found) == 40

    eventually(has_all, "all come to one that reads")
    assert psutil.Process(pid).memory_info().rss - before < 64 << 20
    for call in calls:
        call.cancel()
    channel.close()
    assert small.engine.pid("grpc") == pid


def test_connections_beyond_the_limit_are_closed_and_later_ones_served(small):
    silent = [socket.create_connection(("127.0.0.1", small.grpc_port), 30) for _ in range(64)]
    for each in silent:
        each.settimeout(30)
    with socket.create_connection(("127.0.0.1", small.grpc_port), 30) as refused:
        refused.settimeout(30)
        assert refused.recv(1) == b""
    for each in silent:
        each.close()

    def is_served() -> bool:
        import grpc

        try:
            return small.caller().QueryRoute(topic=V2.Resource(name="orders"), timeout=5).status.code == V2.OK
        except grpc.RpcError:
            return False

    eventually(is_served, "a later one is served")


def test_silent_connections_beyond_a_host_s_share_are_ended_and_its_clients_served(small):
    with Relay(small.grpc_port, "127.0.0.3") as relay:
        caller = Caller(relay.port)
        assert route_of(caller) == V2.OK
        held, = held_receives(small, caller, 1)
        silent = [socket.create_connection(("127.0.0.1", small.grpc_port), 30, ("127.0.0.3", 0)) for _ in range(20)]
        for each in silent:
            each.setblocking(False)
        ended = set()

        def are_ended() -> bool:
            for each in silent:
                with contextlib.suppress(BlockingIOError):
                    if each.recv(4096) == b"":
                        ended.add(each)
            return len(ended) >= 13

        eventually(are_ended, "eight are left, one of them the client's")
        assert len(ended) == 13 and held.is_active()
        told = re.compile(r"client 127\.0\.0\.3: \d+ connections beyond its share are ended")
        eventually(lambda: told.search(small.engine.log()), "it is told")
        held.cancel()
        for each in silent:
            each.close()
        caller.NotifyClientTermination()
        caller.close()


def test_connections_that_say_nothing_or_no_http2_harm_nobody(small):
    sockets = []
    for first in (b"", b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096,
                  b"\x16\x03\x01\x00\x05hello"):
        sockets.append(socket.create_connection(("127.0.0.1", small.grpc_port), 30))
        sockets[-1].sendall(first)
    caller = small.caller()
    assert caller.QueryRoute(topic=V2.Resource(name="orders")).status.code == V2.OK
    caller.NotifyClientTermination()
    for each in sockets:
        each.close()


# ---- turns -----------------------------------------------------------------------------


def test_a_call_of_another_host_or_client_begins_before_a_flood_that_waits(tmp_path):
    begun = []

    async def call(clients, client, name: str) -> None:
        await clients.turn(client)
        begun.append(name)

    async def run() -> None:
        clients = GrpcClients(tmp_path, Limits(), 4096)
        flooding, neighbour, other = [clients.find(f"c{number}", f"ipv4:10.0.0.{host}:{number}", "", "", is_secure=False)
                                      for number, host in enumerate((7, 7, 8))]
        flood = [asyncio.ensure_future(call(clients, flooding, "flood")) for _ in range(200)]
        await asyncio.sleep(0)
        flood[50].cancel()
        await asyncio.gather(call(clients, other, "other"), call(clients, neighbour, "neighbour"), *flood, return_exceptions=True)

    asyncio.run(run())
    assert begun.count("flood") == 199 and max(begun.index("other"), begun.index("neighbour")) < 5


def test_calls_that_are_cancelled_while_they_wait_cost_no_turn(tmp_path):
    async def run() -> int:
        clients = GrpcClients(tmp_path, Limits(), 4096)
        flooding = [clients.find(f"c{number}", "ipv4:10.0.0.7:1", "", "", is_secure=False) for number in range(2)]
        await clients.turn(flooding[0])
        flood = [asyncio.ensure_future(clients.turn(client)) for client in flooding for _ in range(1000)]
        await asyncio.sleep(0)
        for each in flood:
            each.cancel()
        waiting, rounds = asyncio.ensure_future(clients.turn(flooding[0])), 0
        while not waiting.done():
            await asyncio.sleep(0)
            rounds += 1
        return rounds

    assert asyncio.run(run()) < 100


@pytest.mark.ci
def test_a_flood_of_one_host_makes_no_call_of_another_fail(tmp_path):
    import grpc

    def ended_with(call):
        return call.exception().code() if call.exception() else call.result().status.code

    store = start_grpc(tmp_path / "store")
    try:
        topic = store.make_topic("orders")
        flooding = [store.caller() for _ in range(8)]
        sending = [each.stub("SendMessage").future(V2.SendMessageRequest(messages=[message(topic, b"flood")]),
                                                   metadata=each.metadata, timeout=scaled_timeout_s(120))
                   for _ in range(480) for each in flooding]
        with Relay(store.grpc_port, "127.0.0.2") as relay:
            other = Caller(relay.port)
            assert [other.send(topic, b"one").status.code for _ in range(20)] == [V2.OK] * 20
            other.close()
        # Beyond half of grpc_calls_max; gRPC drops those that it could not give out within UNREQUESTED_S.
        assert set(map(ended_with, sending)) <= {V2.OK, V2.TOO_MANY_REQUESTS, grpc.StatusCode.CANCELLED}
    finally:
        store.close()


@pytest.mark.parametrize("module, told", [
    ("grpc", "BootFailedError gRPC needs packages that are not installed"), ("pyengine.gateway.grpc_messages", "ImportError ")])
def test_only_without_its_packages_the_worker_says_what_to_install(module, told):
    program = """
import sys, types
sys.modules[sys.argv[1]] = None if sys.argv[1] == "grpc" else types.ModuleType(sys.argv[1])
from types import SimpleNamespace
from pyengine.workers import grpc
try:
    grpc.serve(SimpleNamespace())
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program, module], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(told) and ("pip install 'pyengine-store[grpc]'" in done.stdout) == (module == "grpc")
