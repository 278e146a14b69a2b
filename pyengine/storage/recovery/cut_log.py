"""Cut the log at a border between records, on purpose: a slave whose master does not have what follows.

    intend_cut(root, Cut(at, end, reason))     durable: from here on the cut will happen
    recover(store, ...)                        carries it out first, then brings queues and index to the log

Nothing else lowers the durable watermark below bytes that are whole, so the note
`config/cut` says so before anything changes, and the next recovery of the store finishes
what it says, as often as it takes:

    watermark   lowered to the border: what follows is no loss to be reported
    copy        of the border's own segment, from there on, in quarantine/; then the note says "kept"
    segments    after it go to quarantine/, the newest first
    clear       zeros from the border to the end of its segment
    note        goes; the log ends at the border
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pyengine.errors import CorruptionError
from pyengine.formats.paths import Root
from pyengine.native.failpoint import failpoint
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.mapped_file import clear_file_from, used_end
from pyengine.storage.message_store import MessageStore
from pyengine.storage.new_file import sync_folder
from pyengine.storage.recovery.quarantine import Quarantine
from pyengine.storage.watermark import write_watermark


@dataclass(frozen=True, slots=True)
class Cut:
    """The log [.., end) shall end at `at`. `kept`: the copy of what is cleared is in quarantine/."""

    at: int
    end: int
    reason: str
    kept: bool = False


_CUT: DurableRecord[Cut] = DurableRecord(
    "cut", asdict, lambda fields: Cut(int(fields["at"]), int(fields["end"]), str(fields["reason"]), bool(fields["kept"])), indent=1)


def cut_path(root: Root) -> Path:
    return _CUT.path(root)


def intend_cut(root: Root, cut: Cut) -> None:
    """Durable before this returns. The caller owns the store, and `cut.at` is a border between records above its start."""
    _CUT.write(root, cut)


def read_cut(root: Root) -> Cut | None:
    """The cut that is under way; None without one. CorruptionError for a note that is not what was written."""
    cut, damage = _CUT.read(root)
    if damage:
        raise CorruptionError(f"{cut_path(root)} is damaged: a cut of the log was under way. Remove the file to keep what the log "
                              "holds now; a slave finds out again from its master what has to go")
    return cut


def carry_out_cut(store: MessageStore, cut: Cut, quarantine: Quarantine,
                  on_step: Callable[[str], None] = lambda name: None) -> str:
    """Do what the note says, from wherever an earlier attempt left it; a sentence about it."""
    watermark, size_bytes = store.read_watermark().watermark, store.segment_bytes
    if watermark is not None and watermark.flushed > cut.at:
        on_step("cut: watermark")
        write_watermark(store, watermark.moved_to(cut.at))
        failpoint("cut_watermark_lowered")
    segments = store.list_log()
    holder = next((each for each in segments if each.start_offset < cut.at < each.start_offset + size_bytes), None)
    if holder is not None and not cut.kept:
        on_step("cut: copy")
        quarantine.keep_bytes(holder.path, holder.start_offset, cut.at, holder.start_offset + size_bytes, cut.reason)
        failpoint("cut_copied")
    if not cut.kept:
        on_step("cut: kept")
        intend_cut(store, replace(cut, kept=True))
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
    path = cut_path(store)
    path.unlink()
    failpoint("cut_note_unlinked")
    sync_folder(path.parent)
    failpoint("cut_done")
    return f"the log was cut at {cut.at}, {cut.end - cut.at:,} bytes of it are in quarantine: {cut.reason}"
