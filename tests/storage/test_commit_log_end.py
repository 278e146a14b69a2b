"""Where the log ends when only the files can tell: damage, rolls, watermarks, and a log that grows."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker_lock import held_by_a_broker
from faults.mounts import with_own_mounts
from fix_golden import HALTED
from pyengine.errors import DiskError, UsageError
from pyengine.formats.paths import segment_name
from pyengine.formats.record import encode_blank
from pyengine.formats.small_file import Checkpoint, pack_checkpoint
from pyengine.results import ReadLevel
from pyengine.storage import commit_log, file_system
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark, create_abort_file, note_sync_failure
from pyengine.storage.commit_log import CommitLog, LogEnd
from pyengine.storage.read_level import DeadEngine, FilesWatermark, StoreUse, store_use


def log_of(builder) -> CommitLog:
    return CommitLog(builder.root, 4096)


def end_of(builder) -> int:
    return LogEnd(builder.root, log_of(builder)).find()


def test_an_empty_log_ends_at_zero(builder):
    assert end_of(builder) == 0
    builder.write_log(bytes(8))
    assert end_of(builder) == 0


def test_the_end_is_after_the_last_record_over_all_rolls(builder):
    for _ in range(120):
        builder.put("T", b"x" * 50)
        assert end_of(builder) == builder.end


def test_a_blank_without_a_next_segment_is_the_end(builder):
    builder.put("T")
    builder.write_log(encode_blank(4096 - builder.end))
    assert end_of(builder) == builder.end
    builder.write_log(bytes(8), at=4096)
    assert end_of(builder) == 4096


@pytest.mark.parametrize(
    ("at", "data"),
    [(0, bytes(8)), (4, b"\0"), (0, b"\x7f"), (28, b"\1"), (88, b"?"), (0, bytes(40))],
    ids=["zeroes", "foreign", "overrun", "place", "crc", "head"],
)
@pytest.mark.parametrize("is_ours", [False, True])
def test_damage_ends_the_log_before_it(builder, at, data, is_ours):
    """But for a record that names another offset than its own: RocketMQ never asks for that."""
    first = builder.put("T", b"one")
    second = builder.put("T", b"two")
    builder.put("T", b"three")
    builder.write_log(data, at=second.physical_offset + at)
    if is_ours:
        WATERMARK.write(builder.root, DurableWatermark("u", 1, first.size_bytes))
    assert end_of(builder) == (builder.end if at == 28 and not is_ours else second.physical_offset)


def test_damage_below_our_own_watermark_does_not_end_the_log(builder):
    messages = [builder.put("T", b"x" * 50) for _ in range(60)]
    WATERMARK.write(builder.root, DurableWatermark("u", 1, messages[-1].physical_offset))
    builder.write_log(b"?", at=messages[-3].physical_offset + 88)
    assert end_of(builder) == builder.end
    builder.write_log(b"?", at=messages[-1].physical_offset + 88)
    assert end_of(builder) == messages[-1].physical_offset


def test_a_missing_segment_does_not_end_rocketmqs_log(builder):
    for _ in range(160):
        builder.put("T", b"x" * 50)
    builder.segment(builder.end - 4096).unlink()
    assert end_of(builder) == builder.end


def test_after_an_orderly_stop_the_last_three_segments_are_read(builder):
    messages = [builder.put("T", b"x" * 50) for _ in range(160)]  # more than four segments
    assert len(list(builder.paths.commit_log.iterdir())) > 4
    builder.write_log(b"?", at=messages[1].physical_offset + 88)
    assert end_of(builder) == builder.end
    builder.paths.abort.touch()  # not stopped: from the segment that the checkpoint covers, here none
    assert end_of(builder) == messages[1].physical_offset
    covered = Checkpoint(messages[100].store_timestamp_ms + 3000, messages[100].store_timestamp_ms + 3000, 0)
    builder.paths.checkpoint.write_bytes(pack_checkpoint(covered))
    assert end_of(builder) == builder.end


def test_our_own_watermark_is_where_reading_starts(builder):
    messages = [builder.put("T", b"x" * 50) for _ in range(60)]
    builder.write_log(b"?", at=messages[1].physical_offset + 88)
    builder.paths.abort.touch()
    assert end_of(builder) == messages[1].physical_offset
    WATERMARK.write(builder.root, DurableWatermark("u", 1, messages[30].physical_offset))
    assert end_of(builder) == builder.end
    WATERMARK.write(builder.root, DurableWatermark("u", 1, builder.end))
    assert end_of(builder) == builder.end


@pytest.mark.parametrize("flushed", [5, 4096 * 40, 4096 + 11])
def test_a_watermark_that_is_no_boundary_of_this_log_does_not_mislead(builder, flushed):
    for _ in range(60):
        builder.put("T", b"x" * 50)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, flushed))
    assert end_of(builder) == builder.end


def test_a_torn_record_right_at_the_watermark(builder):
    builder.put("T", b"one")
    whole = builder.end
    builder.put("T", b"two")
    builder.write_log(b"?", at=whole + 88)
    WATERMARK.write(builder.root, DurableWatermark("u", 1, whole))
    assert end_of(builder) == whole


def test_the_end_follows_what_is_appended(builder, monkeypatch):
    end = LogEnd(builder.root, log_of(builder))
    builder.put("T", b"x")
    assert end.find() == builder.end
    asked = []
    real = commit_log.walk_pieces
    monkeypatch.setattr(commit_log, "walk_pieces", lambda *args, **more: asked.append(args[1]) or real(*args, **more))
    for _ in range(100):
        before = builder.end
        builder.put("T", b"x" * 50)
        assert end.find() == builder.end
    assert min(asked) > 0 and before in asked  # never from the start again


def test_bytes_that_were_passed_and_then_written_over(builder, monkeypatch):
    """A killed writer's unacknowledged records are cleared and other ones take their place."""
    monkeypatch.setattr(commit_log, "RECHECK_INTERVAL_S", 0.0)
    builder.put("T", b"kept")
    kept = builder.end
    end = LogEnd(builder.root, log_of(builder))
    builder.put("T", b"not acknowledged")
    assert end.find() == builder.end
    builder.write_log(bytes(builder.end - kept), at=kept)
    builder.end = kept
    for _ in range(3):
        builder.put("T", b"another length of body, longer than the first")
    assert end.find() == builder.end


