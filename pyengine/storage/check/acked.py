"""Acknowledged messages that must be there: the list that a test or an application kept of its acks.

One JSON object a line: topic, queue_id, queue_offset, physical_offset, body_sha256 (hex).
Each must be in the log at its offset and in its queue at its place, with that body. The physical
offset may be null (a put_many tells that of its first message only): then the queue says where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from pyengine.errors import FormatError, UsageError
from pyengine.formats.constants import CQ_ENTRY_BYTES
from pyengine.formats.consume_queue import ENTRY, is_live
from pyengine.formats.paths import StorePaths, segment_name
from pyengine.formats.record import Message, decode_record
from pyengine.formats.small_file import PARSE_ERRORS
from pyengine.native.scan import classify
from pyengine.storage.check.report import CheckReport, Findings
from pyengine.storage.check.segments import LogSegments

_FIELDS = {"topic": str, "queue_id": int, "queue_offset": int, "physical_offset": int | None, "body_sha256": str}


def check_acked(
    root: Path, acked: Path, log: LogSegments, queue_file_bytes: int, findings: Findings, report: CheckReport
) -> None:
    """Look for every message of the list; UsageError names the line that is no such object."""
    lines = []
    for number, ack in _read(acked):
        place = _place_by_queue(root, ack, queue_file_bytes)
        lines.append((number, ack, place, place if ack["physical_offset"] is None else ack["physical_offset"]))
    for number, ack, place, offset in sorted(lines, key=lambda line: -1 if line[3] is None else line[3]):
        report.acked += 1
        wrong, kind = _in_log(ack, offset, log) if offset is not None else "", "acked"
        if not wrong and place != offset or offset is None:
            wrong = "its queue has no such entry" if place is None else "its queue entry does not point to it"
            kind = "acked entry"
        if wrong:
            report.acked_missing += 1
            findings.error(
                kind, "commitlog", offset,
                f"acknowledged message {ack['queue_offset']} of queue {ack['queue_id']} of {ack['topic']} "
                f"(line {number}): {wrong}",
            )


def _read(acked: Path) -> Iterator[tuple[int, dict]]:
    try:
        text = acked.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the list of acknowledged messages {acked}: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            ack = json.loads(line)
        except PARSE_ERRORS as error:
            raise UsageError(f"{acked}, line {number}: no JSON ({error})") from error
        if not isinstance(ack, dict) or any(not isinstance(ack.get(name), kind) for name, kind in _FIELDS.items()):
            raise UsageError(f"{acked}, line {number}: needs {', '.join(_FIELDS)}")
        yield number, ack


def _in_log(ack: dict, offset: int, log: LogSegments) -> str:
    """What is wrong with its record at `offset`, or nothing."""
    segment = log.view_at(offset)
    if segment is None:
        return f"the log holds [{log.min_offset}, {log.end}) only"
    base, limit, view = segment
    label = classify(view, offset - base, limit - offset, offset)
    if label != "message":
        return f"no whole record stands there ({label})"
    try:
        message: Message = decode_record(view, offset - base)
    except FormatError as error:
        return f"no whole record stands there ({error})"
    if (message.topic, message.queue_id, message.queue_offset) != (ack["topic"], ack["queue_id"], ack["queue_offset"]):
        return f"message {message.queue_offset} of queue {message.queue_id} of {message.topic} stands there"
    if hashlib.sha256(message.body).hexdigest() != ack["body_sha256"].lower():
        return "its body is another one"
    return ""


def _place_by_queue(root: Path, ack: dict, queue_file_bytes: int) -> int | None:
    """The physical offset in its queue entry; None without one."""
    position = ack["queue_offset"] * CQ_ENTRY_BYTES
    start = position - position % queue_file_bytes
    path = StorePaths(root).queue_folder(ack["topic"], ack["queue_id"]) / segment_name(start)
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(position - start)
            entry = file.read(CQ_ENTRY_BYTES)
    except OSError:
        return None
    if len(entry) < CQ_ENTRY_BYTES or not is_live(ENTRY.unpack(entry)):
        return None
    return ENTRY.unpack(entry)[0]
