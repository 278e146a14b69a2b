"""The bad network itself: it forwards what it should, and does what it is told to."""

from __future__ import annotations

import random
import socket
import threading

import pytest

from ha_proxy import CLEAN, FaultProxy, Faults
from waiting import eventually


class Master:
    """Sends `data` to each connection, keeps what each one sends."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.heard: list[bytearray] = []
        self.thread = threading.Thread(target=self.go, daemon=True)
        self.thread.start()

    def go(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            heard = bytearray()
            self.heard.append(heard)
            try:
                caller.sendall(self.data)
                while data := caller.recv(65536):
                    heard += data
            except OSError:
                pass
            caller.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


DATA = random.Random(1).randbytes(200_000)


@pytest.fixture
def master():
    master = Master(DATA)
    yield master
    master.close()


def read(caller: socket.socket, size: int) -> bytes:
    """Up to `size` bytes, less if the connection ends before."""
    caller.settimeout(30)
    got = bytearray()
    try:
        while len(got) < size and (data := caller.recv(size - len(got))):
            got += data
    except ConnectionError:
        pass
    return bytes(got)


@pytest.mark.parametrize("faults", [CLEAN, Faults(split_bytes_max=10_000, delay_s_max=0.001)])
def test_a_slow_and_splitting_network_loses_nothing(master, faults):
    with FaultProxy(master.port, seed=3) as proxy, socket.create_connection(("127.0.0.1", proxy.port)) as caller:
        proxy.to_slave = faults
        caller.sendall(b"report")
        assert read(caller, len(DATA)) == DATA
        eventually(lambda: master.heard and master.heard[0] == b"report", "the other direction")


def test_a_bit_is_flipped_where_the_seed_says(master):
    seen = []
    for _ in range(2):
        with FaultProxy(master.port, seed=5) as proxy:
            proxy.to_slave = Faults(corrupt_bytes_mean=1, split_bytes_max=len(DATA))
            with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
                seen.append(read(caller, len(DATA)))
            assert proxy.done["corrupt"] >= 1
    for data in seen:
        assert len(data) == len(DATA) and data != DATA


def test_pieces_are_swallowed(master):
    with FaultProxy(master.port, seed=1) as proxy:
        proxy.to_slave = Faults(swallow_bytes_mean=50_000, split_bytes_max=1000)
        with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
            proxy_done = proxy.done
            eventually(lambda: proxy_done["swallow"], "something is lost")
            caller.shutdown(socket.SHUT_WR)
            assert len(read(caller, len(DATA))) < len(DATA)


def test_connections_are_cut_in_the_middle_and_new_ones_made(master):
    with FaultProxy(master.port, seed=2) as proxy:
        proxy.to_slave = Faults(cut_bytes_mean=20_000, split_bytes_max=3000)
        with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
            assert DATA.startswith(got := read(caller, len(DATA))) and len(got) < len(DATA)
        proxy.to_slave = CLEAN
        with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
            assert read(caller, len(DATA)) == DATA
            proxy.cut()
            assert read(caller, 1) == b""
        assert proxy.done["cut"] == 2


def test_data_held_by_the_proxy_arrives_after_its_release(master):
    with FaultProxy(master.port) as proxy:
        proxy.hold()
        with socket.create_connection(("127.0.0.1", proxy.port)) as caller:
            eventually(lambda: proxy.done["connections"], "connected")
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
            proxy.release()
            caller.setblocking(True)
            assert read(caller, len(DATA)) == DATA
