"""The gRPC worker's connections to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time

import pytest

from fix_grpc import FakeGateway
from grpc_caller import V2
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Limits
from pyengine.gateway.grpc_clients import GatewayLostError, GrpcClient, GrpcClients, TooManyClientsError
from waiting import scaled_timeout_s


def client_of(folder) -> GrpcClient:
    return GrpcClients(folder, Limits(), 4096).find("c", "ipv4:10.0.0.7:1", "", "", is_secure=False)


def later() -> float:
    return time.monotonic() + scaled_timeout_s(30)


def test_a_send_without_time_left_is_not_sent(tmp_path):
    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway:
            client = client_of(tmp_path)
            await client.ask(codes.HEART_BEAT, {}, until_s=later())
            with pytest.raises(GatewayLostError):
                await client.ask(codes.SEND_MESSAGE_V2, {}, until_s=time.monotonic(), again=False)
            await client.ask(codes.HEART_BEAT, {}, until_s=later())
            assert gateway.asked == [codes.HEART_BEAT] * 2
            await client.leave()

    asyncio.run(run())


def test_calls_that_wait_for_the_same_connection_go_on_once_it_is_open(tmp_path, monkeypatch):
    monkeypatch.setattr("pyengine.gateway.grpc_clients.CONNECT_INTERVAL_S", 3600.0)

    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway:
            client = client_of(tmp_path)
            await asyncio.gather(*(client.ask(codes.HEART_BEAT, {}, until_s=time.monotonic() + 7200) for _ in range(3)))
            assert gateway.asked == [codes.HEART_BEAT] * 3
            await client.leave()

    asyncio.run(asyncio.wait_for(run(), scaled_timeout_s(30)))


def test_a_client_is_the_same_at_its_next_connection(tmp_path):
    clients = GrpcClients(tmp_path, Limits(), 4096)

    def find(*, client_id="c", host="10.0.0.7", port=1, key="", is_secure=False) -> GrpcClient:
        return clients.find(client_id, f"ipv4:{host}:{port}", key, "", is_secure=is_secure)

    first = find()
    assert find(port=2) is first and clients.addresses() == {"10.0.0.7:2"}
    others = [find(client_id="d"), find(host="10.0.0.8"), find(key="shop"), find(is_secure=True)]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("silent_s, expected", [(12, [codes.HEART_BEAT]), (20, [codes.HEART_BEAT, codes.UNREGISTER_CLIENT])])
def test_a_client_leaves_when_it_is_silent_for_longer_than_from_one_heartbeat_to_the_next(tmp_path, silent_s, expected):
    """What a push consumer holds comes to others then, while it may still handle it."""
    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway:
            clients = GrpcClients(tmp_path, Limits(), 4096)
            client = clients.find("c", "ipv4:10.0.0.7:1", "", "", is_secure=False)
            client.take(V2.Settings())
            client.groups = {"g"}
            await client.ask(codes.HEART_BEAT, {}, client.heartbeat(), until_s=later())
            gateway.asked.remove(codes.HEART_BEAT)  # that of the new connection
            client.seen_s -= silent_s
            await clients.expire()
            assert gateway.asked == expected
            await clients.close()

    asyncio.run(run())


@pytest.mark.parametrize("limits", [{"address_connections_max": 2}, {"connections_max": 2}])
def test_a_new_client_replaces_one_of_its_host_that_has_nothing(tmp_path, limits):
    """Otherwise a host whose programs each take a new id would be refused for the 120 s until a client is left out."""
    clients = GrpcClients(tmp_path, Limits(**limits), 4096)

    def find(client_id: str, host: str = "10.0.0.7") -> GrpcClient:
        return clients.find(client_id, f"ipv4:{host}:{client_id}", "", "", is_secure=False)

    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway:
            first, second = find("1"), find("2")
            await asyncio.gather(*(each.ask(codes.HEART_BEAT, {}, until_s=later()) for each in (first, second)))
            assert find("1") is first  # its newest call
            third = find("3")
            assert second.has_left.is_set() and not first.has_left.is_set()
            with pytest.raises(GatewayLostError):
                await second.ask(codes.HEART_BEAT, {}, until_s=later())
            while len(gateway.connections.open) > 1:
                await asyncio.sleep(0)
            first.add(first.producer_groups, ["T"])
            for keep in ("calls", "streams"):
                setattr(third, keep, 1)
                with pytest.raises(TooManyClientsError):
                    find("4")
                setattr(third, keep, 0)
            third.add(third.groups, ["g"])
            with pytest.raises(TooManyClientsError):
                find("4")
            third.groups.clear()
            if "connections_max" in limits:
                with pytest.raises(TooManyClientsError):
                    find("4", "10.0.0.8")
            assert find("4").client_id == "4" and third.has_left.is_set() and find("1") is first
            await clients.close()

    asyncio.run(asyncio.wait_for(run(), scaled_timeout_s(30)))


def test_of_connections_beyond_a_share_the_one_that_has_just_come_is_kept(tmp_path):
    """Its client is about to call, and its descriptor may be the lowest."""
    clients = GrpcClients(tmp_path, Limits(address_connections_max=2), 4096)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        low = os.open(os.devnull, os.O_RDONLY)

        def connected() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            return client, stack.enter_context(listener.accept()[0])

        ports = [listener.getsockname()[1]]
        old = [connected() for _ in range(2)]
        assert clients.surplus(ports, ()) == {}
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        os.close(low)
        served = stack.enter_context(listener.accept()[0])
        assert served.fileno() == low < min(each.fileno() for _, each in old)
        assert clients.surplus(ports, ()) == {"127.0.0.1": 1}
        assert is_open(client) and [is_open(each) for each, _ in old].count(True) == 1


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.0)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True


def test_a_producer_without_a_stream_is_asked_for_no_transaction(tmp_path):
    client = client_of(tmp_path)
    client.add(client.producer_groups, ["T"])
    assert json.loads(client.heartbeat())["producerDataSet"] == []
    client.streams += 1
    assert json.loads(client.heartbeat())["producerDataSet"] == [{"groupName": "T"}]


def test_a_pop_that_waits_until_the_gateway_reads_is_not_sent_once_it_is_cancelled(tmp_path):
    """Its cancellation would overtake it, and it would be held for nobody."""
    peers = []

    def stop_reading(request):
        peers.append(request.connection)
        asyncio.get_running_loop().call_soon(request.connection.pause)
        return Answer()

    async def run() -> None:
        async with FakeGateway(tmp_path, HEART_BEAT=stop_reading, POP_MESSAGE=lambda request: None,
                               CANCEL_POP=lambda request: Answer()) as gateway:
            client = client_of(tmp_path)
            await client.ask(codes.HEART_BEAT, {}, until_s=later())
            sending = asyncio.create_task(client.ask(codes.SEND_MESSAGE_V2, {}, bytes(8 << 20), until_s=later()))
            popping = asyncio.create_task(client.pop({}, lambda popped: None, until_s=later()))
            for _ in range(10):
                await asyncio.sleep(0)
            popping.cancel()
            await asyncio.wait([popping])
            peers[0].unpause()
            await sending
            await client.ask(codes.UNREGISTER_CLIENT, {}, until_s=later())
            assert gateway.asked == [codes.HEART_BEAT, codes.SEND_MESSAGE_V2, codes.UNREGISTER_CLIENT]
            await client.leave()

    asyncio.run(run())


def test_a_question_waits_until_its_client_takes_the_one_before(tmp_path):
    """Otherwise what one asks at once would be dropped, and its tries count, or fill the memory."""
    async def run() -> None:
        async with FakeGateway(tmp_path) as gateway:
            client = client_of(tmp_path)
            await client.ask(codes.HEART_BEAT, {}, until_s=later())
            (connection,) = gateway.connections.open
            asked = [asyncio.create_task(connection.invoke(codes.CHECK_TRANSACTION_STATE, {}, b"%d" % number + bytes(2 << 20)))
                     for number in range(3)]
            for number in range(3):
                assert (await asked[number]).code == codes.SUCCESS and not any(task.done() for task in asked[number + 1:])
                assert (await client.questions.get()).body.startswith(b"%d" % number)
            await client.leave()

    asyncio.run(asyncio.wait_for(run(), scaled_timeout_s(30)))
