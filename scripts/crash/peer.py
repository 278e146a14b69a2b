"""RocketMQ's own store opens the store of a run, on a copy: it must load it, and have every acknowledged message.

It runs in a JVM (tests/interop/judge.py, built by Maven on first use). Without Java or Maven the run says so.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[2] / "tests"
NAMES = {
    "mapped_file_size_commit_log_bytes": "mappedFileSizeCommitLog",
    "mapped_file_size_consume_queue_bytes": "mappedFileSizeConsumeQueue",
    "max_hash_slot_num": "maxHashSlotNum",
    "max_index_num": "maxIndexNum",
    "enable_consume_queue_ext": "enableConsumeQueueExt",
}
TIMEOUT_S = 600
HEAP_MIB_MAX = 6144
FAILURES_MAX = 5


class PeerUnavailableError(Exception):
    """RocketMQ cannot run here; the text says why."""


def open_with_rocketmq(store: Path, settings: Mapping[str, object], rows: Sequence[dict]) -> list[str]:
    """Return sentences about what does not hold; PeerUnavailableError if RocketMQ cannot run."""
    sys.path.insert(0, str(TESTS))
    try:
        import needs
        from interop.judge import Judge, JudgeFailure, JudgeUnavailableError
    finally:
        sys.path.remove(str(TESTS))
    absent = needs.NEEDS["java"].absent() or needs.NEEDS["maven"].absent()
    if absent:
        raise PeerUnavailableError(absent)
    told = {theirs: str(settings[ours]).lower() for ours, theirs in NAMES.items() if ours in settings}
    with tempfile.TemporaryDirectory(prefix="pyengine-peer-") as scratch:
        try:
            with Judge(needs.java_command(), Path(scratch), f"{_heap_mib()}m") as judge:
                found = judge.verify(store, told).result(TIMEOUT_S)
        except (JudgeUnavailableError, TimeoutError) as error:
            raise PeerUnavailableError(str(error) or f"RocketMQ has not read the store within {TIMEOUT_S} s") from error
        except JudgeFailure as error:
            if "OutOfMemoryError" in str(error):
                raise PeerUnavailableError(f"the {len(rows):,} messages are too many for the memory that is free here") from error
            return [f"RocketMQ failed on the store: {str(error)[:2000]}"]
    return judge_answer(found, rows)


def _heap_mib() -> int:
    """Return half of the free memory: the judge has a row for each message and each key."""
    return max(512, min(HEAP_MIB_MAX, psutil.virtual_memory().available // 2 >> 20))


def judge_answer(found: Mapping[str, object], rows: Sequence[dict]) -> list[str]:
    """Compare what RocketMQ has read with what was acknowledged."""
    if not found["loadOk"]:
        return ["RocketMQ refuses the store"]
    served = {(one["topic"], one["queueId"], one["queueOffset"]): one["bodySha"] for one in found["messages"] if "phy" in one}
    missing = [row for row in rows if row["queue_offset"] is not None
               and served.get((row["topic"], row["queue_id"], row["queue_offset"])) != row["body_sha256"]]
    return [f"RocketMQ does not have what was acknowledged ({len(missing)} messages): {row}"
            for row in missing[:FAILURES_MAX]]
