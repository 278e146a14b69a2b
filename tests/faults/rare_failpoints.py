"""The steps of a writer that ordinary puts do not pass: as writer_failpoints.py, each in a case of its own.

    python -m faults.rare_failpoints          prints the steps that struck, as a JSON list
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import tempfile
from pathlib import Path

from crash.board import Board
from faults.writer_failpoints import Case
from fix_writer_rig import answer_of, submit
from pyengine.formats.constants import BLANK_MAGIC
from pyengine.formats.record import decode_record
from pyengine.native import control as control_native
from pyengine.native import writer as writer_native
from pyengine.native.session import PUT
from pyengine.native.writer import copy_queue_table, format_queue_table, get_queue_offset, queue_table_bytes, view_queue_table
from pyengine.results import PutStatus

STATUS = 5  # in a completion
LIGHT_QUEUE = "%LMQ%u"
FREEZES = ("freeze_claimed", "freeze_numbered", "freeze_reasoned", "freeze_stated", "freeze_complete")


class LightQueueCase(Case):
    """Every single put has a place in a light queue too."""

    properties = f"TAGS\x01s\x02INNER_MULTI_DISPATCH\x01{LIGHT_QUEUE}".encode()

    def started(self, writer: writer_native.Writer) -> None:
        writer.enable_multi_dispatch(lmq=True, lmq_max=1000)

    def verify(self) -> None:
        super().verify()
        at, places = 0, []
        while at < self.rig.wrote():
            size, magic = struct.unpack_from(">iI", self.rig.log, at)
            if magic != BLANK_MAGIC:
                place = decode_record(self.rig.log, at).properties.get("INNER_MULTI_QUEUE_OFFSET")
                places += [int(place)] if place else []
            at += size
        assert places == list(range(len(places))) and places
        assert get_queue_offset(self.rig.table, LIGHT_QUEUE, 0) == len(places)


class BadProducerCase(Case):
    """One more session, whose ring holds garbage."""

    def run(self, arms: list[tuple[str, int]]) -> bool:
        hostile = self.rig.open_session(len(self.sent)).pointer
        for at in range(64):
            hostile.ring[at] = 0xFF
        hostile.session.tail = 64
        self.bad = self.rig.sessions.pop(len(self.sent))  # nothing waits for its answers
        slot = len(self.sent)
        attach = self.rig.attach_sessions
        self.rig.attach_sessions = lambda: (attach(), self.rig.writer.attach_session(slot, self.bad[1], 1, 64 * 1024))
        return super().run(arms)

    def verify(self) -> None:
        super().verify()
        assert control_native.load(self.rig.control.sessions[len(self.sent)], "state") == control_native.SESSION_DEAD
        assert self.bad[1].closed


class TableCase(Case):
    """The writer changes to a larger queue table as soon as it exists."""

    def __init__(self, mode: str, folder: Path, board: Board) -> None:
        super().__init__(mode, folder, board)
        self.small = self.rig.table
        self.memory = mmap.mmap(-1, queue_table_bytes(2048))
        self.large = view_queue_table(self.memory)
        format_queue_table(self.large, 2048, 2)
        for slot in self.rig.control.slots:
            slot.queue_table_generation = 1

    def current_table(self):
        slot = self.rig.control.slots[control_native.load_position(self.rig.control.slot_pass) & 1]
        return self.large if slot.queue_table_generation == 2 else self.small

    def start_writer(self) -> int:
        self.rig.table = self.current_table()
        return super().start_writer()

    def started(self, writer: writer_native.Writer) -> None:
        if self.rig.table is self.small and get_queue_offset(self.small, "P0", 0) is not None:
            copy_queue_table(self.large, self.small)
            writer.use_table(self.large)

    def verify(self) -> None:
        self.rig.table = self.current_table()
        assert self.rig.table is self.large
        super().verify()


def killed_in_freeze(name: str, folder: Path, board: Board) -> bool:
    """Who freezes the store is killed over it: it is frozen all the same, and no put is taken."""
    case = Case("async", folder, board)
    try:
        board.arm(name)
        pid = os.fork()
        if pid == 0:
            board.use("flusher")
            control_native.freeze(case.rig.control, control_native.FLUSHER, 5, "the disk is gone")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        struck = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and board.struck_pid == pid
        board.disarm()
        case.rig.start_writer()
        sequence = submit(case.producers[0], PUT, b"T", b"", b"body")
        case.rig.drain()
        assert answer_of(case.producers[0], sequence)[STATUS] == PutStatus.SERVICE_NOT_AVAILABLE
        assert case.rig.wrote() == 0 and control_native.load(case.rig.control.state, "frozen") != 0
        return struck
    finally:
        case.rig.close()


def main() -> int:
    struck: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        board = Board(Path(scratch, "board"))

        def folder(name: str) -> Path:
            made = Path(scratch, name)
            made.mkdir()
            return made

        for name, kind, arms in (
            ("light_queue_advanced", LightQueueCase, [("light_queue_advanced", 2)]),
            ("session_accused", BadProducerCase, [("session_accused", 1)]),
            ("session_closed", BadProducerCase, [("session_closed", 1)]),
            # The table is copied when there is something in it: by the successor of a dead writer.
            ("queue_table_copying", TableCase, [("pass_done", 1), ("queue_table_copying", 2)]),
        ):
            struck += [name] * kind("async", folder(name), board).run(arms)
        struck += [name for name in FREEZES if killed_in_freeze(name, folder(name), board)]
    print(json.dumps(struck))
    return 0


if __name__ == "__main__":
    sys.exit(main())
