"""The index part of the whole-store check: chains, and every entry against the record it names."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from pyengine.formats.index_file import IndexHeader, IndexLayout, unpack_entry, unpack_header
from pyengine.native.store_check import broken_chain, count_keys, first_unfounded_key
from pyengine.storage.check_log import LogSegments
from pyengine.storage.check_report import CheckReport, Findings, Severity
from pyengine.storage.index_recovery import list_index_files, makes_sense
from pyengine.storage.segment_files import mapped


def check_index(
    root: Path, layout: IndexLayout, log: LogSegments, findings: Findings, report: CheckReport, *,
    is_ours: bool, was_stopped: bool, is_running: bool,
) -> None:
    """All index files, oldest first; a running engine's newest one may be in the middle of a put and is left out."""
    files = list_index_files(root)
    looked_at = files[:-1] if is_running else files
    covered_from, keys = None, 0
    for path in looked_at:
        report.index_files += 1
        name = str(path.relative_to(root))
        if path.stat().st_size != layout.size_bytes:
            findings.error("index length", name, None,
                           f"{path.stat().st_size} bytes, not {layout.size_bytes} as its slots and entries need")
            continue
        with mapped(path) as view:
            header = unpack_header(view)
            if not makes_sense(header, layout):
                findings.error("index header", name, 0, f"the header makes no sense: {header}")
                continue
            broken = broken_chain(view, layout, header.index_count)
            if broken:
                where = layout.entry_at(broken) if broken > 0 else layout.slot_at(-1 - broken)
                what = f"entry {broken}" if broken > 0 else f"slot {-1 - broken}"
                findings.error("index chain", name, where, f"{what} is not chained as its hash wants it")
                continue
            if covered_from is None and header.index_count > 1:
                covered_from = header.begin_physical_offset
            keys += _check_entries(view, name, layout, header, log, findings, report)
    if covered_from is None or is_running:
        return
    expected = sum(
        count_keys(view, base, first, last) for base, first, last, view in log.ranges(max(covered_from, log.min_offset))
    )
    if keys < expected:
        severity = Severity.ERROR if is_ours and was_stopped else Severity.WARNING
        findings.add(severity, "missing keys", "index", None,
                     f"the index holds {keys} of the {expected} keys that the log has from {covered_from} on")


def _check_entries(
    view, name: str, layout: IndexLayout, header: IndexHeader, log: LogSegments, findings: Findings, report: CheckReport
) -> int:
    """How many entries name a record that the log holds. Entries stand in the log's order."""

    def offset_of(number: int) -> int:
        return unpack_entry(view, layout.entry_at(number)).physical_offset

    count = header.index_count
    at = 1 + bisect_left(range(1, count), log.min_offset, key=offset_of)
    found = 0
    while at < count:
        offset = offset_of(at)
        segment = log.view_at(offset)
        if segment is None and offset >= log.end:
            findings.warning("key beyond the log", name, layout.entry_at(at),
                             f"{count - at} entries name records at or behind {offset}, where the log has ended")
            break
        reached = at
        if segment is not None:
            base, limit, log_view = segment
            reached = first_unfounded_key(log_view, base, limit, view, layout, at, count)
        found += reached - at
        if reached == count:
            break
        if reached == at:
            findings.error("wrong key", name, layout.entry_at(at), f"entry {at} names {offset}, where no message has its key")
            reached += 1
        at = reached
    report.index_keys += found
    return found
