"""config/watermark, checkpoint and abort: recovery uses these small files only if they are undamaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from unittest.mock import patch

import pytest

from pyengine.errors import DiskError, FlushError
from pyengine.formats.small_file import Checkpoint, pack_checkpoint
from pyengine.storage import checkpoint as store_checkpoint
from pyengine.storage.checkpoint import (
    RECOVERED,
    SYNC_FAILURE,
    WATERMARK,
    DurableWatermark,
    abort_file_exists,
    create_abort_file,
    note_sync_failure,
    read_checkpoint,
    read_stop_notes,
    read_sync_failure,
    read_watermark,
    remove_abort_file,
    write_checkpoint,
)
from pyengine.storage.durable_file import DurableRecord
from pyengine.storage.engine_id import ensure_engine_id, read_engine_id, renew_copied_id

MARK = DurableWatermark("9c2c0d6c-6a8e-4f2b-8f0d-5f4bfb4f6f4e", 7, 1_234_567)


def test_a_watermark_is_read_as_it_was_written(tmp_path):
    WATERMARK.write(tmp_path, MARK)
    WATERMARK.write(tmp_path, DurableWatermark(MARK.uuid, 8, 2_000_000))
    assert read_watermark(tmp_path).watermark == DurableWatermark(MARK.uuid, 8, 2_000_000)
    assert read_watermark(tmp_path).damage == ""
    assert os.listdir(tmp_path / "config") == ["watermark"]


def test_a_watermark_of_a_version_that_did_not_judge_the_order_of_store_times_says_that_it_is_unknown(tmp_path):
    """It was taken for an order of all, and readers by time left out segments of a slave whose master's clock was set back."""
    fields = {"uuid": MARK.uuid, "epoch": 7, "flushed": 1_234_567}
    before: DurableRecord[DurableWatermark] = DurableRecord("watermark", lambda _: fields, lambda _: MARK)
    before.write(tmp_path, MARK)
    assert read_watermark(tmp_path).watermark == DurableWatermark(**fields, ordered_from=1_234_567)
    WATERMARK.write(tmp_path, DurableWatermark(**fields, ordered_from=1_234_567))
    assert before.read(tmp_path).record == MARK, "as that version writes it"
    WATERMARK.write(tmp_path, MARK)
    assert read_watermark(tmp_path).watermark == MARK


def test_a_copy_of_a_copy_that_was_never_recovered_knows_that_the_watermark_is_not_its_own(tmp_path):
    """A recovery that ends on a full disk has renewed the identity, and the watermark is still that of the original."""
    original = ensure_engine_id(tmp_path)
    WATERMARK.write(tmp_path, DurableWatermark(str(original.uuid), 3, 4096))
    for name in ("first", "second", "third"):
        shutil.copytree(tmp_path / "config", tmp_path / name / "config")
        renew_copied_id(tmp_path / name)
        assert read_watermark(tmp_path / name).is_copied, name
        shutil.rmtree(tmp_path / "config")
        shutil.copytree(tmp_path / name / "config", tmp_path / "config")
    WATERMARK.write(tmp_path / "third", DurableWatermark(str(read_engine_id(tmp_path / "third").uuid), 3, 4096))
    assert not read_watermark(tmp_path / "third").is_copied, "its own, written by its recovery"


def test_a_store_without_one_is_not_called_damaged(tmp_path):
    reading = read_watermark(tmp_path)
    assert (reading.watermark, reading.damage) == (None, "")


def test_any_changed_byte_and_any_cut_make_it_absent_and_are_reported(tmp_path):
    WATERMARK.write(tmp_path, MARK)
    path = WATERMARK.path(tmp_path)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    damaged += [whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1:] for at in range(len(whole)) for bit in (1, 0x20, 0x80)]
    for content in [*damaged, b"[]", b"null", b"7", whole + b"x"]:
        path.write_bytes(content)
        reading = read_watermark(tmp_path)
        assert reading.watermark is None, content
        assert str(path) in reading.damage, content


def test_a_negative_watermark_is_no_watermark(tmp_path):
    WATERMARK.write(tmp_path, DurableWatermark(MARK.uuid, 7, -1))
    assert read_watermark(tmp_path).watermark is None


def test_the_watermark_is_readable_by_people(tmp_path):
    WATERMARK.write(tmp_path, MARK)
    fields = json.loads(WATERMARK.path(tmp_path).read_text())
    assert (fields["uuid"], fields["epoch"], fields["flushed"]) == (MARK.uuid, 7, 1_234_567)


@pytest.mark.parametrize("before", [None, b"", b"\0" * 10, pack_checkpoint(Checkpoint(1, 2, 3))])
def test_a_checkpoint_is_read_as_it_was_written(tmp_path, before):
    if before is not None:
        (tmp_path / "checkpoint").write_bytes(before)
    write_checkpoint(tmp_path, Checkpoint(1_700_000_000_000, 1_700_000_000_001, 0))
    assert read_checkpoint(tmp_path) == Checkpoint(1_700_000_000_000, 1_700_000_000_001, 0)
    assert (tmp_path / "checkpoint").stat().st_size == 4096
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize(("content", "read"), [
    (None, Checkpoint()), (b"", Checkpoint()),
    (pack_checkpoint(Checkpoint(5, 6, 7))[:16], Checkpoint(5, 6, 0)), (b"\0" * 5000, Checkpoint())])