def test_a_log_that_lost_segments_is_read_anew(builder):
    end = LogEnd(builder.root, log_of(builder))
    for _ in range(120):
        builder.put("T", b"x" * 50)
    assert end.find() == builder.end
    for path in builder.paths.commit_log.iterdir():
        path.unlink()
    assert end.find() == 0
    builder.end = 0
    builder.put("T", b"x")
    assert end.find() == builder.end


@pytest.mark.parametrize("name", [name for name in HALTED if name != "abnormal-shortfile"])
def test_the_end_of_a_halted_golden_store_is_where_rocketmq_cuts_it(golden, name):
    store = golden(name)
    log = CommitLog(store.root, store.sizes["mapped_file_size_commit_log_bytes"])
    assert LogEnd(store.root, log).find() == store.verify["facts"]["maxPhy"]


def test_levels_of_a_store_that_no_process_has_open(builder):
    builder.put("T", b"x")
    marks = FilesWatermark(builder.root, log_of(builder))
    for level in (ReadLevel.WRITTEN, ReadLevel.COMMITTED, ReadLevel.FLUSHED):
        assert marks.limit(level) == marks.queue_limit(level) == builder.end
    with pytest.raises(UsageError, match="nothing is replicated here"):
        marks.limit(ReadLevel.REPLICATED)


