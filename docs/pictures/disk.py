"""At which use of the disk the cleaner deletes and puts are refused."""

from __future__ import annotations

from pyengine.engine_config import EngineConfig
from shapes import Picture

SIZE = (760, 250)
ALT = """A gauge of disk use. Below 75 % what is older than 72 hours is deleted in the hours of delete_when only. From 75 % on
it is deleted at any hour. From 85 % on, if less than 16 GiB are left, the oldest segments are deleted whatever their age. From
90 % on, if less than 16 GiB are left, puts are refused too."""


def draw(p: Picture) -> None:
    config = EngineConfig()
    left, width = 20, 720
    marks = [0, config.disk_max_used_space_ratio, config.disk_space_clean_forcibly_ratio, config.disk_space_warning_level_ratio, 100]
    enough = f"{config.disk_space_enough_bytes >> 30} GiB"
    age = f"{config.file_reserved_time_hours} h"
    p.text(left, 28, "disk used", bold=True)
    for number, fill in enumerate(("green", "blue", "yellow", "red")):
        at, end = (left + width * marks[number + side] / 100 for side in (0, 1))
        p.rect(at, 56, end - at, 40, fill, edge=f"{fill}_edge")
    for mark in marks:
        p.text(left + width * mark / 100, 50, f"{mark} %", 12, anchor="start" if mark == 0 else "end" if mark == 100 else "middle")
    p.text(left + 10, 81, f"older than {age}: deleted at {config.delete_when}:00", 12)
    notes = (("blue", f"older than {age}: deleted at any hour"), ("yellow", f"less than {enough} left: the oldest, whatever their age"),
             ("red", f"less than {enough} left: puts are refused too"))
    for number, (fill, text) in enumerate(notes):
        mark = left + width * (marks[number + 1] + marks[number + 2]) / 200
        y = 132 + 30 * number
        p.line((mark, 96), (mark, y - 5), (mark - 40, y - 5), colour=f"{fill}_edge")
        p.text(mark - 48, y, text, anchor="end")
    p.text(left, 232, f"With {enough} or more left, the marks of {marks[2]} and {marks[3]} % mean nothing.", 12, colour="muted")
