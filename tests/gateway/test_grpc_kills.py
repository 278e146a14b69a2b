"""Clients of RocketMQ 5 under kill -9 of each process between them and the disk: nothing acknowledged is lost, little comes again."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter, defaultdict

import pytest

from crash.replicas import free_port
from grpc_caller import V2, Caller, message, start_grpc
from waiting import eventually

SAVED_S = 5.0           # acknowledgements of this time before a kill of the gateway may be lost (docs/gateway.md)
SLACK_S = 3.0           # for the write, and for an answer that was under way
VICTIMS = ("grpc", "gateway", "writer", "grpc", "all", "gateway")


class Sender(threading.Thread):
    """Sends one message after the other, each until it is acknowledged, as RocketMQ's clients do."""

    def __init__(self, port: int, name: str, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.caller, self.sender, self.stop = Caller(port), name, stop
        self.acked: set[bytes] = set()
        self.unsure: set[bytes] = set()  # sent more than once: the lost answer may have been OK

    def run(self) -> None:
        import grpc

        for at in itertools.count():
            if self.stop.is_set():
                return
            sent = message("kills", b"%s %d" % (self.sender.encode(), at))
            while True:
                with contextlib.suppress(grpc.RpcError):
                    if self.caller.SendMessage(messages=[sent], timeout=5).status.code == V2.OK:
                        break
                self.unsure.add(sent.body)
                time.sleep(0.05)
            self.acked.add(sent.body)


class Reader(threading.Thread):
    """Receives and acknowledges at once; notes when."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.caller, self.stop = Caller(port), stop
        self.receipts: list[tuple[bytes, float]] = []
        self.acked_s: list[tuple[bytes, float]] = []

    def run(self) -> None:
        import grpc

        while not self.stop.is_set():
            with contextlib.suppress(grpc.RpcError):
                found = self.caller.receive("kills", "readers", invisible_s=6, poll_s=1)[0]
                self.receipts += [(each.body, time.monotonic()) for each in found]
                if found:
                    for each, entry in zip(found, self.caller.ack("kills", "readers", *found).entries):
                        if entry.status.code == V2.OK:
                            self.acked_s.append((each.body, time.monotonic()))
                continue
            time.sleep(0.05)


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.long)])
def test_nothing_acknowledged_is_lost_and_only_the_last_seconds_come_again(tmp_path, rounds):
    port = free_port()  # the same after each restart
    store = start_grpc(tmp_path / "store", grpc_port=port)
    store.make_topic("kills")
    stop_sending, stop_reading = threading.Event(), threading.Event()
    senders = [Sender(port, f"s{at}", stop_sending) for at in range(3)]
    readers = [Reader(port, stop_reading) for _ in range(2)]
    for each in (*senders, *readers):
        each.start()
    kills: list[float] = []  # of processes that hold acknowledgements
    try:
        for victim in VICTIMS * rounds:
            time.sleep(2)  # load between the kills
            if victim == "all":
                store.engine.kill_all()
                kills.append(time.monotonic())
                store.engine.start()
            else:
                before = store.engine.incarnation(victim)
                store.engine.kill(victim)
                kills += [time.monotonic()] if victim == "gateway" else []
                store.engine.wait_back(victim, before)
        stop_sending.set()
        for each in senders:
            each.join(60)
        sent = set().union(*(each.acked for each in senders))
        # The answer to an acknowledgement may be lost by a kill, after which its handle is not taken again.
        eventually(lambda: sent <= {body for reader in readers for body, _ in reader.receipts}, "all that was sent has come", 60)
    finally:
        stop_sending.set()
        stop_reading.set()
        for each in readers:
            each.join(60)
        store.close()
    acked_s: dict[bytes, list[float]] = defaultdict(list)
    for reader in readers:
        for body, at_s in reader.acked_s:
            acked_s[body].append(at_s)
    unsure = set().union(*(each.unsure for each in senders))
    again = Counter()
    for reader in readers:
        for body, at_s in reader.receipts:
            first_s = min(acked_s[body], default=at_s)
            if body not in unsure and at_s > first_s + SLACK_S:
                assert any(killed_s - SAVED_S - SLACK_S < first_s < killed_s + SLACK_S for killed_s in kills), (
                    f"{body!r} came again, taken {min((abs(killed_s - first_s) for killed_s in kills), default=0):.1f} s from a kill")
                again[body] += 1
    print(f"{len(sent)} sent, {len(unsure)} of them more than once; {len(again)} came again after {len(kills)} kills")
