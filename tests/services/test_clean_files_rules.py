"""The decisions of retention as a table, without a disk or a clock."""

from __future__ import annotations

import pytest

from pyengine.errors import ConfigError
from pyengine.native.control import REFUSE_DISK_FULL, REFUSE_UNWRITABLE
from pyengine.services.clean_files import (
    HOUR_MS,
    NOTHING,
    CleanRequest,
    Decision,
    decide,
    deletable_end,
    next_to_delete,
    refusal,
)
from pyengine.storage.config import EngineConfig
from pyengine.storage.file_system import UNKNOWN_PERCENT, DiskUse, used_percent

GIB = 1 << 30
RESERVED_MS = 72 * HOUR_MS


def disk(percent: int, usable_bytes: int = GIB, **changes) -> DiskUse:
    return DiskUse("/store", percent, usable_bytes, **changes)


@pytest.mark.parametrize("total, free, usable, percent", [
    (100, 100, 100, 0), (100, 99, 99, 1), (100, 25, 25, 75), (1000, 249, 249, 76),  # rounded up
    (100, 30, 20, 78),       # blocks kept for root are neither used nor usable: 70 of 90
    (100, 0, 0, 100), (0, 0, 0, UNKNOWN_PERCENT),
])
def test_disk_use_is_counted_as_rocketmq_counts(total, free, usable, percent):
    assert used_percent(total, free, usable) == percent


@pytest.mark.parametrize("log, queues, hour, expected", [
    (50, 50, 12, NOTHING),
    (75, 75, 12, NOTHING),
    (76, 50, 12, Decision("space", RESERVED_MS, batch_max=10)),
    (50, 76, 12, Decision("space", RESERVED_MS, batch_max=10)),
    (85, 50, 12, Decision("space", RESERVED_MS, batch_max=10)),
    (86, 50, 12, Decision("space", RESERVED_MS, at_once=True, batch_max=10)),
    (50, 95, 4, Decision("space", RESERVED_MS, at_once=True, batch_max=10)),
    (50, 50, 4, Decision("time", RESERVED_MS, batch_max=10)),
    (UNKNOWN_PERCENT, UNKNOWN_PERCENT, 12, NOTHING),
])
def test_hour_and_disk_use_decide_with_the_defaults(log, queues, hour, expected):
    assert decide(EngineConfig(), [disk(log), disk(queues)], hour) == expected


def test_several_hours_can_be_given():
    chosen = EngineConfig(delete_when="04; 16")
    assert [hour for hour in range(24) if decide(chosen, [disk(1)], hour).why] == [4, 16]


@pytest.mark.parametrize("text", ["", ";", "24", "-1", "4h", "04,16", "٤"])
def test_a_value_that_is_no_hour_is_refused(text):
    with pytest.raises(ConfigError, match="as in '04'"):
        EngineConfig(delete_when=text)


def test_with_enough_room_nothing_is_deleted_before_its_age_and_no_put_is_refused():
    roomy = [disk(99, 16 * GIB), disk(99, 16 * GIB)]
    assert decide(EngineConfig(), roomy, 12) == Decision("space", RESERVED_MS, batch_max=10)  # what is old enough goes all the same
    assert refusal(EngineConfig(), roomy) == (0, "")
    as_rocketmq = EngineConfig(disk_space_enough_bytes=0)
    assert decide(as_rocketmq, roomy, 12).at_once
    assert refusal(as_rocketmq, roomy)[0] == REFUSE_DISK_FULL


def test_age_counts_whatever_the_disk_use_when_forced_deletion_is_off():
    assert decide(EngineConfig(clean_file_forcibly_enable=False), [disk(99)], 12) == Decision("space", RESERVED_MS, batch_max=10)