HOLD = """
import fcntl, os, struct, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", int(sys.argv[2]), 0, 0, 1, 0))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("kind", "use"), [(fcntl.F_RDLCK, StoreUse.ENGINE), (fcntl.F_WRLCK, StoreUse.OTHER)], ids=["engine", "other"]
)
def test_levels_of_a_store_that_another_process_has_open(builder, kind, use):
    first = builder.put("T", b"x")
    builder.put("T", b"y")
    assert store_use(builder.root) is StoreUse.CLOSED
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(builder.paths.lock), str(kind)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert store_use(builder.root) is use
        marks = FilesWatermark(builder.root, log_of(builder))
        assert marks.limit(ReadLevel.COMMITTED) == builder.end
        with pytest.raises(UsageError, match="committed"):
            marks.limit(ReadLevel.FLUSHED)
        WATERMARK.write(builder.root, DurableWatermark("u", 1, first.size_bytes))
        if use is StoreUse.ENGINE:
            assert marks.limit(ReadLevel.FLUSHED) == first.size_bytes
        else:  # the watermark is an earlier owner's
            with pytest.raises(UsageError):
                marks.limit(ReadLevel.FLUSHED)
    finally:
        holder.communicate()
    assert store_use(builder.root) is StoreUse.CLOSED


def test_in_a_chroot_that_does_not_list_its_own_mount_nothing_is_synced(builder, tmp_path, monkeypatch):
    first = builder.put("T", b"x")
    builder.put("T", b"y")
    WATERMARK.write(builder.root, DurableWatermark("u", 1, first.size_bytes))
    mounts = tmp_path / "mountinfo"
    mounts.write_text("71 48 254:0 /usr /usr rw - ext4 /dev/vda rw\n")
    monkeypatch.setattr(file_system, "MOUNTS", mounts)
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == first.size_bytes


def test_the_name_of_another_mount_need_not_be_utf8(builder, tmp_path, monkeypatch):
    builder.put("T", b"x")
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"7 1 0:7 / /media/caf\xe9 rw - vfat  rw\n" + Path(file_system.MOUNTS).read_bytes())
    monkeypatch.setattr(file_system, "MOUNTS", mounts)
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == builder.end
    assert file_system.file_system_of("/proc") == "proc" and file_system.file_system_of(tmp_path / "none") == ""


def test_a_posix_lock_like_javas_is_another_process(builder):
    with held_by_a_broker(builder.root):
        assert store_use(builder.root) is StoreUse.OTHER


def test_without_a_lock_file_no_process_has_it_open(tmp_path):
    assert store_use(tmp_path) is StoreUse.CLOSED


@pytest.fixture
def synced(monkeypatch):
    """Names of the segments that the reader has synced, in order."""
    names, real = [], os.fdatasync

    def sync(descriptor):
        names.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr("pyengine.storage.read_level.os.fdatasync", sync)
    return names


def half_synced(builder) -> int:
    """A watermark in the middle of a log of several segments."""
    offsets = [builder.put("T", b"x" * 100).physical_offset for _ in range(60)]
    middle = offsets[30]
    WATERMARK.write(builder.root, DurableWatermark("u", 1, middle))
    return middle


def test_beyond_the_watermark_a_reader_claims_what_it_has_synced_itself(builder, synced):
    middle = half_synced(builder)
    marks = FilesWatermark(builder.root, log_of(builder))
    assert marks.limit(ReadLevel.FLUSHED) == builder.end
    assert synced == [segment_name(start) for start in range(middle - middle % 4096, builder.end, 4096)]
    marks.limit(ReadLevel.FLUSHED)
    assert len(synced) == len(set(synced)), "nothing is synced twice"
    builder.put("T", b"another")
    assert marks.limit(ReadLevel.FLUSHED) == builder.end
    assert len(synced) > len(set(synced))


def test_a_sync_that_fails_in_the_reader_proves_nothing(builder, monkeypatch):
    middle = half_synced(builder)
    monkeypatch.setattr("pyengine.storage.read_level.os.fdatasync", lambda descriptor: os.fsync(1 << 20))
    marks = FilesWatermark(builder.root, log_of(builder))
    assert (marks.limit(ReadLevel.FLUSHED), marks.limit(ReadLevel.COMMITTED)) == (middle, builder.end)


def test_after_a_failed_sync_of_this_boot_only_the_watermark_counts(builder, synced, monkeypatch):
    middle = half_synced(builder)
    note_sync_failure(builder.root, middle, "a segment", "Input/output error")
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == middle
    assert synced == []
    monkeypatch.setattr("pyengine.storage.checkpoint.read_boot_id", lambda: bytes(16))
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == builder.end


@pytest.mark.parametrize("types", [frozenset(), frozenset({"nfs4"})])
def test_on_another_hosts_file_system_only_the_watermark_counts(builder, synced, monkeypatch, types):
    middle = half_synced(builder)
    monkeypatch.setattr("pyengine.storage.read_level.LOCAL_FILE_SYSTEMS", types)
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == middle
    assert synced == []


@pytest.mark.block
def test_on_a_file_system_that_is_mounted_read_only_only_the_watermark_counts(builder):
    assert with_own_mounts(flushed_read_only, builder) == half_synced(builder)


def flushed_read_only(builder) -> int:
    half_synced(builder)
    root = str(builder.root)
    subprocess.run(["mount", "--bind", root, root], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
    return FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED)


def test_without_a_watermark_and_a_sync_of_its_own_a_reader_says_that_it_cannot_tell(builder, monkeypatch):
    builder.put("T", b"x")
    monkeypatch.setattr("pyengine.storage.read_level.LOCAL_FILE_SYSTEMS", frozenset())
    assert FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED) == builder.end, "it was stopped in order"
    create_abort_file(builder.root)
    with pytest.raises(UsageError, match="choose committed"):
        FilesWatermark(builder.root, log_of(builder)).limit(ReadLevel.FLUSHED)


def test_records_that_a_dead_engine_never_published_are_not_flushed(builder):
    middle = half_synced(builder)
    for dead, limit in ((DeadEngine(builder.end, False), builder.end), (DeadEngine(middle + 1, False), middle + 1),
                        (DeadEngine(builder.end, True), middle), (DeadEngine(0, False), middle)):
        marks = FilesWatermark(builder.root, log_of(builder), lambda: dead)
        assert marks.limit(ReadLevel.FLUSHED) == limit, dead


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO], ids=errno.errorcode.get)
def test_a_lock_file_that_cannot_be_opened_is_an_error_and_no_closed_store(tmp_path, monkeypatch, number):
    """Taken for closed, the end of the log would be what is in the files, beyond what a writer has committed."""
    (tmp_path / "lock").write_bytes(b"")

    def refuse(path):
        raise OSError(number, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.read_level.open_regular", refuse)
        with pytest.raises(DiskError, match="cannot open .*lock: refused"):
            store_use(tmp_path)
    assert store_use(tmp_path) is StoreUse.CLOSED
