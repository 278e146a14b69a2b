"""The index part of the whole-store check: chains, and every entry against the record it names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyengine.formats.index_file import IndexLayout
from pyengine.storage.check.report import Severity
from pyengine.storage.check.work import StoreUnderCheck
from pyengine.storage.recovery.index import list_index_files, makes_sense, read_index_header


def index_files_to_check(root: Path, *, is_running: bool) -> list[Path]:
    """Oldest first; a running engine's newest one may be in the middle of a put and is left out."""
    files = list_index_files(root)
    return files[:-1] if is_running else files


def check_index(store: StoreUnderCheck, layout: IndexLayout, files: Sequence[Path]) -> None:
    """`files`: those that `work` was told of at the beginning. A running engine rolls to new ones meanwhile, and deletes others."""
    log, work, findings = store.log, store.work, store.findings
    covered_from, keys = None, 0
    for path in files:
        if store.is_running and not path.exists():
            continue
        store.report.index_files += 1
        name = str(path.relative_to(store.root))
        if path.stat().st_size != layout.size_bytes:
            findings.error("index length", name, None,
                           f"{path.stat().st_size} bytes, not {layout.size_bytes} as its slots and entries need")
            continue
        header = read_index_header(path)
        if not makes_sense(header, layout):
            findings.error("index header", name, 0, f"the header makes no sense: {header}")
            continue
        broken = work.broken_chain(path, layout, header.index_count)
        if broken:
            where = layout.entry_at(broken) if broken > 0 else layout.slot_at(-1 - broken)
            what = f"entry {broken}" if broken > 0 else f"slot {-1 - broken}"
            findings.error("index chain", name, where, f"{what} is not chained as its hash wants it")
            continue
        if covered_from is None and header.index_count > 1:
            covered_from = header.begin_physical_offset
        for part in work.index_parts(path, name, layout, header.index_count):
            found = work.keys(log, part)
            findings.take(found.findings)
            store.report.index_keys += found.keys
            keys += found.keys
            if found.beyond:
                if not store.is_running:  # else the file was filled while the check was under way
                    findings.warning("key beyond the log", name, layout.entry_at(found.beyond),
                                     f"{header.index_count - found.beyond} entries name records after the log's end, {log.end}")
                break
    if covered_from is None or store.is_running:
        return
    expected = work.count_keys(log, max(covered_from, log.min_offset))
    if keys < expected:
        severity = Severity.ERROR if store.is_ours and store.was_stopped else Severity.WARNING
        findings.add(severity, "missing keys", "index", None,
                     f"the index holds {keys} of the {expected} keys that the log has from {covered_from} on")
