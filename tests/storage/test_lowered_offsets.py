"""Recovery takes offsets back that lie behind the end of the log, and mends a damaged file."""

from __future__ import annotations

import os
import threading
from contextlib import closing

from fix_cli import changes, picture
from pyengine.formats.constants import SCHEDULE_TOPIC
from pyengine.formats.delayed_message import DelayMark
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayCancels, DelayOffsets
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover


def test_an_offset_beyond_the_end_goes_back_to_it(builder):
    for _ in range(5):
        builder.put("orders", b"x" * 10)
    offsets = ConsumerOffsets(builder.root)
    offsets.commit("orders", "billing", {0: 9, 3: 4})
    offsets.commit("orders", "audit", {0: 5})
    report = recover(MessageStore(builder.root, builder.geometry))
    assert offsets.groups() == {("orders", "billing"): {0: 5, 3: 0}, ("orders", "audit"): {0: 5}}
    assert len([note for note in report.notes if "orders@billing" in note]) == 2


def test_a_group_that_has_seen_what_a_power_cut_took_sees_what_comes_in_its_place(builder):
    """The case all this is for: the last two of five messages are lost, two others get their offsets."""
    first = [builder.put("orders", b"%d" % number, dispatch=False) for number in range(5)]
    for message in first[:3]:
        builder.dispatch(message)
    builder.write_log(bytes(builder.end - first[3].physical_offset), at=first[3].physical_offset)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 5})
    (builder.root / "abort").touch()
    assert recover(MessageStore(builder.root, builder.geometry)).end_offset == first[3].physical_offset
    assert ConsumerOffsets(builder.root).read("orders", "billing") == {0: 3}


def test_an_offset_that_was_just_being_stored_goes_back_to_the_end_too(tmp_path):
    offsets = ConsumerOffsets(tmp_path)
    offsets.commit("orders", "billing", {0: 3})
    recovery = threading.Thread(target=offsets.lower, args=({("orders", 0): 5},))

    def commit(table):
        recovery.start()
        recovery.join(1)  # it must not end before this update has
        table["orders@billing"] = {0: 9}

    offsets.update(commit)
    recovery.join()
    assert offsets.read("orders", "billing") == {0: 5}


def test_a_store_whose_offsets_are_right_is_left_alone(builder):
    builder.put("orders", b"x")
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 1})
    recover(MessageStore(builder.root, builder.geometry))
    before = picture(builder.root / "config")
    assert not recover(MessageStore(builder.root, builder.geometry)).notes
    assert changes(before, picture(builder.root / "config")) == ["consumerOffset.json.lock"], "which has changed hands"


def test_a_damaged_file_never_keeps_a_store_from_coming_up_and_stays_until_the_next_commit(builder):
    builder.put("orders", b"x")
    offsets = ConsumerOffsets(builder.root)
    offsets.commit("orders", "billing", {0: 0})
    offsets.commit("orders", "billing", {0: 1})
    path = builder.root / "config" / "consumerOffset.json"
    path.write_bytes(b"\0" * 64)
    report = recover(MessageStore(builder.root, builder.geometry))
    assert any("consumerOffset.json.bak is used" in note for note in report.notes)
    assert path.read_bytes() == b"\0" * 64 and offsets.read("orders", "billing") == {0: 0}
    offsets.commit("orders", "billing", {0: 1})
    assert offsets.notes() == [] and offsets.read("orders", "billing") == {0: 1}
    assert path.with_name(path.name + ".damaged").read_bytes() == b"\0" * 64


def test_a_folder_in_the_place_of_the_file_is_a_note(builder):
    builder.put("orders", b"x")
    os.mkdir(builder.root / "config" / "consumerOffset.json")
    notes = ConsumerOffsets(builder.root).lower({("orders", 0): 1})
    assert any("config/consumerOffset.json cannot be used" in note for note in notes)
    ConsumerOffsets(builder.root).commit("orders", "billing", {0: 1})
    assert (builder.root / "config" / "consumerOffset.json.damaged").is_dir() and ConsumerOffsets(builder.root).notes() == []


def test_offsets_beyond_a_queue_are_lowered_although_only_the_previous_file_has_them(builder):
    builder.put("orders", b"x")
    offsets = ConsumerOffsets(builder.root)
    offsets.commit("orders", "billing", {0: 5})
    offsets.commit("orders", "billing", {0: 6})
    (builder.root / "config" / "consumerOffset.json").write_bytes(b"{")
    assert any("the offset 5 was beyond the end and is 1 now" in note for note in offsets.lower({("orders", 0): 1}))
    assert offsets.notes() == [] and offsets.read("orders", "billing") == {0: 1}


def test_a_delay_level_whose_waiting_messages_were_lost_delivers_what_comes_in_their_place(builder):
    first = [builder.put(SCHEDULE_TOPIC, b"%d" % number, dispatch=False) for number in range(5)]
    for message in first[:3]:
        builder.dispatch(message)
    builder.write_log(bytes(builder.end - first[3].physical_offset), at=first[3].physical_offset)
    offsets = DelayOffsets(builder.root)
    offsets.write({1: 5, 2: 7})
    (builder.root / "abort").touch()
    report = recover(MessageStore(builder.root, builder.geometry))
    assert report.end_offset == first[3].physical_offset
    assert offsets.read() == ({1: 3, 2: 0}, "") and len([note for note in report.notes if "delay level" in note]) == 2
    before = picture(builder.root / "config")
    assert not recover(MessageStore(builder.root, builder.geometry)).notes
    assert changes(before, picture(builder.root / "config")) == []


def test_a_message_in_place_of_a_taken_one_that_a_power_cut_took_can_be_cancelled(builder):
    first = [builder.put(SCHEDULE_TOPIC, b"%d" % number, dispatch=False) for number in range(5)]
    for message in first[:3]:
        builder.dispatch(message)
    builder.write_log(bytes(builder.end - first[3].physical_offset), at=first[3].physical_offset)
    with closing(DelayCancels(builder.root)) as cancels:
        cancels.take(1, 5, 0)
        (builder.root / "abort").touch()
        assert recover(MessageStore(builder.root, builder.geometry)).notes == ()
        assert not cancels.cancel(DelayMark(0, 1, 1, 2, 0)) and cancels.cancel(DelayMark(0, 1, 1, 3, 0))
