"""What a put's code and answer mean: the status and the sentence that its caller gets.

Pure: nothing here waits, submits or keeps anything. `context` is what the producer remembers of a
put until its answer is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from pyengine.native import control as control_native
from pyengine.native import producer as native
from pyengine.native.writer import REFUSALS
from pyengine.results import PutManyResult, PutResult, PutStatus


@dataclass(frozen=True, slots=True)
class PutContext:
    """What is needed to make a result of an answer."""

    kind: int
    topic: str
    queue_id: int
    store_host: bytes
    waits: int                      # for what: native.producer.DURABLE, CONFIRMED, both or 0
    sizes: Sequence[int] = ()       # batch: of each record, for the message ids
    flush_deadline_ns: int = 0
    slave_deadline_ns: int = 0
    side: Path | None = None


def outcome(session: native.ProducerSession, code: int, stage: int, answer: tuple, context: PutContext,
            flush_timeout_s: float) -> PutResult | PutManyResult:
    """The result of a put that came as far as `stage` and ended with `code` (native.producer)."""
    if code == native.BUSY:
        return busy_refusal(context, session)
    if stage == native.NOT_SUBMITTED:
        return refusal(context, PutStatus.SERVICE_NOT_AVAILABLE,
                       "the writer made no room in time; nothing was submitted (`pyengine status` tells how it is)")
    if stage == native.SUBMITTED:
        ended = ("no process of the engine is alive any more (`pyengine start` recovers the store)" if session.engine_died
                 else "the session ended before the answer" if code == native.CLOSED else "not answered in time")
        return unknown_fate(context, f"submitted, but {ended}: it may or may not be stored")
    status = PutStatus(answer[5])
    reason = REFUSALS.get(answer[6], "")
    indeterminate = False
    if code:
        status = _LATE.get(code, PutStatus.FLUSH_DISK_TIMEOUT)
        indeterminate = code == native.CLOSED
        reason = _why_late(session, code, context, flush_timeout_s)
    return _result(context, status, answer, reason, indeterminate)


_LATE = {native.NO_SLAVE: PutStatus.SLAVE_NOT_AVAILABLE, native.UNCONFIRMED: PutStatus.FLUSH_SLAVE_TIMEOUT}


def _why_late(session: native.ProducerSession, code: int, context: PutContext, flush_timeout_s: float) -> str:
    """What kept a stored message from being durable or confirmed."""
    control = session.control
    if code == native.FROZEN:
        return "stored, but it could not be made durable: " + control_native.reason(control)
    if code == native.CLOSED:
        kept = "durable" if context.waits & native.DURABLE else "confirmed"
        return f"stored, but the engine {'died' if session.engine_died else 'went away'} before it was {kept}"
    if code == native.UNCONFIRMED:
        return (f"stored, but not confirmed by slaves within {control.identity.slave_timeout_ms} ms (slave_timeout_ms); "
                "`pyengine status` shows how far they are")
    if code == native.NO_SLAVE:
        connected = control_native.load(control.replicator, "slaves_connected")
        needed = control.identity.min_in_sync_replicas
        if connected < needed:
            once = " (those at one address count once, unless ha_slaves_share_hosts)" if needed > 1 else ""
            return f"stored, but {connected} of {needed} slaves are connected{once}: nobody confirmed it"
        return ("stored, but slaves are farther behind than ha_slave_fallbehind_max_bytes: it was not waited for "
                "(`pyengine status` shows how far they are)")
    return f"stored, but not durable within {flush_timeout_s:g} s"


def _result(context: PutContext, status: PutStatus, answer: tuple, reason: str, indeterminate: bool):
    _, physical_offset, end_offset, queue_offset, store_timestamp_ms, _, _, count, size_bytes = answer
    stored = physical_offset >= 0
    if context.kind == native.MANY:
        return PutManyResult(status, count if stored else 0, queue_offset, physical_offset, end_offset,
                             store_timestamp_ms, context.topic, context.queue_id, reason, indeterminate)
    msg_id = ""
    if stored and context.sizes:
        starts = accumulate(context.sizes[:-1], initial=physical_offset)
        msg_id = ",".join((context.store_host + start.to_bytes(8, "big")).hex().upper() for start in starts)
    answer = (*answer[:5], int(status), answer[6], count if stored else 0, size_bytes)
    return PutResult.of_answer(answer, context.topic, context.queue_id, context.store_host, reason, indeterminate, msg_id)


def refusal(context: PutContext, status: PutStatus, reason: str) -> PutResult | PutManyResult:
    """Nothing was submitted, and `reason` says what to change."""
    if context.kind == native.MANY:
        return PutManyResult(status, topic=context.topic, queue_id=context.queue_id, reason=reason)
    return PutResult(status, topic=context.topic, queue_id=context.queue_id, reason=reason)


def busy_refusal(context: PutContext, session: native.ProducerSession) -> PutResult | PutManyResult:
    """Nothing was submitted, because the writer's pass lasts too long."""
    limit_ms = session.control.identity.os_page_cache_busy_timeout_ms
    return refusal(context, PutStatus.OS_PAGECACHE_BUSY,
                   f"the writer has been in one pass for more than {limit_ms} ms, memory or the disk is slow: put again later "
                   "(os_page_cache_busy_timeout_ms)")


def unknown_fate(context: PutContext, reason: str) -> PutResult | PutManyResult:
    """It was submitted, and nobody knows what became of it (docs/promises.md, 9)."""
    if context.kind == native.MANY:
        return PutManyResult(PutStatus.UNKNOWN_ERROR, topic=context.topic, queue_id=context.queue_id, reason=reason,
                             indeterminate=True)
    return PutResult(PutStatus.UNKNOWN_ERROR, topic=context.topic, queue_id=context.queue_id, reason=reason, indeterminate=True)
