"""The whole-store check: log, queues, index, config/, checkpoint, watermark and a list of acknowledged messages.

Library code that the command, the tests and the crash scripts call. It never writes.
A store that the real RocketMQ stopped in order has no findings.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from pyengine.errors import NotAStoreError, StoreRefusedError
from pyengine.formats.paths import StorePaths
from pyengine.storage.abort_file import abort_file_exists
from pyengine.storage.check.acked import check_acked
from pyengine.storage.check.config import check_config
from pyengine.storage.check.extensions import check_extensions
from pyengine.storage.check.grades import REFUSED_BY_RECOVER
from pyengine.storage.check.index import check_index, index_files_to_check
from pyengine.storage.check.log import LogFacts, check_log
from pyengine.storage.check.queues import QueueCheck
from pyengine.storage.check.report import CheckProgress, CheckReport, Finding, Findings, Severity
from pyengine.storage.check.segments import LogSegments
from pyengine.storage.check.work import CheckWork
from pyengine.storage.commit_log import list_log, log_exists, shown
from pyengine.storage.geometry import Geometry
from pyengine.storage.later_format import later_things, queues_are_elsewhere
from pyengine.storage.log_scan import LogScan, LogView, find_end, own_watermark
from pyengine.storage.recovery.cut_log import cut_path
from pyengine.storage.recovery.index import list_index_files
from pyengine.storage.recovery.marker import read_marker
from pyengine.storage.recovery.queues import list_queues
from pyengine.storage.recovery.rebuild_marker import read_rebuild_marker
from pyengine.storage.recovery.recover import lost_messages, would_refuse
from pyengine.storage.recovery.report import copy_note
from pyengine.storage.store_checkpoint import read_checkpoint
from pyengine.storage.watermark import read_sync_failure, read_watermark


def check(
    root: Path | str,
    geometry: Geometry,
    *,
    acked: Path | str | None = None,
    limit: int | None = None,
    message_index_enable: bool = True,
    enable_multi_dispatch: bool = False,
    progress: CheckProgress | None = None,
    work: CheckWork | None = None,
) -> CheckReport:
    """Look at everything; the report's exit code is 3 when there is an error among the findings.

    `limit` is for a store that an engine has open: its `reput_from`, beyond which
    nothing is judged. Light queues are missed with `enable_multi_dispatch`, or where any are there.
    `work` reads for the check (default: here). Raises NotAStoreError, UsageError (the list of acknowledged
    messages), DiskError. Files that RocketMQ would refuse are findings, not exceptions.
    """
    root = Path(root)
    paths = StorePaths(root)
    if not log_exists(root) and not any(path.exists() for path in (paths.checkpoint, paths.consume_queue)):
        raise NotAStoreError(f"{root} holds no store: there is no commitlog in it")
    started_s = time.monotonic()
    work = work or CheckWork()
    report = CheckReport()
    findings = Findings(report)
    reading = read_watermark(root)
    watermark = own_watermark(reading, 0)
    is_running = limit is not None
    was_stopped = is_running or not abort_file_exists(root)
    size_bytes = geometry.mapped_file_size_commit_log_bytes
    try:
        log = LogSegments(list_log(root, size_bytes), size_bytes)
        queues = list_queues(root, geometry.mapped_file_size_consume_queue_bytes)
    except StoreRefusedError as error:
        where = next((word.rstrip(":") for word in str(error).split() if word.startswith(f"{root}/")), "")
        findings.error("refused", where.removeprefix(f"{root}/"), None,
                       f"{str(error).replace(f'{root}/', '')}; RocketMQ would not open the store")
        if not is_running:
            _check_notes(root, findings, reading.damage, was_stopped)
        report.seconds = time.monotonic() - started_s
        return report
    index_files = index_files_to_check(root, is_running=is_running) if message_index_enable else []
    view = LogView.of(log.segments, size_bytes, own_watermark(reading, log.min_offset))
    end = LogScan(limit, limit, "range_end") if limit is not None else find_end(root, view)
    log.end = end.end_offset
    work.begin(log, index_files, geometry.index_layout)
    facts = check_log(
        root, log, work, findings, report, end=end, is_running=is_running, watermark=watermark, was_stopped=was_stopped,
        progress=progress or (lambda done, total: None),
    )
    if reading.is_copied:
        findings.info("copy", "config/watermark", None, copy_note(report.end_offset, reading.watermark.flushed))
    is_ours = watermark is not None
    if not is_ours and not is_running and read_marker(root) is None:
        was_emptied = was_stopped and not facts.is_cut_short
        known = lost_messages(root, view, queues, log.end, was_emptied=was_emptied)
        if known:
            findings.error("lost messages", "commitlog", log.end, known)
    queue_check = QueueCheck(
        root, log, facts, work, findings, report, is_ours=is_ours, was_stopped=was_stopped, is_running=is_running
    )
    work.log_is_known(log, queues, queue_check.rules, root)
    for one in later_things(root):
        findings.warning("later format", one.path, None, one.what)
    if not queues_are_elsewhere(root):
        queue_check.check(queues)
        queue_check.check_light_queues(is_expected=enable_multi_dispatch)
        check_extensions(root, geometry, log, queues, findings)
    if message_index_enable:
        check_index(
            root, geometry.index_layout, index_files, log, work, findings, report,
            is_ours=is_ours, was_stopped=was_stopped, is_running=is_running,
        )
    if acked is not None:
        check_acked(root, Path(acked), log, geometry.mapped_file_size_consume_queue_bytes, findings, report)
    check_config(root, findings)
    if not is_running:
        _check_notes(root, findings, reading.damage, was_stopped)
        _check_checkpoint(root, facts, findings, was_stopped)
    if is_ours:
        _check_blocks(root, log, findings)
    log.close()
    if not is_running:
        report.findings = _with_limits(root, geometry, report.findings, is_ours)
    report.findings.sort(key=lambda finding: list(Severity).index(finding.severity))
    report.seconds = time.monotonic() - started_s
    return report


def _with_limits(root: Path, geometry: Geometry, findings: list[Finding], is_ours: bool) -> list[Finding]:
    """The findings, told what `recover` and `rebuild` would not do about them."""
    is_damaged = bool({finding.kind for finding in findings} & REFUSED_BY_RECOVER)
    recover_is_refused = is_damaged and would_refuse(root, geometry)
    lacking = {finding.file for finding in findings if finding.kind == "log gap"}  # queues that the log has holes of
    return [
        replace(finding, recover_is_refused=recover_is_refused,
                rebuild_is_vain=recover_is_refused or is_damaged and is_ours or "/".join(finding.file.split("/")[:3]) in lacking)
        for finding in findings
    ]


def _check_notes(root: Path, findings: Findings, watermark_damage: str, was_stopped: bool) -> None:
    if watermark_damage:
        findings.warning("watermark", "config/watermark", None, watermark_damage.replace(f"{root}/", ""))
    if not was_stopped:
        findings.info("abort", "abort", None, "the store was not stopped in order; `recover` it")
    if cut_path(root).exists():
        findings.warning("marker", "config/cut", None, "a cut of the log was decided on and is not finished; run `recover`")
    failure = read_sync_failure(root)
    if failure is not None:
        findings.warning("marker", "config/sync-failure", None,
                         f"a sync failed ({failure.file or 'the log'}: {failure.cause}), and what it was to sync was not written "
                         "again yet; run `recover`")
    if read_rebuild_marker(root) is not None:
        findings.warning("marker", "config/rebuild", None, "a rebuild has begun and not finished")
    elif read_marker(root) is not None:
        findings.warning("marker", "config/recovery", None, "a recovery has begun and not finished; run `recover` again")


def _check_checkpoint(root: Path, facts: LogFacts, findings: Findings, was_stopped: bool) -> None:
    checkpoint = read_checkpoint(root)
    last_ms = max(facts.last_store_timestamp_ms, 0)
    for name, at, time_ms in (
        ("physicMsgTimestamp", 0, checkpoint.physic_msg_timestamp_ms),
        ("logicsMsgTimestamp", 8, checkpoint.logics_msg_timestamp_ms),
        ("indexMsgTimestamp", 16, checkpoint.index_msg_timestamp_ms),
    ):
        if time_ms > last_ms and not facts.is_damaged:
            severity = Severity.WARNING if not was_stopped else Severity.ERROR
            findings.add(severity, "checkpoint", "checkpoint", at,
                         f"{name} is {time_ms}, later than the newest message ({last_ms})")
    if checkpoint.index_msg_timestamp_ms and not list_index_files(root):
        findings.warning("checkpoint", "checkpoint", 16, "it speaks of an index, but there is none")


def _check_blocks(root: Path, log: LogSegments, findings: Findings) -> None:
    """Our segments have all their blocks, so that a full disk cannot kill the writer; a copied store may not."""
    for segment in log.segments:
        status = os.stat(segment.path)
        if status.st_blocks * 512 < status.st_size:
            findings.info("blocks", shown(segment.path, root), None,
                          f"only {status.st_blocks * 512} of {status.st_size} bytes have blocks on the disk")