@pytest.mark.parametrize("request_, percent, expected", [
    (CleanRequest(), 10, Decision("hand", RESERVED_MS)),
    (CleanRequest(reserved_ms=0), 10, Decision("hand", 0)),
    (CleanRequest(used_percent=60), 61, Decision("hand", RESERVED_MS, at_once=True)),
    (CleanRequest(used_percent=60), 60, NOTHING),
    (CleanRequest(used_percent=60), UNKNOWN_PERCENT, NOTHING),
])
def test_by_hand_there_is_no_batch_limit(request_, percent, expected):
    assert decide(EngineConfig(), [disk(percent)], 4, request_) == expected


@pytest.mark.parametrize("uses, bits, says", [
    ([disk(90), disk(90)], 0, ""),
    ([disk(91), disk(10)], REFUSE_DISK_FULL, "91 % used, over disk_space_warning_level_ratio = 90"),
    ([disk(10), disk(91)], REFUSE_DISK_FULL, "`pyengine clean`"),
    ([disk(10, inodes_left=False)], REFUSE_DISK_FULL, "no inode left"),
    ([disk(10, unwritable_reason="the file system of /store is mounted read-only")], REFUSE_UNWRITABLE, "mounted read-only: make it"),
    ([disk(99, unwritable_reason="no right")], REFUSE_UNWRITABLE, "no right"),
    ([disk(UNKNOWN_PERCENT)], 0, ""),
])
def test_a_refusal_names_the_cause_and_the_cure(uses, bits, says):
    found, sentence = refusal(EngineConfig(), uses)
    assert found == bits and says in sentence
    assert not bits or "by themselves" in sentence


@pytest.mark.parametrize("wrote, others, end", [
    (0, [0], 0), (50, [50], 0), (100, [100], 0),      # one full segment is the last one with data
    (101, [101], 100), (200, [200], 100), (350, [350, 350], 300),
    (350, [350, 120], 120), (350, [99, 350], 99),
])
def test_the_last_segment_with_data_and_needed_segments_are_kept(wrote, others, end):
    assert deletable_end(100, wrote, *others) == end


OLD = Decision("time", RESERVED_MS)


@pytest.mark.parametrize("segments, end, decision, now_ms, removing_end, expected", [
    ([], 1000, OLD, RESERVED_MS, 0, None),
    ([(0, 0), (100, 0)], 200, OLD, RESERVED_MS, 0, 0),
    ([(0, 1), (100, 0)], 200, OLD, RESERVED_MS, 0, None),    # the oldest stays, so all stay
    ([(0, 0)], 99, OLD, RESERVED_MS, 0, None),               # something in it is still needed
    ([(0, 10**15)], 200, Decision("space", RESERVED_MS, at_once=True), 0, 0, 0),
    ([(0, 0)], 200, NOTHING, 10**15, 0, None),
    ([(0, 10**15)], 200, NOTHING, 0, 100, 0),                # its turn had come before, but it was held
    ([(0, 10**15)], 200, NOTHING, 0, 300, None),             # no such deletion was begun: garbage
])
def test_only_the_oldest_segment_is_deleted(segments, end, decision, now_ms, removing_end, expected):
    assert next_to_delete(segments, 100, end, decision, now_ms, removing_end) == expected


def test_a_log_over_log_retention_bytes_loses_its_oldest_segments_at_any_age():
    chosen = EngineConfig(log_retention_bytes=1000)
    assert decide(chosen, [disk(50)], 12, log_bytes=1000) == NOTHING
    assert decide(chosen, [disk(50)], 12, log_bytes=1001) == Decision("size", RESERVED_MS, at_once=True, batch_max=10)
    assert decide(chosen, [disk(50)], 4, log_bytes=1000).why == "time", "beside time"
    assert decide(chosen, [disk(50)], 4, log_bytes=1001).age_counts and decide(chosen, [disk(80)], 12, log_bytes=1001).age_counts
    assert decide(chosen, [disk(86)], 12, log_bytes=5000).why == "space"
    assert decide(chosen, [disk(50)], 12, CleanRequest(), log_bytes=5000).why == "hand"
    assert decide(EngineConfig(), [disk(50)], 12, log_bytes=1 << 60) == NOTHING, "no limit by default"