def test_a_missing_or_short_checkpoint_reads_as_zeros(tmp_path, content, read):
    if content is not None:
        (tmp_path / "checkpoint").write_bytes(content)
    assert read_checkpoint(tmp_path) == read


def test_a_checkpoint_that_cannot_be_synced_says_so(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, Checkpoint(1, 1, 1))

    def fail(_descriptor):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(store_checkpoint.os, "fdatasync", fail)
    with pytest.raises(FlushError):
        write_checkpoint(tmp_path, Checkpoint(2, 2, 2))


def test_a_folder_in_the_place_of_the_checkpoint_is_one_clear_error(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(DiskError, match="checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(DiskError, match="checkpoint"):
        write_checkpoint(tmp_path, Checkpoint())


def test_the_abort_file_comes_and_goes_and_both_are_idempotent(tmp_path):
    assert not abort_file_exists(tmp_path)
    for _ in range(2):
        create_abort_file(tmp_path)
        assert abort_file_exists(tmp_path)
        assert (tmp_path / "abort").stat().st_size == 0
    for _ in range(2):
        remove_abort_file(tmp_path)
        assert not abort_file_exists(tmp_path)


def test_a_reader_that_sees_no_abort_file_sees_what_the_recovery_that_removed_it_has_noted(tmp_path):
    def recovered(root) -> bool:
        RECOVERED.write(root, 5)
        return False

    with patch.object(store_checkpoint, "abort_file_exists", recovered):
        assert read_stop_notes(tmp_path).recovered_from == 5


def test_a_failed_sync_is_noted_once_a_boot_and_forgotten_when_it_is_made_good(tmp_path):
    assert read_sync_failure(tmp_path) is None
    assert note_sync_failure(tmp_path, 500, "a segment", "Input/output error")
    assert note_sync_failure(tmp_path, 900, "another", "Input/output error")
    failure = read_sync_failure(tmp_path)
    assert (failure.flushed, failure.file, failure.is_of_this_boot) == (500, "a segment", True)
    SYNC_FAILURE.remove(tmp_path)
    SYNC_FAILURE.remove(tmp_path)
    assert read_sync_failure(tmp_path) is None


def test_a_failed_sync_of_another_boot_leaves_no_doubt_and_is_replaced(tmp_path):
    with patch("pyengine.storage.checkpoint.read_boot_id", return_value=bytes(16)):
        note_sync_failure(tmp_path, 500, "a segment", "Input/output error")
    assert not read_sync_failure(tmp_path).is_of_this_boot
    note_sync_failure(tmp_path, 900, "another", "Input/output error")
    assert read_sync_failure(tmp_path).flushed == 900


@pytest.mark.parametrize("damage", [b"", b"{}", b"garbage", b'{"boot_id": "x", "flushed": 5, "file": "", "cause": "", "crc": "0"}'])
def test_a_damaged_note_of_a_failed_sync_counts_as_one_of_this_boot(tmp_path, damage):
    note_sync_failure(tmp_path, 500, "a segment", "Input/output error")
    SYNC_FAILURE.path(tmp_path).write_bytes(damage)
    failure = read_sync_failure(tmp_path)
    assert failure.is_of_this_boot and failure.flushed == 0


def test_a_failed_sync_is_noted_on_a_disk_that_syncs_nothing_more(tmp_path):
    (tmp_path / "config").mkdir()
    with patch("pyengine.storage.durable_file.write_config", side_effect=FlushError("fsync failed", errno=5)):
        assert note_sync_failure(tmp_path, 500, "a segment", "Input/output error")
    assert read_sync_failure(tmp_path).flushed == 500


def test_noting_a_failed_sync_returns_false_if_it_cannot_be_noted(tmp_path):
    with patch("pyengine.storage.durable_file.write_config", side_effect=FlushError("fsync failed", errno=5)):
        assert not note_sync_failure(tmp_path, 500, "a segment", "Input/output error")


def test_the_part_that_is_vouched_for_goes_into_the_file_only_where_it_is_not_all(tmp_path):
    WATERMARK.write(tmp_path, MARK)
    assert b"verified_from" not in WATERMARK.path(tmp_path).read_bytes()
    part = DurableWatermark(MARK.uuid, 7, 1_000_000, 65_536)
    WATERMARK.write(tmp_path, part)
    assert read_watermark(tmp_path).watermark == part
    assert part.moved_to(2_000_000) == DurableWatermark(MARK.uuid, 7, 2_000_000, 65_536, ordered_from=2_000_000)
    assert part.moved_to(500) == DurableWatermark(MARK.uuid, 7, 500, 500)
    for wrong in (-1, 1_000_001):
        WATERMARK.write(tmp_path, DurableWatermark(MARK.uuid, 7, 1_000_000, wrong))
        assert read_watermark(tmp_path).watermark is None
