"""The limits of a client: a client beyond one loses its own connection only."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pyengine.gateway import codes
from pyengine.gateway.connections import (
    FIELD_BYTES,
    REQUEST_BYTES,
    REQUESTER,
    REQUESTS_MAX,
    Answer,
    AskingConnection,
    Connection,
    Connections,
    Limits,
    Request,
    TurnExecutor,
    Turns,
)
from pyengine.gateway.wire import ANSWER, ONE_WAY, Frame, WireError, decode_frame, encode_frame
from waiting import scaled_timeout_s

ECHO, LATER, NEVER, LARGE, FAILS, SLOW, BUSY = 1, 2, 3, 4, 5, 6, 7


class Rig:
    """Connections with a few handlers of the test, inside its event loop."""

    def __init__(self, **limits: object) -> None:
        self.said: list[str] = []
        self.kept: list[Request] = []
        self.busy = 0
        self.connections = Connections(Limits(**limits), lambda host, text: self.said.append(text))

    async def __aenter__(self) -> Rig:
        def fails(request: Request) -> Answer:
            raise WireError("this body is none")

        async def later(request: Request) -> Answer:
            await asyncio.sleep(0)
            return Answer(body=request.frame.body)

        self.go_on = asyncio.Event()

        async def slow(request: Request) -> Answer:
            await self.go_on.wait()
            return Answer()

        def busy(request: Request) -> Answer:
            self.busy += 1
            until_s = time.perf_counter() + 0.000_3
            while time.perf_counter() < until_s:
                pass
            return Answer()

        self.port = await self.connections.listen("127.0.0.1", 0, {
            BUSY: busy, SLOW: slow, ECHO: lambda request: Answer(body=request.frame.body), LATER: later, NEVER: self.kept.append,
            LARGE: lambda request: Answer(body=bytes(1 << 20)), FAILS: fails})
        await self.connections.start()
        self.open = contextlib.AsyncExitStack()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.open.aclose()
        await self.connections.close()

    async def connect(self, source: str = "127.0.0.1") -> Peer:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=64 << 20, local_addr=(source, 0))
        peer = Peer(reader, writer)
        self.open.callback(writer.close)
        return peer


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, code: int, body: bytes = b"", opaque: int = 1, flag: int = 0) -> None:
        self.writer.write(encode_frame(Frame(code, {}, body, opaque, flag)))

    async def receive(self) -> Frame:
        size = struct.unpack(">i", await asyncio.wait_for(self.reader.readexactly(4), scaled_timeout_s(30)))[0]
        return decode_frame(await asyncio.wait_for(self.reader.readexactly(size), scaled_timeout_s(30)))

    async def ask(self, code: int, body: bytes = b"") -> Frame:
        self.send(code, body)
        return await self.receive()

    async def is_closed(self) -> bool:
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), scaled_timeout_s(30))
        return True


def run(limits: dict[str, object], steps) -> None:
    async def whole() -> None:
        async with Rig(**limits) as rig:
            await steps(rig)

    asyncio.run(whole())


def test_an_answer_has_the_encoding_and_number_of_its_request():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        peer.send(LATER, b"one", 11)
        peer.send(ECHO, b"two", 12)
        found = {frame.opaque: frame for frame in [await peer.receive(), await peer.receive()]}
        assert {opaque: frame.body for opaque, frame in found.items()} == {11: b"one", 12: b"two"}
        assert all(frame.is_answer for frame in found.values())
        peer.writer.write(encode_frame(Frame(ECHO, form=1)))
        assert (await peer.receive()).form == 1

    run({}, steps)


def test_an_unknown_code_and_a_failure_are_answered_with_an_error():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        answer = await peer.ask(999)
        assert (answer.code, answer.remark) == (codes.REQUEST_CODE_NOT_SUPPORTED, " request type 999 not supported")
        answer = await peer.ask(FAILS)
        assert answer.code == codes.SYSTEM_ERROR and "this body is none" in answer.remark
        assert (await peer.ask(ECHO, b"on")).body == b"on"

    run({}, steps)


def test_a_one_way_request_gets_no_answer():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        for code in (ECHO, LATER, FAILS, 999):
            peer.send(code, b"x", 5, ONE_WAY)
        peer.send(ECHO, b"last", 6)
        assert (await peer.receive()).opaque == 6

    run({}, steps)


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x00\x05hello", struct.pack(">ii", 6, 500) + b"{}",
                                  struct.pack(">ii", 6, 7 << 24 | 2) + b"{}", struct.pack(">i", 70_000),
                                  struct.pack(">ii", 41, 37) + b'{"code":1,"opaque":7,"extFields":[1]}'],
                         ids=["tls", "header", "form", "large", "fields"])
def test_bytes_that_are_no_frame_close_their_connection_only(data):
    async def steps(rig: Rig) -> None:
        other, bad = await rig.connect(), await rig.connect()
        bad.writer.write(data)
        assert await bad.is_closed()
        assert (await other.ask(ECHO, b"on")).body == b"on"
        assert len(rig.said) == 1

    run({"frame_bytes_max": 65_536}, steps)


def test_an_answer_that_has_no_form_on_the_wire_is_an_error_and_not_lost():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        peer.writer.write(encode_frame(Frame(NEVER, opaque=3, form=1)))
        while not rig.kept:
            await asyncio.sleep(0)
        rig.kept[0].reply(Answer(fields={"n" * 70_000: "v"}))
        answer = await peer.receive()
        assert (answer.opaque, answer.code) == (3, codes.SYSTEM_ERROR) and "70000 bytes" in answer.remark

    run({}, steps)


def test_a_connection_that_is_silent_or_sends_half_a_frame_is_closed():
    async def steps(rig: Rig) -> None:
        silent, half = await rig.connect(), await rig.connect()
        half.writer.write(encode_frame(Frame(ECHO))[:-1])
        assert await silent.is_closed() and await half.is_closed()
        assert all("nothing whole came" in text for text in rig.said) and len(rig.said) == 2

    run({"idle_s": 0.3}, steps)


def test_a_connection_above_the_limit_is_closed():
    async def steps(rig: Rig) -> None:
        first, second = await rig.connect(), await rig.connect()
        assert (await first.ask(ECHO)).code == 0 and (await second.ask(ECHO)).code == 0
        third = await rig.connect()
        assert await third.is_closed()
        assert (await first.ask(ECHO)).code == 0

    run({"connections_max": 2}, steps)


def test_one_address_may_not_take_all_connections():
    async def steps(rig: Rig) -> None:
        first, second = await rig.connect(), await rig.connect()
        assert (await first.ask(ECHO)).code == 0 and (await second.ask(ECHO)).code == 0
        assert await (await rig.connect()).is_closed()
        assert "2 connections from there are open already (gateway_address_connections_max)" in rig.said[0]
        other = await rig.connect("127.0.0.2")
        assert (await other.ask(ECHO)).code == 0 and (await first.ask(ECHO)).code == 0
        first.writer.close()
        while len(rig.connections.open) > 2:
            await asyncio.sleep(0)
        assert (await (await rig.connect()).ask(ECHO)).code == 0

    run({"connections_max": 4, "address_connections_max": 2}, steps)


def test_one_more_connection_is_checked_without_a_look_at_the_open_ones():
    """A check that looks at each takes as long as they are many, and a client may connect as often as it likes."""
    seen = []

    class Seen(Connection):
        host = property(lambda self: seen.append(self) or self._seen_host, lambda self, host: setattr(self, "_seen_host", host))

    connections = Connections(Limits(connections_max=41, address_connections_max=21), lambda host, text: None)
    opened = [Seen(connections, {}) for _ in range(40)]
    for number, each in enumerate(opened):
        each.connection_made(SimpleNamespace(get_extra_info=lambda name, number=number: (f"10.0.0.{number % 2}", 1)))
    seen.clear()
    assert connections.refusal("10.0.0.1") == "" and not seen
    for each in opened:
        each.connection_lost(None)
    assert not connections.open and not connections.clients and not connections.clients.of_host


def test_the_gateway_reads_nothing_from_a_client_that_reads_no_answers():
    async def steps(rig: Rig) -> None:
        deaf = await rig.connect()
        deaf.writer.transport.pause_reading()
        for number in range(500):
            deaf.send(LARGE, opaque=number)
        other = await rig.connect()
        assert (await other.ask(ECHO, b"on")).body == b"on"
        held = rig.connections.held_bytes
        assert held < 32 << 20, "500 answers of 1 MiB were asked for"

    run({"connection_bytes_max": 1 << 30, "memory_bytes_max": 1 << 30}, steps)


def test_a_connection_with_too_many_unread_answers_is_closed():
    async def steps(rig: Rig) -> None:
        deaf = await rig.connect()
        deaf.writer.transport.pause_reading()
        for number in range(30):
            deaf.send(NEVER, opaque=number)
        async with asyncio.timeout(scaled_timeout_s(30)):
            while len(rig.kept) < 30:
                await asyncio.sleep(0.001)
        taken = [request.reply(Answer(body=bytes(1 << 20))) for request in rig.kept]
        assert taken[:8] == [True] * 8 and not taken[-1] and taken == sorted(taken, reverse=True), "those of a closed one are not sent"
        assert any("does not read" in text for text in rig.said)
        async with asyncio.timeout(scaled_timeout_s(30)):
            while rig.connections.open:
                await asyncio.sleep(0.001)
        assert rig.connections.held_bytes == 0

    run({"connection_bytes_max": 8 << 20}, steps)


def test_answers_longer_than_the_limit_reach_a_client_that_reads():
    """As those to pulls from several queues, which are made at once."""
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        for number in range(4):
            peer.send(NEVER, opaque=number)
        async with asyncio.timeout(scaled_timeout_s(30)):
            while len(rig.kept) < 4:
                await asyncio.sleep(0.001)
            assert all(request.reply(Answer(body=bytes(20 << 20))) for request in rig.kept)
            assert [len((await peer.receive()).body) for _ in range(4)] == [20 << 20] * 4

    run({"connection_bytes_max": 8 << 20}, steps)


def test_bytes_of_all_connections_together_are_bounded():
    async def steps(rig: Rig) -> None:
        small = await rig.connect()
        large = [await rig.connect() for _ in range(4)]
        half = encode_frame(Frame(ECHO, {}, bytes(900_000)))[:-1]
        for peer in large:
            peer.writer.write(half)
        async with asyncio.timeout(scaled_timeout_s(30)):
            while not rig.said:
                await asyncio.sleep(0.001)
        assert (await small.ask(ECHO, b"on")).body == b"on"
        assert rig.connections.held_bytes <= 2 << 20
        assert "gateway_memory_max_bytes" in rig.said[0]

    run({"memory_bytes_max": 2 << 20}, steps)


def test_a_connection_continues_after_its_limit_of_requests_in_progress():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        for number in range(REQUESTS_MAX + 100):
            peer.send(NEVER, opaque=number)
        peer.send(ECHO, b"last", 9999)
        async with asyncio.timeout(scaled_timeout_s(30)):
            while len(rig.kept) < REQUESTS_MAX:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert len(rig.kept) == REQUESTS_MAX
        for request in list(rig.kept):
            request.reply(Answer())
        found = [await peer.receive() for _ in range(REQUESTS_MAX + 1)]
        assert found[-1].opaque == 9999

    run({}, steps)


def test_many_small_requests_of_one_client_do_not_hold_up_another():
    async def steps(rig: Rig) -> None:
        busy, other = await rig.connect(), await rig.connect()
        busy.writer.write(b"".join(encode_frame(Frame(NEVER, {}, b"", n, ONE_WAY)) for n in range(1500)))
        busy.writer.write(encode_frame(Frame(ECHO, {}, b"last", 2000)))
        assert (await other.ask(ECHO, b"on")).body == b"on"
        assert (await busy.receive()).body == b"last"
        assert len(rig.kept) == 1500

    run({}, steps)


async def until(holds) -> None:
    async with asyncio.timeout(scaled_timeout_s(30)):
        while not holds():
            await asyncio.sleep(0.001)


def test_many_connections_with_many_requests_do_not_hold_up_one_with_few():
    async def steps(rig: Rig) -> None:
        others = [await rig.connect() for _ in range(40)]
        one = await rig.connect()
        for other in others:
            for _ in range(100):
                other.send(BUSY)
        while rig.busy < 100:
            await asyncio.sleep(0)
        before = rig.busy
        assert (await one.ask(ECHO, b"one")).body == b"one"
        assert rig.busy - before < 200, "of 4,000: each pass of the loop takes a few, and then the one that has asked for least"
        for other in others:
            for _ in range(100):
                await other.receive()

    run({}, steps)


def test_a_connection_waits_for_one_turn_however_many_frames_it_has(monkeypatch):
    waited = []

    def add(turns: Turns[None], connection: Connection, item: None, add=Turns.add) -> None:
        waited.append(connection in turns)
        add(turns, connection, item)

    monkeypatch.setattr(Turns, "add", add)

    async def steps(rig: Rig) -> None:
        peers = [await rig.connect() for _ in range(3)]
        for peer in peers:
            for _ in range(100):
                peer.send(BUSY)
        for peer in peers:
            for _ in range(100):
                await peer.receive()

    run({}, steps)
    assert waited and not any(waited)


def test_a_turn_goes_to_the_host_and_the_connection_that_have_used_least():
    def connection(host: str) -> Connection:
        made = Connection(Connections(Limits(), lambda host, text: None), {})
        made.host = host
        return made

    turns: Turns[str] = Turns()
    busy = [connection("a") for _ in range(100)]
    for each in busy:
        turns.add(each, "busy")
    for _ in range(300):
        each, item = turns.take()
        turns.charge(each, 1.0)
        turns.add(each, item)
    one, far = connection("a"), connection("b")
    assert one not in turns
    turns.add(one, "one")
    turns.add(one, "again")
    assert one in turns
    turns.add(far, "far")
    assert turns.take() == (far, "far"), "its host has used nothing"
    assert turns.take() == (one, "one"), "it has used nothing"
    assert turns.take() == (one, "again") and one not in turns, "its items come in order, each in a turn of its own"
    order = []
    turns.add(far, "far")
    for _ in range(100):
        each, item = turns.take()
        order.append(item)
        turns.charge(each, 1.0)
        turns.add(each, item)
    assert order.count("far") >= 49, "a host with one connection gets as much as one with a hundred"
    assert len(turns) == 2


def test_long_calls_of_one_host_leave_threads_to_others():
    calls, goes_on = [], threading.Event()
    busy, other = (Connection(Connections(Limits(), lambda host, text: None), {}) for _ in range(2))
    busy.host, other.host = "192.0.2.6", "192.0.2.7"

    def submit(connection: Connection | None, call: Callable[[], object]) -> Future[object]:
        requester = REQUESTER.set(connection)
        try:
            return executor.submit(call)
        finally:
            REQUESTER.reset(requester)

    def wait() -> None:
        calls.append(threading.current_thread())
        assert goes_on.wait(60)

    with TurnExecutor(4, "test", 2) as executor:
        long = [submit(busy, wait) for _ in range(10)]
        while len(calls) < 2:
            time.sleep(0.001)
        for connection in (None, other):
            for _ in range(5):
                assert submit(connection, lambda: 5).result(60) == 5
        assert len(calls) == 2
        own = [submit(None, wait) for _ in range(2)]
        while len(calls) < 4:
            time.sleep(0.001)
        goes_on.set()
        assert [each.result(60) for each in long + own] == [None] * 12
    assert len(calls) == 12


def test_who_was_idle_has_no_credit_for_it():
    """Nor has one that was alone to pay for it."""
    turns: Turns[int] = Turns()
    early, late = (Connection(Connections(Limits(), lambda host, text: None), {}) for _ in range(2))
    early.host, late.host = "a", "b"
    for _ in range(1000):
        turns.add(early, 0)
        turns.charge(turns.take()[0], 1.0)
    turns.add(early, 0)
    turns.add(late, 1)
    order = []
    for _ in range(20):
        each, item = turns.take()
        order.append(item)
        turns.charge(each, 1.0)
        turns.add(each, item)
    assert 8 <= order.count(0) <= 12


def test_answers_to_a_client_that_has_gone_write_nothing_into_the_log(caplog):
    async def steps(rig: Rig) -> None:
        gone, stays = await rig.connect(), await rig.connect()
        for _ in range(200):
            gone.send(NEVER)
        while len(rig.kept) < 200:
            await asyncio.sleep(0.01)
        gone.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.writer.transport.abort()
        await asyncio.sleep(0)
        for request in rig.kept:
            request.reply(Answer(body=b"late"))
        assert (await stays.ask(ECHO, b"on")).body == b"on"

    run({}, steps)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_the_requests_of_a_client_end_with_its_connection():
    """Otherwise a client could fill the memory by reconnecting after each request."""
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        for _ in range(100):
            peer.send(SLOW, bytes(1000))
        await until(lambda: len(rig.connections.tasks) == 100)
        peer.writer.close()
        await until(lambda: not rig.connections.open)
        await until(lambda: not rig.connections.tasks)
        assert rig.connections.held_bytes == 0

    run({}, steps)


def test_one_way_requests_of_clients_that_have_left_are_done_and_counted():
    async def steps(rig: Rig) -> None:
        for number in range(1, 10):  # so small that no connection is closed for memory
            peer = await rig.connect()
            peer.send(SLOW, bytes(60_000), flag=ONE_WAY)
            await until(lambda number=number: len(rig.connections.tasks) == number)
            peer.writer.close()
            await until(lambda: not rig.connections.open)
        assert rig.connections.held_bytes > 1 << 19
        assert await (await rig.connect()).is_closed() and "wait in the gateway" in rig.said[-1]
        assert (await (await rig.connect("127.0.0.2")).ask(ECHO, b"another host")).body == b"another host"
        rig.go_on.set()
        await until(lambda: not rig.connections.tasks)
        assert (await (await rig.connect()).ask(ECHO, b"on")).body == b"on" and not rig.connections.left_bytes

    run({"memory_bytes_max": 1 << 20}, steps)


def test_numbers_of_a_header_are_checked():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        peer.writer.write(encode_frame(Frame(NEVER, {"a": "12", "b": "-3", "c": "x", "d": "99999999999", "e": "1_0", "f": "\u0661"})))
        async with asyncio.timeout(scaled_timeout_s(30)):
            while not rig.kept:
                await asyncio.sleep(0.001)
        request = rig.kept[0]
        assert (request.integer("a"), request.integer("b"), request.integer("no", 7), request.integer("d", bits=64)) == (
            12, -3, 7, 99_999_999_999)
        for name in ("c", "d", "e", "f", "no"):
            with pytest.raises(WireError):
                request.integer(name)

    run({}, steps)


def test_a_request_in_progress_counts_with_its_memory():
    async def whole():
        async with Rig() as rig:
            peer = await rig.connect()
            peer.writer.write(encode_frame(Frame(NEVER, {f"f{number}": "" for number in range(10)}, b"", 1)))
            while not rig.kept:
                await asyncio.sleep(0.001)
            assert rig.connections.held_bytes > REQUEST_BYTES + 10 * FIELD_BYTES
            rig.kept[0].reply(Answer())
            await peer.receive()
            assert rig.connections.held_bytes == 0

    asyncio.run(asyncio.wait_for(whole(), 60))


def test_a_request_to_a_client_that_does_not_answer_ends():
    async def steps(rig: Rig) -> None:
        peer = await rig.connect()
        assert (await peer.ask(ECHO)).code == 0
        (connection,) = rig.connections.open
        coming = asyncio.ensure_future(connection.invoke(77, {"a": "b"}, b"what?"))
        asked = await peer.receive()
        assert (asked.code, asked.fields, asked.body, asked.flag) == (77, {"a": "b"}, b"what?", 0)
        peer.writer.write(encode_frame(Frame(0, opaque=asked.opaque + 1, flag=ANSWER)))  # an answer to no question
        peer.writer.write(encode_frame(Frame(0, body=b"that", opaque=asked.opaque, flag=ANSWER)))
        assert (await coming).body == b"that"
        with pytest.raises(TimeoutError, match="did not answer within 0.01 s"):
            await connection.invoke(77, {}, timeout_s=0.01)
        peer.writer.transport.pause_reading()
        rig.connections.held_bytes += 1 << 40
        with pytest.raises(ConnectionError, match="gateway_memory_max_bytes"):
            await connection.invoke(77, {}, b"it would be closed for what another asks of it")
        rig.connections.held_bytes -= 1 << 40
        limits = Limits()
        while connection._transport.get_write_buffer_size() <= limits.connection_bytes_max // 4:
            connection.invoke_oneway(78, {}, bytes(1 << 20))
        with pytest.raises(ConnectionError, match="does not read"):
            await connection.invoke(77, {})
        connection._limits = replace(limits, connection_bytes_max=1 << 40)
        coming = asyncio.ensure_future(connection.invoke(77, {}))
        await asyncio.sleep(0)
        peer.writer.transport.abort()
        with pytest.raises(ConnectionError, match="has ended"):
            await coming
        with pytest.raises(ConnectionError, match="has gone"):
            await connection.invoke(77, {})
        assert connection._invoked == {}

    run({}, steps)


def test_a_link_takes_answers_while_its_peer_reads_nothing():
    async def steps(rig: Rig) -> None:
        peers: asyncio.Queue[Peer] = asyncio.Queue()
        server = await asyncio.start_server(lambda *streams: peers.put_nowait(Peer(*streams)), "127.0.0.1", 0, limit=64 << 20)
        loop = asyncio.get_running_loop()
        echo = {ECHO: lambda request: Answer(body=request.frame.body)}
        _, link = await loop.create_connection(
            lambda: AskingConnection(rig.connections, echo, language="PYTHON"), *server.sockets[0].getsockname())
        peer = await peers.get()
        first = asyncio.ensure_future(link.invoke(77, {"a": "b"}, b"what?"))
        asked = await peer.receive()
        assert (asked.code, asked.fields, asked.body, asked.language) == (77, {"a": "b"}, b"what?", "PYTHON")
        peer.writer.transport.pause_reading()
        while link._may_write.is_set():
            link.invoke_oneway(78, {}, bytes(1 << 20))
        second = asyncio.ensure_future(link.invoke(79, {}))
        peer.writer.write(encode_frame(Frame(0, body=b"that", opaque=asked.opaque, flag=ANSWER)))
        assert (await first).body == b"that"
        with pytest.raises(TimeoutError):
            await link.invoke(79, {}, timeout_s=0.01)
        assert not second.done()
        peer.writer.transport.resume_reading()
        while (asked := await peer.receive()).code == 78:
            assert asked.is_one_way
        peer.writer.write(encode_frame(Frame(0, opaque=asked.opaque, flag=ANSWER)))
        assert (asked.code, (await second).code) == (79, 0)
        peer.send(ECHO, b"by itself")
        assert (await peer.receive()).body == b"by itself"
        link.abort()
        server.close()

    run({}, steps)
