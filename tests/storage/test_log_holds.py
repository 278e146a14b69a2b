"""Holds on the log that outlast a process: files that are whole or not there, and that end by themselves."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from pyengine.storage import log_holds
from pyengine.storage.durable_writes import sweep_unfinished
from pyengine.storage.log_holds import (
    CLOCK_GRACE_MS,
    HOLD_MS_MAX,
    LogHold,
    RenewedHold,
    held_log,
    lowest_log_hold,
    read_log_holds,
    write_log_hold,
)

NOW_MS = 1_800_000_000_000


@pytest.fixture
def clock(monkeypatch):
    """clock[0]: what the module takes for the time, in ms."""
    times = [NOW_MS]
    monkeypatch.setattr(log_holds, "time", SimpleNamespace(time_ns=lambda: times[0] * 1_000_000))
    return times


def test_the_lowest_hold_of_those_that_count_is_the_one_to_respect(tmp_path):
    assert read_log_holds(tmp_path) == [] and lowest_log_hold(tmp_path, NOW_MS) is None
    high, low = LogHold("b", "tables", 900, NOW_MS + 1000), LogHold("a", "backup", 500, NOW_MS + 2000)
    over, endless = LogHold("over", "x", 0, NOW_MS), LogHold("endless", "x", 0, NOW_MS + HOLD_MS_MAX + CLOCK_GRACE_MS + 1)
    for hold in (high, low, over, endless):
        write_log_hold(tmp_path, hold)
    assert read_log_holds(tmp_path) == [endless, over, low, high]
    assert lowest_log_hold(tmp_path, NOW_MS) == low
    assert lowest_log_hold(tmp_path, NOW_MS + 1000) == endless  # its time is near enough now


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"name": "a"}'])
def test_a_file_that_cannot_be_believed_holds_nothing_and_is_named(tmp_path, content):
    write_log_hold(tmp_path, LogHold("a", "backup", 500, NOW_MS + 2000))
    path = tmp_path / "config/log-holds/a"
    path.write_bytes(content)
    (found,) = read_log_holds(tmp_path)
    assert "config/log-holds/a" in found.damage and "holds nothing" in found.damage
    assert lowest_log_hold(tmp_path, NOW_MS) is None


@pytest.mark.parametrize("number", [errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_hold_that_cannot_be_read_may_hold_everything_for_as_long_as_a_killed_backups(tmp_path, monkeypatch, clock, number):
    hold, lasts = LogHold("backup-0", "backup", 500, NOW_MS + 700_000), number in (errno.ENFILE, errno.ENOMEM)
    write_log_hold(tmp_path, hold)
    os.utime(tmp_path / "config/log-holds/backup-0", (NOW_MS / 1000, NOW_MS / 1000))

    def refuse(path):
        raise OSError(number, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.formats.small_file.read_small_file", refuse)
        for age_ms, holds in ((0, True), (599_999, True), (600_000, lasts), (HOLD_MS_MAX, lasts)):  # another lack passes
            clock[0] = NOW_MS + age_ms
            found = lowest_log_hold(tmp_path, clock[0])
            assert (found is not None and found.offset == 0) is holds, age_ms
        assert "cannot read" in (damage := read_log_holds(tmp_path)[0].damage) and "refused" in damage, "status shows it"
    assert lowest_log_hold(tmp_path, NOW_MS) == hold


def test_a_hold_of_tables_that_cannot_be_read_may_hold_everything_for_as_long_as_any(tmp_path, monkeypatch):
    write_log_hold(tmp_path, LogHold("tables-0", "tables", 500, NOW_MS + 2000))
    os.utime(tmp_path / "config/log-holds/tables-0", (NOW_MS / 1000, NOW_MS / 1000))

    def refuse(path):
        raise OSError(errno.EIO, "refused", str(path))

    monkeypatch.setattr("pyengine.formats.small_file.read_small_file", refuse)
    for age_ms, holds in ((0, True), (HOLD_MS_MAX - 1, True), (HOLD_MS_MAX, False)):
        assert (lowest_log_hold(tmp_path, NOW_MS + age_ms) is not None) is holds, age_ms


def test_every_flipped_bit_is_found(tmp_path):
    write_log_hold(tmp_path, LogHold("a", "backup", 500, NOW_MS + 2000))
    path = tmp_path / "config/log-holds/a"
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])
        assert lowest_log_hold(tmp_path, NOW_MS) is None, at


def test_a_copied_file_under_another_name_and_unfinished_ones_do_not_count(tmp_path):
    write_log_hold(tmp_path, LogHold("a", "backup", 500, NOW_MS + 2000))
    folder = tmp_path / "config/log-holds"
    (folder / "b").write_bytes((folder / "a").read_bytes())
    (folder / "c.tmp").write_bytes(b"half")
    assert [(hold.name, bool(hold.damage)) for hold in read_log_holds(tmp_path)] == [("b", True), ("a", False)]


def test_a_hold_is_renewed_when_half_of_its_time_is_over(tmp_path, clock):
    hold = RenewedHold(tmp_path, "a", "backup", 1000)
    hold.move(700)
    (first,) = read_log_holds(tmp_path)
    assert (first.offset, first.expires_ms) == (700, NOW_MS + 1000) and "backup (pid " in first.owner
    clock[0] += 500
    hold.renew()
    assert read_log_holds(tmp_path) == [first]
    clock[0] += 1
    hold.renew()
    assert read_log_holds(tmp_path)[0].expires_ms == NOW_MS + 1501


def test_a_hold_as_long_as_allowed_counts_though_its_owners_clock_is_ahead(tmp_path):
    write_log_hold(tmp_path, LogHold("a", "tables", 500, NOW_MS + HOLD_MS_MAX + 60_000))
    assert lowest_log_hold(tmp_path, NOW_MS) is not None


def test_a_hold_of_a_clock_that_is_set_back_counts_again(tmp_path, clock):
    right_ms, clock[0] = clock[0], clock[0] + 30 * 24 * 3_600_000
    hold = RenewedHold(tmp_path, "backup", "x", 600_000)
    hold.move(4096)
    clock[0] = right_ms
    assert lowest_log_hold(tmp_path, right_ms) is None, "an expiry in 30 days is a mistake"
    hold.renew()
    assert lowest_log_hold(tmp_path, right_ms) == LogHold("backup", f"x (pid {os.getpid()})", 4096, right_ms + 600_000)


def test_a_hold_whose_owner_is_late_can_still_be_renewed(tmp_path, clock):
    late = RenewedHold(tmp_path, "late", "backup", 1000)
    clock[0] += 2000
    with held_log(tmp_path, "mine", "backup", 1000):
        assert {hold.name for hold in read_log_holds(tmp_path)} == {"mine", "late"}
    late.renew()
    assert lowest_log_hold(tmp_path, clock[0]) is not None


def test_the_next_hold_removes_those_whose_time_is_long_over(tmp_path, clock):
    write_log_hold(tmp_path, LogHold("old", "killed", 0, NOW_MS - CLOCK_GRACE_MS))
    write_log_hold(tmp_path, LogHold("other", "works", 0, NOW_MS + 1))
    with held_log(tmp_path, "mine", "backup", 1000):
        assert {hold.name for hold in read_log_holds(tmp_path)} == {"mine", "other"}
    assert [hold.name for hold in read_log_holds(tmp_path)] == ["other"]


def test_a_block_that_fails_ends_its_hold(tmp_path):
    with pytest.raises(KeyboardInterrupt), held_log(tmp_path, "mine", "backup", 1000):
        raise KeyboardInterrupt
    assert read_log_holds(tmp_path) == []


def test_a_hold_is_written_while_an_engine_that_starts_sweeps(tmp_path, monkeypatch):
    rename, sweeps = os.rename, []

    def swept_once(source, target):
        if not sweeps:
            sweeps.append(sweep_unfinished(tmp_path))
        rename(source, target)

    monkeypatch.setattr(os, "rename", swept_once)
    write_log_hold(tmp_path, LogHold("tables", "me", 5, NOW_MS))
    assert [path.name for path in sweeps[0]] == ["tables.tmp"]
    assert [(hold.name, hold.offset) for hold in read_log_holds(tmp_path)] == [("tables", 5)]


def test_a_hold_that_another_process_removes_at_the_same_time_is_removed(tmp_path, monkeypatch):
    write_log_hold(tmp_path, LogHold("old", "a dead one", 0, 1))
    unlink = os.unlink

    def unlink_after_another(path, **how):
        if path.name == "old":
            unlink(path)
        unlink(path, **how)

    monkeypatch.setattr(os, "unlink", unlink_after_another)
    with held_log(tmp_path, "new", "me", 60_000):
        assert [hold.name for hold in read_log_holds(tmp_path)] == ["new"]
