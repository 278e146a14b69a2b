"""Recovery of stores that the real RocketMQ left: its own outcome, or more where it loses what the log still holds.

Each golden store is recovered, read with `inspect`, and compared field by field with
what the real store read after its own recovery. docs/compatibility.md lists KEEPS_MORE.
"""

from __future__ import annotations

import pytest

from fix_golden import CLEAN, HALTED, compare_inspect
from pyengine.errors import ExitCode, StoreRefusedError
from pyengine.storage.checkpoint import RecoveryPath, abort_file_exists
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.recover import recover

# What RocketMQ loses although the log holds it, and what we therefore have more of.
KEEPS_MORE = {
    # all queues and the index were lost: RocketMQ makes them again from the segment where recovery began
    "abnormal-multi-cqgone": ("queues", "messages", "queries"),
    # the index file is dropped: RocketMQ enters the keys of that segment only
    "abnormal-indexloss": ("queries",),
    # the log is cut, the index is not: RocketMQ enters no key of a new message until the log is as long as it was
    "widetopic": ("queries",),
}
# With more messages in a queue the same times lead to other offsets.
OTHER_TIMES = {"abnormal-multi-cqgone"}
# Damage that may have been a message, which nothing can decide: it is kept, and the command says "repaired".
QUARANTINES = {"abnormal-badlen", "abnormal-garbled", "widetopic"}
REFUSED = "abnormal-shortfile"
RECOVERED = sorted({*CLEAN, *HALTED} - {REFUSED})


def recover_golden(store):
    return recover(MessageStore(store.root, discover(store.root, store.sizes)))


def snapshot(root):
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(root.rglob("*"))
    }


@pytest.mark.parametrize("name", RECOVERED)
def test_the_outcome_is_rocketmqs_or_more(golden, name):
    store = golden(name)
    report = recover_golden(store)
    assert report.path == store.verify["path"]
    assert report.exit_code == (ExitCode.REPAIRED if name in QUARANTINES else ExitCode.OK)
    assert report.end_offset == store.verify["facts"]["maxPhy"]
    document = inspect(store.root, store.manifest["config"])
    ignore = ["byTime"] if name in OTHER_TIMES else []
    assert compare_inspect(document, store.verify, more_allowed=KEEPS_MORE.get(name, ()), ignore=ignore) == []
    assert not abort_file_exists(store.root)


@pytest.mark.parametrize("name", sorted(KEEPS_MORE))
def test_the_list_of_what_is_kept_beyond_rocketmq_is_not_out_of_date(golden, name):
    store = golden(name)
    recover_golden(store)
    assert compare_inspect(inspect(store.root, store.manifest["config"]), store.verify) != []


@pytest.mark.parametrize("name", ["abnormal-multi-cqgone", "abnormal-indexloss"])
def test_recovery_gives_back_all_queue_entries_and_keys_that_rocketmq_loses(golden, name):
    store = golden(name)
    recover_golden(store)
    document = inspect(store.root, store.manifest["config"])
    put_queues = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in store.manifest["facts"]["queues"]}
    kept_queues = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in document["facts"]["queues"]}
    assert kept_queues == put_queues
    assert [query for query in document["queries"] if not query["phys"]] == []


@pytest.mark.parametrize("name", RECOVERED)
def test_a_second_recovery_writes_nothing(golden, name):
    store = golden(name)
    recover_golden(store)
    before = snapshot(store.root)
    report = recover_golden(store)
    assert (report.path, report.changed, report.exit_code) == (RecoveryPath.NORMAL, False, ExitCode.OK)
    assert snapshot(store.root) == before


@pytest.mark.parametrize("name", [name for name in CLEAN if name not in QUARANTINES])
def test_a_clean_store_is_left_byte_for_byte_with_its_file_times(golden, name):
    store = golden(name)
    before = snapshot(store.root)
    report = recover_golden(store)
    assert (report.changed, report.exit_code) == (False, ExitCode.OK)
    assert snapshot(store.root) == before


def test_a_segment_of_wrong_length_is_refused_as_rocketmq_refuses_it(golden):
    store = golden(REFUSED)
    assert store.verify["loadOk"] is False
    before = snapshot(store.root)
    with pytest.raises(StoreRefusedError, match="50837 bytes, not 262144"):
        recover_golden(store)
    assert snapshot(store.root) == before


@pytest.mark.parametrize("name", sorted(QUARANTINES))
def test_the_quarantine_has_exactly_the_bytes_that_left_the_log(golden, name):
    store = golden(name)
    (segment,) = [path for path in (store.root / "commitlog").iterdir() if path.read_bytes().strip(b"\0")]
    before = segment.read_bytes()
    report = recover_golden(store)
    (piece,) = report.quarantined
    assert piece.physical_offset == report.end_offset
    assert piece.path.read_bytes() == before[report.end_offset:].rstrip(b"\0")
    assert segment.read_bytes() == before[: report.end_offset].ljust(len(before), b"\0")


@pytest.mark.parametrize("name", ["abnormal", "abnormal-torn", "abnormal-zeroed", "abnormal-cqahead"])
def test_cutting_keeps_lengths_and_file_times(golden, name):
    """RocketMQ finds a queue file by its time; the log's tail is cleared, not shortened."""
    store = golden(name)
    files = {path: path.stat() for path in store.root.rglob("*") if path.is_file() and path.parts[-1] not in ("abort",)}
    recover_golden(store)
    compared = 0
    for path, status in files.items():
        if path.exists() and path.parent.name not in ("index",) and path.name not in ("checkpoint", "lock"):
            assert path.stat().st_size == status.st_size
            assert path.stat().st_mtime_ns == status.st_mtime_ns, path
            compared += 1
    assert compared > 5

