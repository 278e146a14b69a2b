"""Cut the log at a border between records, on purpose: a slave whose master does not have what follows.

    intend_cut(root, Cut(at, end, reason))     durable: from here on the cut will happen
    recover(root, ...)                         carries it out first, then brings queues and index to the log

Nothing else lowers the durable watermark below bytes that are whole, so the note
`config/cut` says so before anything changes, and whoever recovers the store next finishes what
it says, as often as it takes:

    watermark   lowered to the border: what follows is no loss to be reported
    copy        of the border's own segment, from there on, in quarantine/; then the note says "kept"
    segments    behind it go to quarantine/, the newest first
    clear       zeros from the border to the end of its segment
    note        goes; the log ends at the border
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyengine.errors import CorruptionError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.native.failpoint import failpoint
from pyengine.storage.commit_log import list_log
from pyengine.storage.config_file import read_note
from pyengine.storage.mapped_file import clear_file_from, used_end
from pyengine.storage.new_file import sync_folder, write_config
from pyengine.storage.recovery.quarantine import Quarantine
from pyengine.storage.watermark import read_watermark, write_watermark

CUT_NAME = "cut"


@dataclass(frozen=True, slots=True)
class Cut:
    """The log [.., end) shall end at `at`. `kept`: the copy of what is cleared stands in quarantine/."""

    at: int
    end: int
    reason: str
    kept: bool = False


def cut_path(root: Path | str) -> Path:
    return StorePaths(root).config / CUT_NAME


def intend_cut(root: Path | str, cut: Cut) -> None:
    """Durable before this returns. The caller owns the store, and `cut.at` is a border between records above its start."""
    write_config(cut_path(root), _pack(cut), keep_backup=False)


def read_cut(root: Path | str) -> Cut | None:
    """The cut that is under way; None without one. CorruptionError for a note that is not what was written."""
    path = cut_path(root)
    content = read_note(path)
    if content is None:
        return None
    try:
        fields = json.loads(content)
        cut = Cut(int(fields["at"]), int(fields["end"]), str(fields["reason"]), bool(fields["kept"]))
    except PARSE_ERRORS:
        cut = None
    if cut is None or content != _pack(cut):
        raise CorruptionError(f"{path} is damaged: a cut of the log was under way. Remove the file to keep what the log holds "
                              "now; a slave finds out again from its master what has to go")
    return cut


def carry_out_cut(root: Path | str, size_bytes: int, cut: Cut, quarantine: Quarantine,
                  on_step: Callable[[str], None] = lambda name: None) -> str:
    """Do what the note says, from wherever an earlier attempt left it; a sentence about it."""
    watermark = read_watermark(root).watermark
    if watermark is not None and watermark.flushed > cut.at:
        on_step("cut: watermark")
        write_watermark(root, watermark.moved_to(cut.at))
        failpoint("cut_watermark_lowered")
    segments = list_log(root, size_bytes)
    holder = next((each for each in segments if each.start_offset < cut.at < each.start_offset + size_bytes), None)
    if holder is not None and not cut.kept:
        on_step("cut: copy")
        quarantine.keep_bytes(holder.path, holder.start_offset, cut.at, holder.start_offset + size_bytes, cut.reason)
        failpoint("cut_copied")
    if not cut.kept:
        on_step("cut: kept")
        intend_cut(root, replace(cut, kept=True))
        failpoint("cut_kept")
    for segment in reversed(segments):
        if segment.start_offset < cut.at:
            break
        on_step("cut: segment")
        if used_end(segment.path):
            quarantine.keep_file(segment.path, segment.start_offset, cut.reason)
        else:
            segment.path.unlink()
            sync_folder(segment.path.parent)
        failpoint("cut_segment_gone")
    if holder is not None:
        on_step("cut: clear")
        clear_file_from(holder.path, cut.at - holder.start_offset)
        failpoint("cut_cleared")
    on_step("cut: note")
    path = cut_path(root)
    path.unlink()
    failpoint("cut_note_unlinked")
    sync_folder(path.parent)
    failpoint("cut_done")
    return f"the log was cut at {cut.at}, {cut.end - cut.at:,} bytes of it are in quarantine: {cut.reason}"


def _pack(cut: Cut) -> bytes:
    fields = asdict(cut)
    crc = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields | {"crc": f"{crc:08x}"}, indent=1).encode() + b"\n"
