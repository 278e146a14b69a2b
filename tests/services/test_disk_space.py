"""Puts are refused while the disk is full or read-only, for as long and no longer."""

from __future__ import annotations

import os
import threading

import pytest

from pyengine.ipc.cleaning import Cleaning, create_cleaning
from pyengine.native import cleaning as native_cleaning
from pyengine.native import control as native
from pyengine.services.clean_resource import DiskSpaceProbe
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import UNKNOWN_PERCENT, DiskUse, measure
from reported import Reported
from waiting import eventually


@pytest.fixture
def probe(make_owner):
    owner = make_owner()
    create_cleaning(owner.folder)
    cleaning = Cleaning(owner.folder)
    reported = Reported()
    made = DiskSpaceProbe(owner.context(EngineConfig(), report=reported), cleaning.block, lambda: made.uses, interval_s=0.001)
    made.uses = [DiskUse("/log", 50, 1 << 30), DiskUse("/queues", 60, 1 << 20)]
    made.reported = reported
    made.owner, made.block = owner, cleaning.block
    yield made
    vars(made).clear()  # it has no more of the memory, which can then be unmapped
    cleaning.close()


def refused(probe) -> int:
    return native.load(probe.owner.control.state, "refuse_puts")


def test_a_full_disk_refuses_and_room_brings_puts_back(probe):
    native.refuse_puts(probe.owner.control, native.REFUSE_SLAVE)  # another process's bit
    assert probe.check() and refused(probe) == native.REFUSE_SLAVE
    probe.uses = [DiskUse("/log", 91, 1 << 30), probe.uses[1]]
    assert not probe.check() and not probe.check()
    assert refused(probe) == native.REFUSE_SLAVE | native.REFUSE_DISK_FULL
    assert "91 % used" in native_cleaning.reason(probe.block) == probe.reported[0].removeprefix("puts are refused: ")
    probe.uses = [DiskUse("/log", 90, 1 << 30), probe.uses[1]]
    assert probe.check() and refused(probe) == native.REFUSE_SLAVE
    assert native_cleaning.reason(probe.block) == "" and len(probe.reported) == 2
    assert native.load(probe.block, "used_percent") == 90 and native.load(probe.block, "queue_used_percent") == 60
    assert native.load(probe.block, "usable_bytes") == 1 << 30


def test_from_full_to_read_only_the_cause_that_is_named_changes(probe):
    probe.uses = [DiskUse("/log", 91, 1 << 30)] * 2
    probe.check()
    probe.uses = [DiskUse("/log", 91, 1 << 30, "the file system of /log is mounted read-only")] * 2
    probe.check()
    assert refused(probe) == native.REFUSE_UNWRITABLE and "mounted read-only" in native_cleaning.reason(probe.block)
    probe.uses = [DiskUse("/log", UNKNOWN_PERCENT, 0)] * 2
    assert probe.check() and refused(probe) == 0


def test_a_path_of_any_bytes_can_be_the_cause(probe):
    probe.uses = [DiskUse(os.fsdecode(b"/log\xff"), 91, 1 << 30)] * 2
    assert not probe.check() and refused(probe) == native.REFUSE_DISK_FULL
    assert native_cleaning.reason(probe.block).startswith("the disk of /log? is 91 % used")


def test_a_new_probe_clears_the_disk_full_flag_of_a_dead_one(probe):
    native.refuse_puts(probe.owner.control, native.REFUSE_DISK_FULL | native.REFUSE_STOPPING)
    assert probe.check() and refused(probe) == native.REFUSE_STOPPING


def test_the_probe_looks_by_itself_and_ends_when_asked(probe):
    probe.start()
    for percent in (51, 52, 53):
        probe.uses = [DiskUse("/log", percent, 1 << 30)] * 2
        eventually(lambda: native.load(probe.block, "used_percent") == percent, "it looks again and again")
    probe.close()
    assert "disk space" not in {thread.name for thread in threading.enumerate()}


def test_bits_of_several_processes_do_not_eat_each_other(probe):
    control = probe.owner.control

    def toggle(bit: int) -> None:
        for number in range(3000):
            native.refuse_puts(control, bit, on=number % 2 == 0)
        native.refuse_puts(control, bit)

    threads = [threading.Thread(target=toggle, args=(bit,)) for bit in (1, 2, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused(probe) == 15


def test_a_real_folder_is_measured_as_df_shows_it(tmp_path):
    use = measure(tmp_path / "not" / "there" / "yet")
    status = os.statvfs(tmp_path)
    assert use.folder == str(tmp_path) and 0 <= use.used_percent <= 100 and use.unwritable_reason == ""
    assert use.usable_bytes <= status.f_blocks * status.f_frsize and use.inodes_left


def test_a_folder_without_the_right_to_write_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode, **_: False)  # root may always
    assert "no right to make files" in measure(tmp_path).unwritable_reason


def test_a_file_system_that_does_not_answer_is_unknown_and_no_reason_to_refuse(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fail)
    use = measure(tmp_path)
    assert not use.is_known and use.unwritable_reason == ""


def test_changed_limits_count_from_the_next_look_on(probe):
    probe.uses = [DiskUse("/log", 91, 1 << 30)] * 2
    assert not probe.check()
    probe.take_settings(EngineConfig(disk_space_warning_level_ratio=95))
    assert probe.check() and refused(probe) == 0
