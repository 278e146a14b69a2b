"""Kill a writer at each step of its pass, over anonymous shared memory, and let its successors finish.

    python -m faults.writer_failpoints MODE MAX_NTH [POINT...]

Needs a build with failpoints. Each step of the list that a writer passes here is armed for its 1st to
MAX_NTH-th passing; what must hold afterwards is what test_writer_kill.py asks for: each entry executed
exactly once and in order, queue offsets dense, no byte after the end. Prints a JSON document: step -> how
many of the kills struck (a step is passed only so often), and fails on the first thing that does not hold.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

from crash.board import Board
from crash.steps import FAILPOINTS, PUTS, Failpoint
from fix_writer_rig import WriterRig, submit
from native.test_writer_kill import PRODUCERS, QUEUES, SLOTS, producer_sequence, verify
from pyengine.native import control as control_native
from pyengine.native import writer as writer_native
from pyengine.native.session import MANY, PUT, pack_many
from waiting import scaled_timeout_s

WAVES = 3
ENTRIES = 3  # of each producer in each wave
TIMEOUT_S = scaled_timeout_s(20.0)
STEP_S = 0.0003
RIG_FILES = ("csrc/writer.c", "csrc/take_entry.c", "csrc/undo.h", "csrc/log_tail.c", "csrc/record.c", "csrc/queue_table.c", "csrc/latch.c")
NOBODY_ELSE = ("latch_taken",)  # a writer alone wakes no other worker
MODES = {"async": control_native.MODE_MAPPED, "gathered": control_native.MODE_MAPPED, "sync": control_native.MODE_SYNC}
STORED_ONLY = ("tail_intended",)  # async mode has both: small passes are stored, large ones gathered
GATHERED_ONLY = ("tail_stage_intended", "tail_gathered", "tail_written")


class Case:
    """One rig, one armed step."""

    properties = b"TAGS\x01s"

    def __init__(self, mode: str, folder: Path, board: Board) -> None:
        self.rig = WriterRig(segment_bytes=4096, segments=64, mode=MODES[mode])
        self.rig.folder = folder
        self.rig.zero_ahead_bytes = 1024
        self.rig.gather_bytes_min = int(mode == "gathered")
        self.board = board
        self.deaths = 0
        self.sent = [0] * PRODUCERS
        self.producers = [self.rig.open_session(slot) for slot in SLOTS]

    def start_writer(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self.board.use("writer")
            self.started(self.rig.start_writer())
            while True:
                self.rig.drain(deadline_s=0.05)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(3)

    def started(self, writer: writer_native.Writer) -> None:
        """What a rare case adds to a writer, in its own process."""

    def run(self, arms: list[tuple[str, int]]) -> bool:
        """Whether the last step struck."""
        pid = 0
        try:
            self.board.arm(*arms[0])
            pid = self.start_writer()
            for wave in range(WAVES):
                for number in range(PRODUCERS):
                    self.submit(number, wave)
                pid = self.drained(pid, arms)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = 0
            self.rig.load_files()
            self.verify()
            return self.deaths == len(arms)
        finally:
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.rig.close()

    def submit(self, number: int, wave: int) -> None:
        producer, topic = self.producers[number], b"P%d" % number
        for k in range(ENTRIES):
            bodies = [struct.pack("<qq", number, self.sent[number] + n) + bytes(60 * k) for n in range(9 if k == 1 else 1)]
            where = {"queue_id": (wave + k) % QUEUES}
            if k == 1:
                submit(producer, MANY, topic, b"TAGS\x01m", pack_many(bodies), count=len(bodies), **where)
            else:
                submit(producer, PUT, topic, self.properties, bodies[0], **where)
            self.sent[number] += len(bodies)

    def drained(self, pid: int, arms: list[tuple[str, int]]) -> int:
        """Waits until everything submitted is answered; a writer that dies meanwhile has a successor, whose pid it is."""
        views = [view for _, view in self.rig.sessions.values()]
        deadline_s = time.monotonic() + TIMEOUT_S
        while any(view.acked != producer.sequence or producer_sequence(view) < 0
                  for view, producer in zip(views, self.producers)):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                struck = self.board.struck_pid == pid and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                assert struck, f"the writer ended with status {status}, not at {arms}"
                committed, _ = control_native.committed_slot(self.rig.control)
                assert self.rig.wrote() <= committed, f"at {arms} the log's end was published before its pass was committed"
                self.deaths += 1
                self.board.disarm()
                if self.deaths < len(arms):
                    self.board.arm(*arms[self.deaths])
                pid = self.start_writer()
            assert time.monotonic() < deadline_s, f"a successor did not finish after {arms}"
            time.sleep(STEP_S)
        return pid

    def verify(self) -> None:
        verify(self.rig, self.sent)


def steps(mode: str) -> list[Failpoint]:
    """The steps that a writer passes here."""
    return [point for point in FAILPOINTS.values() if point.where in RIG_FILES and point.scene == PUTS and
            mode.replace("gathered", "async") in point.modes.split() and
            point.name not in (*NOBODY_ELSE, *{"async": GATHERED_ONLY, "gathered": STORED_ONLY}.get(mode, ()))]


def main() -> int:
    mode, nth_max, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    struck: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        board = Board(Path(scratch, "board"))
        for point in steps(mode):
            for nth in range(1, nth_max + 1):
                if names and point.name not in names:
                    continue
                folder = Path(scratch, f"{point.name}-{nth}")
                folder.mkdir()
                arms = [(point.after, 1)] if point.after else []
                if not Case(mode, folder, board).run([*arms, (point.name, nth)]):
                    break
                struck[point.name] = nth
    print(json.dumps(struck))
    return 0


if __name__ == "__main__":
    sys.exit(main())
