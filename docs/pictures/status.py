"""The words of `pyengine status`: what they come from, and the command that follows."""

from __future__ import annotations

from pyengine.cli.engine_status import STUCK_ROUND_MS, Verdict
from shapes import Picture

SIZE = (760, 440)
ALT = """Three columns: the word of pyengine status, its cause, the next command. Degraded: damage below what had been durable;
pyengine check, then restore, recover with accept-loss, or salvage. Read-only: a failed sync, a full disk, or a master of a
higher term. Stuck: a worker makes no round, or a signal has stopped it, or a link is missing. Stopping and recovering: wait.
Warning: read the sentence. Stopped: pyengine start. Ok: nothing to do."""
ROWS = (
    (Verdict.DEGRADED, "red", (("damage below what was durable", "pyengine check S", "restore, or salvage"),)),
    (Verdict.READ_ONLY, "red", (("a sync or a write failed", "", "repair the disk, then stop and start"),
                                ("the disk is full", "pyengine clean S --until-used 80", ""),
                                ("another master has a higher term", "", "start it as that one's slave"))),
    (Verdict.STUCK, "red", ((f"a worker in one round for {STUCK_ROUND_MS // 1000} s", "dmesg; df", ""),
                            ("a signal has stopped it", "kill -CONT PID", ""),
                            ("a slave or the master is missing", "", "start it, look at the network"))),
    (Verdict.STOPPING, "yellow", (("someone stops the engine", "", "wait"),)),
    (Verdict.WARNING, "yellow", (("clock, settings, builds, a slave", "", "do what the sentence says"),
                                 ("the supervisor is dead", "pyengine start S", ""))),
    (Verdict.RECOVERING, "yellow", (("its owner recovers or starts it", "", "wait"),)),
    (Verdict.STOPPED, "grey", (("no engine runs", "pyengine start S", ""),)),
    (Verdict.OK, "green", (("it takes puts, or follows", "", "nothing to do"),)),
)


def draw(p: Picture) -> None:
    if [row[0] for row in ROWS] != list(Verdict):
        raise ValueError("the words are not those of pyengine/cli/engine_status.py")
    for x, text in ((16, "status says"), (150, "because"), (440, "next (S is the store)")):
        p.text(x, 26, text, bold=True)
    y = 40.0
    for word, fill, causes in ROWS:
        height = 26 * len(causes)
        box = p.box(16, y, 106, height - 4, str(word), fill=fill)
        for number, (cause, command, words) in enumerate(causes):
            middle = y + 26 * number + 11
            p.line((box.right[0], middle), (144, middle), head=True)
            p.text(150, middle + 4, cause)
            p.line((404, middle), (434, middle), head=True)
            place = p.text(440, middle + 4, command, 12, mono=True) if command else None
            p.text(place.x + place.width + 12 if place else 440, middle + 4, words, 12, colour="muted")
        y += height + 3
    p.text(16, y + 18, f"exit code 6: {', '.join(word for word in Verdict if word.is_trouble)}; 0: the others", 12, colour="muted")
