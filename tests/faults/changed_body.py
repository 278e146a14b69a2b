"""A producer changes a body in its ring while the writer stores it: the record's checksum fits the bytes that were stored.

    python -m faults.changed_body          exit 0: held

Needs a build with failpoints: the writer is stopped before it copies the body, and before it computes the checksum.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
import zlib
from pathlib import Path

from crash.board import Board
from faults.writer_failpoints import MODES
from fix_writer_rig import WriterRig, answer_of, submit
from pyengine.formats.record import decode_record
from pyengine.native.session import MANY, PUT, pack_many

PHYSICAL = 1  # in a completion
CRC_AT = 8    # in a record
BEFORE, AFTER = b"a" * 3000, b"b" * 3000
STORED = {"record_head_encoded": AFTER, "record_body_copied": BEFORE}


def writer_process(rig: WriterRig, board: Board) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        board.use("writer")
        rig.start_writer()
        while True:
            rig.drain(deadline_s=0.05)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)


def change(mode: str, step: str, kind: int, folder: Path) -> None:
    """One entry, whose first body is changed while the writer is at `step`."""
    rig = WriterRig(segment_bytes=1 << 16, segments=4, mode=MODES[mode])
    rig.folder, rig.gather_bytes_min = folder, int(mode == "gathered")
    board = Board(folder / "board")
    board.arm(step, 1, "stop")
    producer = rig.open_session()
    bodies = [BEFORE, b"z" * 100] if kind == MANY else [BEFORE]
    payload = pack_many(bodies) if kind == MANY else BEFORE
    sequence = submit(producer, kind, b"T", b"", payload, count=len(bodies))
    pid = writer_process(rig, board)
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"the writer ended with status {status}"
        memory, _ = rig.sessions[0]
        at = memory.find(BEFORE)
        memory[at:at + len(AFTER)] = AFTER
        os.kill(pid, signal.SIGCONT)
        start = answer_of(producer, sequence)[PHYSICAL]
        log = (folder / f"{0:020d}").read_bytes() if rig.has_files else rig.log
        body = decode_record(log, start).body
        assert body == STORED[step], (mode, step, body[:10])
        assert int.from_bytes(log[start + CRC_AT:start + CRC_AT + 4], "big") == zlib.crc32(body) & 0x7FFFFFFF, (mode, step)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        rig.close()


def main() -> int:
    for mode in MODES:
        for step in STORED:
            for kind in (PUT, MANY):
                with tempfile.TemporaryDirectory() as folder:
                    change(mode, step, kind, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
