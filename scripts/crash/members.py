"""Kill members of groups that acknowledge by message, and the engine beside them, in many rounds; then count.

    python -m crash.members [member|everything] [--rounds 20] [--seed N] [--mode async|pool|sync] [--json]

One group's members own queues, the other's share messages. A round puts messages, stops a member for a while or not, and kills:
`member`: one, all of one group, or the writer too; `everything`: all members and the whole engine at once, which then recovers.
No message may be lost, and none may come again after its acknowledgement was stored.

Exit 0: held. 1: one was lost or came again, or something hung; the store is kept and named.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pyengine
from crash.acked_consumer import SHARING
from crash.report import Summary, crash_parser, ended_in_order, finish, tell
from crash.rounds import EVERYTHING, SMALL_FILES
from pyengine.cli.torture import EngineWatch, KillRounds, kill, kill_all, wait_for
from pyengine.engine_config import MODES

TOPIC, QUEUES, MEMBERS, MESSAGES = "work", 3, 3, 200
WAIT_S = 120.0
STOP_SHARE, STOP_S_MAX = 0.2, 2.5  # longer than it takes the others to pass over a member
MEMBER = "member"


@dataclass
class MemberSummary(Summary):
    """`again`: the messages that came again, none of whose acknowledgements were stored. `stops`: of members for a while."""

    again: int = 0
    stops: int = 0


class MemberRun(KillRounds):
    """One store, an engine, and the members of both groups."""

    def __init__(self, store: Path, scratch: Path, kind: str, mode: str, seed: int) -> None:
        super().__init__(store, SMALL_FILES | MODES[mode], random.Random(f"{seed}/{kind}/{mode}"))
        self.scratch, self.kind = scratch, kind
        self.summary = MemberSummary(kind, mode, seed)
        self.members: dict[str, list[subprocess.Popen[bytes]]] = {sharing: [] for sharing in SHARING}
        self.put = 0

    @property
    def failures(self) -> list[str]:
        return self.summary.failures

    def run(self, rounds: int) -> MemberSummary:
        self.summary.seconds = self.run_rounds(lambda: self.summary.rounds < rounds)
        return self.summary

    # -- members, which are the load

    def make_producers(self) -> None:
        """Start members until MEMBERS of each group live, and put what they work on."""
        for sharing, members in self.members.items():
            members[:] = [each for each in members if each.poll() is None]
            members += [self.start(sharing) for _ in range(MEMBERS - len(members))]
        with pyengine.connect(self.store) as producer:
            for queue_id in range(QUEUES):
                producer.put_many(TOPIC, [b"%d" % (self.put + number) for number in range(MESSAGES)], queue_id=queue_id)
        self.put += MESSAGES

    def start(self, sharing: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "crash.acked_consumer", str(self.store), str(self.list_of(sharing)), "--acks", sharing]
        return subprocess.Popen([*command, "--topic", TOPIC], env=os.environ)

    def end_producers(self) -> None:
        for each in self.living():
            each.kill()
            each.wait()

    def living(self) -> list[subprocess.Popen[bytes]]:
        return [each for members in self.members.values() for each in members]

    def acked_count(self) -> int:
        return sum(len(self.lines(sharing)) for sharing in SHARING)

    def settle(self) -> None:
        for sharing in SHARING:
            while not self.is_done(sharing):  # each commit waits for the disk, so that many messages take their time
                count = len(self.lines(sharing)) + 1
                wait_for(f"{sharing}: every message is done, or members read on",
                         lambda sharing=sharing, count=count: len(self.lines(sharing)) > count or self.is_done(sharing), WAIT_S)
        self.end_producers()

    def is_done(self, sharing: str) -> bool:
        states = pyengine.ConsumerGroups(self.store).groups(group=sharing)
        return [queue.committed for state in states for queue in state.queues.values()] == [self.put] * QUEUES

    def clean_up(self) -> None:
        self.end_producers()
        super().clean_up()

    def leave(self, *, held: bool) -> None:
        """It has nothing outside its folder."""

    # -- kills

    def strike(self) -> None:
        least = {sharing: len(self.lines(sharing)) + self.rng.randrange(MESSAGES) // 10 for sharing in SHARING}
        wait_for("members read on", lambda: all(len(self.lines(sharing)) >= count for sharing, count in least.items()), WAIT_S)
        sharing, chance = self.rng.choice(SHARING), self.rng.random()
        if self.rng.random() < STOP_SHARE:
            self.stop(self.rng.choice(self.members[sharing]))
        if self.kind == EVERYTHING:
            self.kill_everything()
            return
        if chance < 0.2:
            with EngineWatch(self.store) as watch:
                kill(watch.pid("writer"))
        victims = self.members[sharing] if chance > 0.8 else [self.rng.choice(self.members[sharing])]
        for each in victims:
            each.kill()
        for each in victims:
            each.wait()
        self.summary.kills += len(victims) + (chance < 0.2)

    def stop(self, member: subprocess.Popen[bytes]) -> None:
        """Stop a member, perhaps in its turn, and let it go on."""
        member.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0, STOP_S_MAX))
        member.send_signal(signal.SIGCONT)
        self.summary.stops += 1

    def kill_everything(self) -> None:
        with EngineWatch(self.store) as watch:
            self.summary.kills += kill_all(watch, [each.pid for each in self.living()], self.rng)
        for each in self.living():
            each.wait()
        self.start_engine()

    def end_round(self) -> None:
        self.summary.rounds += 1
        tell(f"round {self.summary.rounds}: {self.summary.kills} kills, {self.put * QUEUES:,} messages put")

    # -- judgement

    def check_store(self, *, final: bool = False) -> None:
        for sharing in SHARING:
            self.judge(sharing)

    def list_of(self, sharing: str) -> Path:
        return self.scratch / sharing

    def lines(self, sharing: str) -> list[bytes]:
        path = self.list_of(sharing)
        return path.read_bytes().splitlines() if path.exists() else []

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
    parser.add_argument("kind", nargs="?", choices=(MEMBER, EVERYTHING), default=MEMBER, help="what is killed (%(default)s)")
    arguments = parser.parse_args()
    return finish(arguments, lambda store, scratch: MemberRun(store, scratch, arguments.kind, arguments.mode, arguments.seed),
                  lambda run: run.run(arguments.rounds),
                  lambda summary: f"{summary.again} messages came again that were not acknowledged, or not yet stored as that")


if __name__ == "__main__":
    sys.exit(main())
