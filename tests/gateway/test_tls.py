"""TLS by the first byte of a connection: settings, limits, handshakes that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct

import psutil
import pytest
import trustme

from fix_gateway import Client, TlsClient, pull_fields, put_certificate, send_fields, start_served, trusting
from pyengine.cli.plan import TLS_CONNECTION_BYTES
from pyengine.engine_config import EngineConfig
from pyengine.errors import ConfigError, EngineError
from pyengine.gateway import codes
from pyengine.gateway import tls as tls_module
from pyengine.gateway.connections import Answer, Connections, Limits
from pyengine.gateway.tls import TlsHandler
from pyengine.gateway.wire import Frame, decode_frame, encode_frame
from waiting import scaled_timeout_s

LARGE_BYTES = 256 << 10


@pytest.fixture
def enforcing(tmp_path):
    """(store, authority): the gateway takes TLS alone, from clients with a certificate."""
    authority = trustme.CA()
    put_certificate(tmp_path, authority)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    store = start_served(tmp_path / "store", gateway_tls_mode="enforcing", gateway_tls_cert_file=str(tmp_path / "cert.pem"),
                         gateway_tls_key_file=str(tmp_path / "key.pem"), gateway_tls_client_ca_file=str(tmp_path / "ca.pem"),
                         gateway_tls_client_auth="require")
    yield store, authority
    store.close()


def test_plain_connections_and_clients_without_a_certificate_can_be_refused(enforcing):
    served, authority = enforcing
    for port in served.ports:
        with Client(port) as plain:
            plain.send(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
            assert plain.is_closed
        with contextlib.suppress(ssl.SSLError, ConnectionError), TlsClient(port, trusting(authority)) as client:
            client.send(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})  # TLS 1.3: it learns it from its first answer
            assert client.is_closed
    of_another, of_it = trusting(authority), trusting(authority)
    trustme.CA().issue_cert("client").configure_cert(of_another)
    with contextlib.suppress(ssl.SSLError, ConnectionError), TlsClient(served.ports[1], of_another) as client:
        client.send(codes.SEND_MESSAGE_V2, send_fields("t"))
        assert client.is_closed
    authority.issue_cert("client").configure_cert(of_it)
    with TlsClient(served.ports[1], of_it) as client:
        assert client.ask(codes.SEND_MESSAGE_V2, send_fields("t"), b"hello").code == codes.SUCCESS
    log = served.engine.log()
    assert "it does not begin with TLS" in log and "TLS handshake failed" in log and "client failed" not in log


def test_a_connection_takes_no_more_memory_than_is_planned_for(enforcing):
    served, authority = enforcing
    context = trusting(authority)
    authority.issue_cert("client").configure_cert(context)
    gateway = psutil.Process(served.engine.pid("gateway"))
    with contextlib.ExitStack() as clients:
        def connect(number):
            for _ in range(number):
                client = clients.enter_context(TlsClient(served.ports[1], context))
                assert len(client.ask(codes.PULL_MESSAGE, pull_fields("t", sysFlag=6)).body) > LARGE_BYTES

        with TlsClient(served.ports[1], context) as producer:
            assert producer.ask(codes.SEND_MESSAGE_V2, send_fields("t"), bytes(LARGE_BYTES)).code == codes.SUCCESS
        connect(10)
        before = gateway.memory_full_info().uss
        connect(200)
        assert gateway.memory_full_info().uss - before <= 200 * TLS_CONNECTION_BYTES


def test_a_gateway_without_a_usable_certificate_does_not_start(tmp_path, make_engine):
    put_certificate(tmp_path, trustme.CA())
    (tmp_path / "key.pem").chmod(0o644)
    for name in ("key.pem", "none.pem"):
        engine = make_engine(gateway_enable=True, gateway_namesrv_port=0, gateway_broker_port=0, gateway_tls_mode="permissive",
                             gateway_tls_cert_file=str(tmp_path / "cert.pem"), gateway_tls_key_file=str(tmp_path / name))
        with pytest.raises(EngineError):
            engine.start()
        assert ("has mode 0644" if name == "key.pem" else "No such file") in engine.log()


def test_settings_of_tls_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="gateway_tls_cert_file"):
        EngineConfig(gateway_tls_mode="permissive", gateway_tls_key_file="k")
    with pytest.raises(ConfigError, match="gateway_tls_client_ca_file"):
        EngineConfig(gateway_tls_client_auth="require")


@contextlib.asynccontextmanager
async def door_rig(tmp_path, mode="permissive", **limits):
    """(connections of a port that takes TLS, that port, what it said, its authority), in this process."""
    authority, said = trustme.CA(), []
    put_certificate(tmp_path, authority)
    tls = TlsHandler(tmp_path, EngineConfig(gateway_tls_mode=mode, gateway_tls_cert_file="cert.pem", gateway_tls_key_file="key.pem"))
    assert "cert.pem" in tls.reload() and tls.reload() == ""
    connections = Connections(Limits(**limits), lambda host, text: said.append(text), tls)
    port = await connections.listen("127.0.0.1", 0, {1: lambda request: Answer(body=request.frame.body)})
    await connections.start()
    try:
        yield connections, port, said, tls, authority
    finally:
        await connections.close()
        assert not tls.undecided


async def until(condition):
    async with asyncio.timeout(scaled_timeout_s(30)):
        while not condition():
            await asyncio.sleep(0.001)


async def echo(reader, writer, body=b"on"):
    writer.write(encode_frame(Frame(1, {}, body)))
    size = struct.unpack(">i", await reader.readexactly(4))[0]
    return decode_frame(await reader.readexactly(size)).body


def test_a_frame_that_comes_with_the_handshake_or_in_pieces_is_answered(tmp_path):
    async def whole():
        async with door_rig(tmp_path) as (_, port, _, _, authority):
            for context in (trusting(authority), None):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context,
                                                               server_hostname="localhost" if context else None)
                assert await echo(reader, writer) == b"on" and await echo(reader, writer, bytes(500_000)) == bytes(500_000)
                for byte in encode_frame(Frame(1, {}, b"slow")):
                    writer.write(bytes((byte,)))
                    await writer.drain()
                size = struct.unpack(">i", await reader.readexactly(4))[0]
                assert decode_frame(await reader.readexactly(size)).body == b"slow"
                writer.close()

    asyncio.run(whole())


def test_connections_that_say_nothing_or_do_not_finish_their_handshake_count_and_are_closed(tmp_path):
    async def whole():
        async with door_rig(tmp_path, idle_s=0.5, connections_max=2) as (connections, port, said, tls, _):
            silent, half, third = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            half[1].write(b"\x16\x03")
            assert await third[0].read() == b"" and "2 connections are open already" in said[0]
            assert len(tls.undecided) == 2
            assert await silent[0].read() == b"" and "nothing whole came" in said[1]
            half[1].transport.abort()  # it has not finished its handshake
            await until(lambda: not tls.undecided and not tls.tasks)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: tls.undecided)
            writer.close()
            await until(lambda: not tls.undecided)
            assert not connections.open

    asyncio.run(whole())


def test_connections_of_which_no_byte_is_read_yet_count_for_their_address(tmp_path):
    async def whole():
        async with door_rig(tmp_path, connections_max=4, address_connections_max=1) as (connections, port, said, tls, _):
            silent = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: tls.undecided)
            refused = await asyncio.open_connection("127.0.0.1", port)
            assert await refused[0].read() == b"" and "1 connections from there are open already" in said[0]
            other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            await until(lambda: len(tls.undecided) == 2)
            silent[1].write(b"\0")
            await until(lambda: len(connections.open) == 1)
            refused = await asyncio.open_connection("127.0.0.1", port)
            assert await refused[0].read() == b"" and len(said) == 2
            for _, writer in (silent, other, refused):
                writer.close()

    asyncio.run(whole())


def test_a_handshake_has_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tls_module, "HANDSHAKE_S", 0.2)

    async def whole():
        async with door_rig(tmp_path) as (_, port, said, tls, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            await until(lambda: said)
            assert "TLS handshake" in said[0] and not tls.undecided

    asyncio.run(whole())


def test_limits_hold_for_tls_connections(tmp_path):
    async def whole():
        async with door_rig(tmp_path, frame_bytes_max=65_536, connection_bytes_max=1 << 20, idle_s=1.0) as (connections, port, said, _, ca):
            async def connect():
                return await asyncio.open_connection("127.0.0.1", port, ssl=trusting(ca), server_hostname="localhost")

            large, silent, (_, deaf_writer) = await connect(), await connect(), await connect()
            large[1].write(struct.pack(">i", 70_000))
            assert await large[0].read() == b"" and "a frame of 70000 bytes" in said[0]
            deaf_writer.transport.pause_reading()
            await until(lambda: len(connections.open) == 2)
            (connection,) = [each for each in connections.open
                             if each.address.endswith(f":{deaf_writer.get_extra_info('sockname')[1]}")]
            while not connection.is_closed:
                connection.invoke_oneway(7, {}, bytes(1 << 20))
                await asyncio.sleep(0)
            assert "does not read" in said[1]
            assert await silent[0].read() == b"" and "nothing whole came" in said[2]
            await until(lambda: not connections.open)
            assert connections.held_bytes == 0

    asyncio.run(whole())


def test_what_a_client_has_not_read_yet_counts_and_is_sent_before_the_end(tmp_path):
    body = bytes(12 << 20)

    async def whole():
        async with door_rig(tmp_path) as (connections, port, _, _, authority):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting(authority), server_hostname="localhost")
            await until(lambda: connections.open)
            (connection,) = connections.open
            connection.invoke_oneway(7, {}, body)
            assert connections.held_bytes > len(body), "the rest keeps all of it"
            connection.close()
            size = struct.unpack(">i", await reader.readexactly(4))[0]
            assert decode_frame(await reader.readexactly(size)).body == body
            writer.close()

    asyncio.run(whole())


class HalfOpen:
    """A TLS client that can end its side and read on, which Python's own sockets cannot."""

    def __init__(self, port, context):
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=scaled_timeout_s(30))
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")
        self._run(self._tls.do_handshake)

    def _run(self, step):
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._socket.sendall(self._outgoing.read())
                self._incoming.write(self._socket.recv(1 << 18))
            finally:
                self._socket.sendall(self._outgoing.read())

    def end_with(self, data):
        self._tls.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._socket.sendall(self._outgoing.read())

    def read(self, number):
        pieces = []
        while number:
            pieces.append(self._run(lambda: self._tls.read(min(number, 1 << 18))))
            number -= len(pieces[-1])
        return b"".join(pieces)


def test_a_client_that_sends_no_more_gets_what_waits_for_it(tmp_path):
    body = bytes(12 << 20)

    async def whole():
        async with door_rig(tmp_path) as (_, port, _, _, authority):
            client = await asyncio.to_thread(HalfOpen, port, trusting(authority))
            await asyncio.to_thread(client.end_with, encode_frame(Frame(1, {}, body)))
            size = struct.unpack(">i", await asyncio.to_thread(client.read, 4))[0]
            assert decode_frame(await asyncio.to_thread(client.read, size)).body == body

    asyncio.run(whole())
