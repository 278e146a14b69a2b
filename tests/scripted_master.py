"""A master in a thread of the test: it holds bytes, speaks the wire like RocketMQ or like this engine, and can misbehave."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

from pyengine.formats.ha_wire import HEADER, OFFER, REPORT_BYTES, Header, unpack_report

ROCKETMQ = "rocketmq"
OURS = "ours"


def frame_bounds(start: int, end: int, batch_bytes: int, segment_bytes: int) -> Iterator[Header]:
    """How [start, end) is cut into frames: none longer than `batch_bytes`, none across a segment's boundary."""
    while start < end:
        stop = min(end, start + batch_bytes, start - start % segment_bytes + segment_bytes)
        yield Header(start, stop - start)
        start = stop


class ScriptedMaster:
    """Serves [min_offset, min_offset + len(content)), each slave in a thread.

    `manner`: RocketMQ answers any first report, with heartbeats alone where it has nothing; this
    engine names its end or its beginning and closes. Neither answers an offer of seals; `offers` counts them. `reports` are all
    that came, by connection that reported; `connections` are open now. Before each
    frame `script(master, sock, offset, body)` may send something else instead (then it returns True).
    """

    def __init__(self, content: bytes, segment_bytes: int, manner: str, *, min_offset: int = 0, frame_bytes: int = 1000,
                 heartbeat_s: float = 0.02, script=None) -> None:
        self.content = bytearray(content)
        self.min_offset = min_offset
        self.segment_bytes = segment_bytes
        self.manner = manner
        self.frame_bytes = frame_bytes
        self.heartbeat_s = heartbeat_s
        self.script = script
        self.is_silent = False
        self.drops = 0
        self.connections = self.offers = 0
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.reports: list[list[int]] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self.running = True
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    @property
    def end(self) -> int:
        return self.min_offset + len(self.content)

    @property
    def last_report(self) -> int:
        return self.reports[-1][-1] if self.reports and self.reports[-1] else -1

    def serve(self) -> None:
        while self.running:
            if select.select([self.listening], [], [], 0.02)[0]:
                connected, _ = self.listening.accept()
                self.threads.append(threading.Thread(target=self.serve_one, args=(connected, self.drops), daemon=True))
                with self.lock:
                    self.connections += 1
                self.threads[-1].start()

    def serve_one(self, connected: socket.socket, drops: int) -> None:
        try:
            with connected, contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.follow(connected, drops)
        finally:
            with self.lock:
                self.connections -= 1

    def follow(self, connected: socket.socket, drops: int) -> None:
        position, half, reports = -1, b"", []
        heard_s = 0.0
        while self.running and self.drops == drops:
            if select.select([connected], [], [], 0 if position >= 0 else 0.02)[0]:
                data = connected.recv(4096)
                if not data:
                    return
                half += data
                while len(half) >= REPORT_BYTES:
                    if half.startswith(OFFER):
                        self.offers += 1
                        half = half[REPORT_BYTES:]
                        continue
                    if not reports:
                        self.reports.append(reports)
                    reports.append(unpack_report(half))
                    half = half[REPORT_BYTES:]
            if self.is_silent or not reports:
                continue
            if position < 0:
                position = reports[0]
                if position == 0:
                    position = max(self.min_offset, self.end - self.end % self.segment_bytes)
                elif self.manner == OURS and not self.min_offset <= position <= self.end:
                    connected.sendall(HEADER.pack(self.end if position > self.end else self.min_offset, 0))
                    return
                if self.manner == OURS and position == self.end:
                    connected.sendall(HEADER.pack(position, 0))
                heard_s = time.monotonic()
            if self.min_offset <= position < self.end:
                for header in frame_bounds(position, self.end, self.frame_bytes, self.segment_bytes):
                    at = header.offset - self.min_offset
                    body = bytes(self.content[at : at + header.size_bytes])
                    if self.script is None or not self.script(self, connected, header.offset, body):
                        connected.sendall(HEADER.pack(*header) + body)
                    position = header.offset + header.size_bytes
                if self.manner == OURS:
                    connected.sendall(HEADER.pack(position, 0))
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > self.heartbeat_s:
                connected.sendall(HEADER.pack(position, 0))
                heard_s = time.monotonic()
            else:
                select.select([connected], [], [], self.heartbeat_s / 4)

    def drop(self) -> None:
        """Close the open connections; the next one is served as before."""
        self.drops += 1

    def close(self) -> None:
        self.running = False
        self.thread.join()
        for thread in self.threads:
            thread.join()
        self.listening.close()

    def __enter__(self) -> ScriptedMaster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
