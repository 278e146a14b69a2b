"""Kill members of groups that acknowledge by message, and the writer beside them, in many rounds; then count.

    python -m crash.members [--rounds 20] [--seed N] [--mode async|pool|sync] [--json]

One group's members own queues, the other's share messages. A round puts messages, and kills one member, all of one group, or the
writer. No message may be lost, and none may come again after its acknowledgement was stored.

Exit 0: held. 1: one was lost or came again, or something hung; the store is kept and named.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyengine
from crash.acked_consumer import SHARING
from crash.report import Summary, crash_parser, ended_in_order, finish, tell
from crash.rounds import SMALL_FILES
from pyengine.cli.torture import EngineWatch, HangError, kill, wait_for
from pyengine.engine_config import MODES

TOPIC, QUEUES, MEMBERS, MESSAGES = "work", 3, 3, 200
WAIT_S = 120.0


@dataclass
class MemberSummary(Summary):
    """`again`: the messages that came again, none of whose acknowledgements were stored."""

    again: int = 0


class MemberRun:
    """One store, an engine, and the members of both groups."""

    def __init__(self, store: Path, scratch: Path, mode: str, seed: int) -> None:
        self.store, self.scratch, self.mode = store, scratch, mode
        self.summary = MemberSummary("member", mode, seed)
        self.rng = random.Random(f"{seed}/member/{mode}")
        self.members: dict[str, list[subprocess.Popen[bytes]]] = {sharing: [] for sharing in SHARING}
        self.put = 0

    @property
    def failures(self) -> list[str]:
        return self.summary.failures

    def run(self, rounds: int) -> MemberSummary:
        since_s = time.monotonic()
        with pyengine.Engine(self.store, **SMALL_FILES | MODES[self.mode]):
            try:
                for sharing in SHARING:
                    self.members[sharing] = [self.start(sharing) for _ in range(MEMBERS)]
                for _ in range(rounds):
                    self.strike()
                for sharing in SHARING:
                    wait_for(f"{sharing}: every message is done", lambda sharing=sharing: self.is_done(sharing), WAIT_S)
            except HangError as error:
                self.failures.append(str(error))
            finally:
                self.leave(held=False)
        for sharing in SHARING:
            self.judge(sharing)
        self.summary.seconds = round(time.monotonic() - since_s, 1)
        return self.summary

    def leave(self, *, held: bool) -> None:
        """End the members."""
        for each in [each for members in self.members.values() for each in members]:
            each.kill()
            each.wait()

    def strike(self) -> None:
        with pyengine.connect(self.store) as producer:
            for queue_id in range(QUEUES):
                producer.put_many(TOPIC, [b"%d" % (self.put + number) for number in range(MESSAGES)], queue_id=queue_id)
        self.put += MESSAGES
        least = {sharing: len(self.lines(sharing)) + self.rng.randrange(MESSAGES) // 10 for sharing in SHARING}
        wait_for("members read on", lambda: all(len(self.lines(sharing)) >= count for sharing, count in least.items()), WAIT_S)
        sharing, chance = self.rng.choice(SHARING), self.rng.random()
        if chance < 0.2:
            with EngineWatch(self.store) as watch:
                kill(watch.pid("writer"))
        members = self.members[sharing]
        victims = list(range(MEMBERS)) if chance > 0.8 else [self.rng.randrange(MEMBERS)]
        for each in victims:
            members[each].kill()
        for each in victims:
            members[each].wait()
            members[each] = self.start(sharing)
        self.summary.kills += len(victims) + (chance < 0.2)
        self.summary.rounds += 1
        tell(f"round {self.summary.rounds}: {self.summary.kills} kills, {self.put * QUEUES:,} messages put")

    def start(self, sharing: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "crash.acked_consumer", str(self.store), str(self.list_of(sharing)), "--acks", sharing]
        return subprocess.Popen([*command, "--topic", TOPIC], env=os.environ)

    def list_of(self, sharing: str) -> Path:
        return self.scratch / sharing

    def lines(self, sharing: str) -> list[bytes]:
        path = self.list_of(sharing)
        return path.read_bytes().splitlines() if path.exists() else []

    def is_done(self, sharing: str) -> bool:
        states = pyengine.ConsumerGroups(self.store).groups(group=sharing)
        return [queue.committed for state in states for queue in state.queues.values()] == [self.put] * QUEUES

    def judge(self, sharing: str) -> None:
        """Compare the list of one group's members with what was put."""
        got: Counter[tuple[int, int]] = Counter()
        stored: set[tuple[int, int]] = set()
        for line in map(json.loads, self.lines(sharing)):
            messages = [(queue, offset) for queue, offset in line.get("got", line.get("stored", ()))]
            if "got" in line:
                self.failures.extend(f"{sharing}: {each} came again after its acknowledgement was stored" for each in stored & {*messages})
                got.update(messages)
            else:
                stored.update(messages)
        lost = {(queue, offset) for queue in range(QUEUES) for offset in range(self.put)} - got.keys()
        self.failures.extend(f"{sharing}: {each} never came" for each in sorted(lost)[:10])
        self.summary.lost += len(lost)
        self.summary.acknowledged += len(stored)
        self.summary.checked += self.put * QUEUES
        self.summary.again += sum(count - 1 for count in got.values())


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, has_peer=False)
    arguments = parser.parse_args()
    return finish(arguments, lambda store, scratch: MemberRun(store, scratch, arguments.mode, arguments.seed),
                  lambda run: run.run(arguments.rounds),
                  lambda summary: f"{summary.again} messages came again that were not acknowledged, or not yet stored as that")


if __name__ == "__main__":
    sys.exit(main())
