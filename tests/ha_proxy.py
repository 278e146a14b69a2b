"""A bad network between a master and its slaves: it cuts, delays, splits, swallows and corrupts, by a seed.

    with FaultProxy(master_port, seed=7) as proxy:
        slave.connect(proxy.port)
        proxy.to_slave = Faults(split_bytes_max=100, delay_s_max=0.002, corrupt_bytes_mean=1 << 20)
        proxy.cut()                      # every connection, now
        proxy.hold(); proxy.release()    # nothing passes, but neither end is told
        proxy.to_slave = CLEAN

Changes count for what is forwarded from then on. Each connection and direction has a
random generator of its own, made from the seed, so that the same bytes meet the same faults.
"""

from __future__ import annotations

import collections
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass

READ_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST, what is under way is lost


@dataclass(frozen=True)
class Faults:
    """What one direction suffers. A mean is the expected number of bytes between two such faults; 0 is never."""

    split_bytes_max: int = 0      # pieces of 1 to so many bytes
    delay_s_max: float = 0.0      # before each piece
    corrupt_bytes_mean: int = 0   # one bit is flipped
    flip_in: bytes = b""          # one bit is flipped in the first piece of all that has these bytes, in their middle
    swallow_bytes_mean: int = 0   # a piece is lost from the middle of the stream, which TCP never does
    cut_bytes_mean: int = 0       # the connection is reset, in the middle of whatever passes


CLEAN = Faults()


class FaultProxy:
    """Listens at `port`, connects each caller to the master at `target_port`."""

    def __init__(self, target_port: int, *, seed: int = 0, host: str = "127.0.0.1") -> None:
        self.seed = seed
        self.to_slave = self.to_master = CLEAN
        self.done: collections.Counter[str] = collections.Counter()  # faults by name, and "connections"
        self.master = (host, target_port)
        self.passing = threading.Event()
        self.passing.set()
        self.lock = threading.Lock()
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        self.running = True
        self.listener = socket.create_server((host, 0))
        self.port = self.listener.getsockname()[1]
        self.threads = [threading.Thread(target=self.accept, name="proxy", daemon=True)]
        self.threads[0].start()

    @property
    def address(self) -> str:
        return f"{self.master[0]}:{self.port}"

    def target(self, port: int) -> None:
        """From now on callers are connected to another master."""
        self.master = (self.master[0], port)

    def cut(self, *, reset: bool = True) -> None:
        """End every connection: by RST, which loses what is under way, or by FIN."""
        with self.lock:
            pairs, self.pairs = self.pairs, []
        self.done["cut"] += len(pairs)
        for pair in pairs:
            for end in pair:
                _end(end, reset=reset)

    def hold(self) -> None:
        """Nothing passes any more in either direction; connections stay up."""
        self.passing.clear()

    def release(self) -> None:
        """Send the bytes that were held."""
        self.passing.set()

    def close(self) -> None:
        self.running = False
        self.release()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        for thread in self.threads:
            thread.join()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def accept(self) -> None:
        while self.running:
            try:
                slave, _ = self.listener.accept()
            except OSError:
                return
            try:
                master = socket.create_connection(self.master, timeout=5)
            except OSError:
                slave.close()
                continue
            master.settimeout(None)
            number = self.done["connections"]
            self.done["connections"] += 1
            for end in (slave, master):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.pairs.append((slave, master))
            for name, source, sink in (("to_slave", master, slave), ("to_master", slave, master)):
                pipe = threading.Thread(target=self.forward, args=(name, source, sink, number), daemon=True)
                self.threads.append(pipe)
                pipe.start()

    def forward(self, name: str, source: socket.socket, sink: socket.socket, number: int) -> None:
        rng = random.Random(f"{self.seed} {number} {name}")
        try:
            while data := source.recv(READ_BYTES):
                for piece in self.pieces(data, rng, getattr(self, name)):
                    self.passing.wait()
                    if piece:
                        sink.sendall(piece)
        except _Cut:
            self.done["cut"] += 1
            for end in (source, sink):
                _end(end, reset=True)
        except OSError:
            pass
        finally:
            with self.lock:
                self.pairs = [pair for pair in self.pairs if source not in pair]
            for end in (source, sink):
                _end(end, reset=False)

    def pieces(self, data: bytes, rng: random.Random, faults: Faults):
        at = 0
        while at < len(data):
            size = rng.randint(1, faults.split_bytes_max) if faults.split_bytes_max else len(data)
            piece = bytearray(data[at:at + size])
            at += len(piece)
            if faults.delay_s_max:
                threading.Event().wait(rng.uniform(0, faults.delay_s_max))
            if _strikes(rng, faults.cut_bytes_mean, len(piece)):
                yield bytes(piece[:rng.randrange(len(piece))])
                raise _Cut
            if _strikes(rng, faults.swallow_bytes_mean, len(piece)):
                self.done["swallow"] += 1
                continue
            if _strikes(rng, faults.corrupt_bytes_mean, len(piece)):
                self.done["corrupt"] += 1
                piece[rng.randrange(len(piece))] ^= 1 << rng.randrange(8)
            if faults.flip_in and (found := piece.find(faults.flip_in)) >= 0 and not self.done["flip"]:
                self.done["flip"] += 1
                piece[found + len(faults.flip_in) // 2] ^= 1
            yield bytes(piece)


class _Cut(Exception):
    """This connection is to end here."""


def _strikes(rng: random.Random, mean_bytes: int, size_bytes: int) -> bool:
    return mean_bytes > 0 and rng.random() < min(1.0, size_bytes / mean_bytes)


def _end(end: socket.socket, *, reset: bool) -> None:
    """Also wakes the thread that reads from it; closing alone would not."""
    with contextlib.suppress(OSError):
        if reset:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            end.shutdown(socket.SHUT_RDWR)
    if reset:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RD)
        end.close()
