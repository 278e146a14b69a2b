"""What becomes of a message that is put in a transaction."""

from __future__ import annotations

from pyengine.engine_config import EngineConfig
from shapes import Picture

SIZE = (760, 300)
ALT = """A message of a transaction is stored in the half topic, where no consumer sees it. If the block ends, it is committed:
stored again in its real topic. If the block ends by an exception, it is rolled back. If the program was killed, it stays
undecided until a checker says commit, rollback or None; None means that it is asked again. After 15 tries or 72 hours it is
moved to TRANS_CHECK_MAX_TIME_TOPIC."""


def draw(p: Picture) -> None:
    config = EngineConfig()
    put = p.box(16, 112, 110, 48, "put", "in the block", fill="blue")
    half = p.box(190, 106, 186, 60, "half message", "`RMQ_SYS_TRANS_HALF_", "`TOPIC", fill="yellow", size=12)
    done = p.box(560, 24, 184, 52, "committed", "stored in the real topic", fill="green")
    back = p.box(560, 110, 184, 52, "rolled back", "no consumer sees it", fill="red")
    checker = p.box(300, 216, 150, 52, "checker", "asked by a producer", fill="blue")
    p.box(560, 212, 184, 60, "given up", "`TRANS_CHECK_MAX_TIME_", "`TOPIC", size=12)
    p.line(put.right, half.left, head=True)
    p.line((283, 106), (283, 50), done.left, head=True, colour="green_edge")
    p.text(330, 44, "the block ends", 12, colour="muted")
    p.line(half.right, back.left, head=True, colour="red_edge")
    p.text(388, 130, "it ends by an exception", 12, colour="muted")
    p.line((220, 166), (220, 242), checker.left, head=True)
    p.text(212, 200, "killed: undecided for", 12, anchor="end", colour="muted")
    p.text(212, 216, f"{config.transaction_timeout_ms // 1000} s, then asked each", 12, anchor="end", colour="muted")
    p.text(212, 232, f"{config.transaction_check_interval_ms // 1000} s", 12, anchor="end", colour="muted")
    p.line((430, 216), (430, 190), (544, 190), (544, 64), (560, 64), head=True, colour="green_edge")
    p.text(438, 184, '"commit"', 12, colour="muted")
    p.line((450, 230), (552, 230), (552, 150), (560, 150), head=True, colour="red_edge")
    p.text(458, 224, '"rollback"', 12, colour="muted")
    p.line((330, 216), (330, 166), head=True)
    p.text(338, 204, "None: later", 12, colour="muted")
    p.line((450, 256), (560, 256), head=True)
    p.text(456, 272, f"{config.transaction_check_max} tries or", 12, colour="muted")
    p.text(456, 287, f"{config.file_reserved_time_hours} hours", 12, colour="muted")
