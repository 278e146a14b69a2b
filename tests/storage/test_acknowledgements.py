"""Acknowledgements by message: what is in flight against a plain model, the file with torn and damaged lines, what makes it void."""

from __future__ import annotations

import json
import os
import stat
import time
from collections import Counter
from dataclasses import replace

import pytest

from pyengine.errors import DiskError
from pyengine.formats.record import Message
from pyengine.storage import acknowledgements
from pyengine.storage.acknowledgements import (
    AckFile,
    Identity,
    InFlight,
    PassedOverError,
    SavedQueue,
    SharedLog,
    SharedQueue,
    decode,
    parse,
)
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.durable_file import lines_of, sealed_line
from pyengine.storage.durable_writes import sweep_unfinished

KEY = "orders@billing"
STATE = SavedQueue(3, 7, 10, 2000, ((12, 20), (30, 1999)), ((10, 11, 3),), (1999, 4096, 1_700_000_000_000, -5))


def message(offset, crc=0):
    return Message("orders", b"%d" % offset, 0, offset, 100 * offset, 100, store_timestamp_ms=offset, body_crc=crc)


def messages(start, end):
    return [message(offset) for offset in range(start, end)]


def offsets(found):
    return [each.queue_offset for each in found]


def resumed(states, offset, marked=0):
    """A reader that takes over a queue with these states at a stored offset."""
    flight = InFlight(offset)
    flight.resume(states, offset, lambda tenure: marked)
    return flight


@pytest.fixture
def file(tmp_path):
    (tmp_path / "config").mkdir()
    return AckFile(tmp_path, KEY)


def path_of(tmp_path):
    return tmp_path / "config" / "consumers" / "acks" / KEY


# --- in flight ------------------------------------------------------------------------------------


def test_what_is_done_moves_to_the_first_open_message():
    flight = InFlight(5)
    flight.deliver(messages(5, 10), None)
    for offset, done in ((6, 5), (8, 5), (5, 7), (9, 7), (7, 10)):
        assert flight.acknowledge(message(offset)) and flight.done == done
    assert not flight.acknowledge(message(7)) and not flight.is_outstanding


@pytest.mark.parametrize("by", ["acknowledge", pytest.param("deliver again", marks=pytest.mark.ci), "of members that share"])
def test_each_of_many_open_messages_costs_the_same(by):
    def took_s(count):
        given, flight = messages(0, count), InFlight(0)
        flight.deliver(given, None)
        shared = SharedQueue(SavedQueue(0, 1, 0, count, taken=((0, count, 7),)))
        for each in given if by == "deliver again" else ():
            flight.give_back(each)
        begin = time.thread_time()
        for each in given:
            if by == "acknowledge":
                flight.acknowledge(each)
            elif by == "deliver again":
                flight.redelivered()
                flight.deliver_again(1, None)
            else:
                shared.apply({"by": 7, "from": count, "end": count, "ended": [(each.queue_offset, each.queue_offset + 1)], "last": None})
                assert shared.done == each.queue_offset + 1
        assert by == "deliver again" or not (flight.open if by == "acknowledge" else shared.open)
        return time.thread_time() - begin

    assert took_s(96_000) < 80 * min(took_s(4_000) for _ in range(3)), "24 times as many take about 24 times as long"


def test_a_late_acknowledgement_counts_for_no_other_message_of_the_offset():
    flight = InFlight(0)
    flight.deliver(messages(0, 2), None)
    assert not flight.acknowledge(message(0, crc=9)) and not flight.give_back(message(1, crc=9))
    flight.finish(message(1, crc=9))
    assert flight.done == 0
    flight.finish(message(5))
    assert flight.done == 0, "no reader got that message in this tenure"


def test_a_message_given_back_is_the_next_one_and_is_counted():
    flight = InFlight(0)
    flight.deliver(messages(0, 3), 2)
    assert flight.give_back(message(1)) and flight.is_outstanding
    flight.finish()
    assert flight.done == 1 and not flight.is_outstanding and list(flight.open) == [1]
    (again,) = flight.deliver_again(5, 2)
    assert (again.queue_offset, again.delivery_count) == (1, 2) and again == message(1)
    flight.give_back(again)
    assert flight.deliver_again(5, 2) == [] and list(flight.dead) == [1]
    flight.finish()
    assert flight.done == 1, "until it is a dead letter"
    flight.acknowledge(again)
    assert flight.done == 3 and not flight.dead


def test_what_a_reader_has_not_got_yet_stays_open_and_alone_holds_up_no_queue():
    flight = InFlight(0)
    flight.deliver(messages(0, 6), None)
    flight.finish(kept={400, 500})
    assert (flight.done, [*flight.open], flight.exceeds(1)) == (4, [4, 5], False)
    flight.finish(message(5), kept={400})
    assert (flight.done, [*flight.open], flight.exceeds(1)) == (4, [4], True)


def test_a_delivery_that_failed_is_as_if_it_had_not_been():
    flight = InFlight(0)
    flight.deliver(messages(0, 3), None)
    flight.give_back(message(1))
    flight.give_back(message(0))
    before = flight.delivered_end, flight.done, flight.redelivered()
    flight.deliver_again(1, None)
    flight.deliver(messages(3, 6), None)
    flight.undeliver(*before)
    assert list(flight.open) == [0, 1, 2] and list(flight.again) == [1, 0] and flight.delivered_end == 3


def test_a_delivery_that_failed_is_not_counted():
    flight = InFlight(0)
    flight.deliver(messages(0, 2), 2)
    flight.give_back(message(0))
    for _ in range(5):
        before = flight.delivered_end, flight.done, flight.redelivered()
        assert [each.delivery_count for each in flight.deliver_again(1, 2)] == [2]
        flight.undeliver(*before)
    assert list(flight.again) == [0] and not flight.dead and flight.is_outstanding


def test_a_delivery_that_was_taken_back_is_not_counted_by_later_readers():
    flight = InFlight(0)
    flight.deliver(messages(0, 4), 9)
    flight.take_back(messages(1, 3))
    flight.deliver_again(1, 9)
    (state,) = decode(sealed_line(flight.saved(0, 0).fields()))[0]
    assert state.counts == ((2, 3, 0),)
    again = resumed([state], 0)
    assert [each.delivery_count for each in again.deliver(messages(0, 4), 9)] == [2, 2, 1, 2]
    spared = InFlight(0)
    spared.deliver(messages(0, 2), 9)
    spared.spared = {1}
    assert [each.delivery_count for each in resumed([spared.saved(0, 0)], 0).deliver(messages(0, 2), 9)] == [2, 1]


def test_what_is_finished_after_a_message_that_was_given_back_is_saved():
    flight = InFlight(0)
    flight.deliver(messages(0, 5), None)
    flight.give_back(message(1))
    flight.finish()
    state = flight.saved(0, flight.done)
    assert (state.offset, state.acked) == (1, ((2, 5),))


def test_the_span_counts_only_if_messages_behind_the_oldest_are_acknowledged():
    flight = InFlight(0)
    flight.deliver(messages(0, 100), None)
    assert not flight.exceeds(50), "a program that only commits may have any number"
    flight.acknowledge(message(70))
    assert flight.exceeds(50) and not flight.exceeds(100)


def test_tenures_at_random_repeat_nothing_that_was_saved_and_count_each_delivery(rng):
    """Readers come and go; each is killed at a random step after its state was appended, or not."""
    for _ in range(60):
        states, stored, marks = [], 0, {}
        delivered, saved_acks, acked_once = Counter(), set(), set()
        for _ in range(8):
            flight = InFlight(stored)
            flight.resume(states, stored, lambda tenure, marks=marks: marks.get(tenure, 0))
            if (state := flight.saved(0, stored)) is not None:
                states.append(state)
                flight.note_saved(state)
            acked, position = set(), stored
            for _ in range(rng.randrange(12)):
                step = rng.random()
                if step < 0.4:
                    count = rng.randrange(1, 6)
                    found = flight.unacknowledged(messages(position, position + count))
                    position += count
                    if found:
                        for each in flight.deliver(found, None):
                            delivered[each.queue_offset] += 1
                            assert each.queue_offset not in saved_acks
                            if each.queue_offset not in acked_once:  # no poison
                                assert each.delivery_count == delivered[each.queue_offset]
                        marks[flight.tenure] = flight.delivered_end
                elif step < 0.8 and flight.open:
                    each = rng.choice(list(flight.open.values()))
                    flight.acknowledge(each)
                    acked.add(each.queue_offset)
                    acked_once.add(each.queue_offset)
                elif step < 0.9:
                    state = flight.saved(0, flight.done)
                    states += [state] if state is not None else []
                    if state is not None:
                        flight.note_saved(state)
                    if rng.random() < 0.8:  # otherwise it is killed between the two files
                        stored = flight.done
                        saved_acks |= acked
                    else:
                        break
            assert acked_once.issuperset(range(stored)), "nothing below the offset is open"


# --- the file -------------------------------------------------------------------------------------


def test_the_file_has_what_was_appended(file, tmp_path):
    other = SavedQueue(0, 1, -1, 0)
    file.append([other], {}, is_durable=False)
    file.append([STATE], {}, is_durable=True)
    file.note_delivery(3, 7, 11, 4)
    file.note_delivery(3, 8, 11, 5)  # of another tenure
    file.note_delivery(9, 7, 11, 5)  # of a queue without a state
    assert file.read() == {0: [other], 3: [replace(STATE, counts=(*STATE.counts, (11, 12, 4)))]}
    assert file.read([3, 30]) == {3: file.read()[3]} and file.read([0]) == {0: [other]} and file.read([]) == {}
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600
    for line in path_of(tmp_path).read_bytes().split(b"\n")[1:]:
        assert isinstance(json.loads(line[:-9]), dict), "a line is readable"


def test_a_state_before_a_line_that_a_power_cut_lost_counts(file):
    """The lost line is zeros, because a later one is there."""
    other = SavedQueue(0, 7, 10, 12)
    file.append([STATE], {}, is_durable=True)
    file.path.write_bytes(sealed_line(STATE.fields()) + bytes(50) + sealed_line(other.fields()))
    assert file.read() == {3: [STATE], 0: [other]}


def test_a_torn_line_is_as_if_it_had_not_been_written(file, tmp_path):
    before = SavedQueue(3, 7, 10, 12)
    file.append([before, STATE], {}, is_durable=True)
    whole = path_of(tmp_path).read_bytes()
    for size in range(len(sealed_line(before.fields())), len(whole)):
        path_of(tmp_path).write_bytes(whole[:size])
        assert file.read() == {3: [before]}
        file.append([STATE], {}, is_durable=False)
        assert file.read() == {3: [before, STATE]}, "the next line is whole"


def test_no_single_bit_makes_it_say_something_else(rng):
    content = b"".join(sealed_line(state.fields()) for state in (SavedQueue(3, 7, 10, 12), STATE))
    whole = decode(content)[3]
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << rng.randrange(8)
        assert all(state in whole for states in decode(bytes(flipped)).values() for state in states)
    assert decode(rng.randbytes(5000)) == {}


@pytest.mark.parametrize("text", [
    "[]", "7", '{"again":1}', '{"queue":[],"again":1,"tenure":1,"deliveries":1}', "{}",
    '{"queue":0,"tenure":1,"offset":0,"end":9,"acked":[[5,5]],"counts":[],"last":null}',
    '{"queue":-1,"tenure":1,"offset":0,"end":9,"acked":[],"counts":[],"last":null}',
    '{"queue":0,"tenure":1,"offset":0,"end":9,"acked":[[5,6]],"counts":[[1,2]],"last":null}',
    '{"queue":0,"tenure":1,"offset":0,"end":1e9,"acked":[],"counts":[],"last":null}'])
def test_a_line_of_another_shape_is_ignored(text):
    import zlib

    assert decode(b"\n%s %08x" % (text.encode(), zlib.crc32(text.encode()))) == {}


def test_a_long_file_is_compacted_to_what_counts(file, tmp_path, monkeypatch):
    monkeypatch.setattr(acknowledgements, "COMPACT_BYTES", 4000)
    for number in range(300):
        file.append([SavedQueue(number % 3, 7, number, number + 9, ((number + 2, number + 4),))], {0: 288}, is_durable=False)
        assert path_of(tmp_path).stat().st_size < 4500
    found = file.read()
    assert {queue: states[-1].offset for queue, states in found.items()} == {0: 297, 1: 298, 2: 299}
    assert 288 in {state.offset for state in found[0]}, "its offset is stored still"
    assert [each.name for each in path_of(tmp_path).parent.iterdir()] == [KEY]


@pytest.mark.root
def test_root_compacts_a_file_of_another_user_who_can_read_it_then(file, tmp_path, monkeypatch):
    monkeypatch.setattr(acknowledgements, "COMPACT_BYTES", 400)
    file.append([STATE], {}, is_durable=True)
    for path in (path_of(tmp_path), path_of(tmp_path).parent):
        os.chown(path, 65534, 65534)
    for _ in range(30):
        file.append([STATE], {}, is_durable=False)
    status = path_of(tmp_path).stat()
    assert status.st_size < 1000 and (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (65534, 65534, 0o600)


def test_a_compaction_that_was_killed_leaves_nothing_behind(file, tmp_path):
    file.append([STATE], {}, is_durable=True)
    path_of(tmp_path).with_name(KEY + ".tmp").write_bytes(b"half")
    assert sweep_unfinished(tmp_path) == [path_of(tmp_path).with_name(KEY + ".tmp")]
    assert file.read() == {3: [STATE]}


def test_something_else_in_its_place_is_an_error_and_never_waited_for(file, tmp_path):
    path_of(tmp_path).parent.mkdir(parents=True)
    os.mkfifo(path_of(tmp_path))
    with pytest.raises(DiskError):
        file.read()
    with pytest.raises(DiskError, match="regular"):
        file.append([STATE], {}, is_durable=True)


# --- what counts, and what is void ----------------------------------------------------------------


def test_it_counts_only_beside_the_offset_that_it_was_written_for():
    state = SavedQueue(0, 7, 10, 30, ((12, 20),))
    assert offsets(resumed([state], 10).unacknowledged(messages(10, 21))) == [10, 11, 20]
    for moved in (0, 9, 11, 15):
        assert len(resumed([state], moved).unacknowledged(messages(moved, 21))) == 21 - moved
    assert len(resumed([state], None or 0).unacknowledged(messages(0, 5))) == 5


def test_a_kill_between_the_two_files_leaves_the_state_of_the_stored_offset():
    states = [SavedQueue(0, 7, 10, 30, ((12, 20),)), SavedQueue(0, 7, 12, 40, ((20, 33),))]
    assert offsets(resumed(states, 10).unacknowledged(messages(10, 22))) == [10, 11, 20, 21]
    assert offsets(resumed([*states, SavedQueue(0, 8, 5, 5)], 10).unacknowledged(messages(10, 13))) == [10, 11, 12], (
        "another tenure began at another offset")


def test_a_file_of_a_broker_voids_all_acknowledgements(file, tmp_path):
    groups = ConsumerOffsets(tmp_path)
    groups.commit("orders", "billing", {3: 10})
    file.append([STATE], {}, is_durable=True)
    groups.commit("orders", "audit", {0: 1})
    assert file.read() == {3: [STATE]}
    groups.path.write_text('{"offsetTable":{"orders@billing":{3:10}}}')  # as a broker writes it, without a checksum
    groups.commit("orders", "audit", {0: 1})
    assert file.read() == {}
    file.append([STATE], {}, is_durable=True)
    groups.commit("orders", "audit", {0: 1})
    assert file.read() == {3: [STATE]}, "it was written after the broker's file"


def test_a_group_that_is_forgotten_loses_its_acknowledgements(file, tmp_path):
    groups = ConsumerOffsets(tmp_path)
    groups.commit("orders", "billing", {3: 10})
    file.append([STATE], {}, is_durable=True)
    groups.update(lambda table: table.pop(KEY))
    assert file.read() == {}


def test_a_reset_to_the_same_offset_voids_the_acknowledgements(file):
    file.append([STATE], {}, is_durable=True)
    file.void({3: 10})
    flight = resumed(file.read()[3], 10)
    assert len(flight.unacknowledged(messages(10, 40))) == 30


def test_a_recovery_removes_what_the_queue_has_lost_and_keeps_the_rest(file, tmp_path):
    groups = ConsumerOffsets(tmp_path)
    groups.commit("orders", "billing", {3: 10})
    file.append([STATE], {3: 10}, is_durable=True)
    assert groups.lower({("orders", 3): 2000}) == [] and file.read() == {3: [STATE]}
    groups.lower({("orders", 3): 35})
    flight = resumed(file.read()[3], 10)
    assert offsets(flight.unacknowledged(messages(10, 40))) == [10, 11, *range(20, 30), 35, 36, 37, 38, 39]
    assert flight.last is None, "the message is lost, and the state was cut"
    groups.lower({})
    assert not file.read()[3][-1].acked and groups.read("orders", "billing") == {3: 0}


def test_the_identity_tells_messages_of_one_offset_apart():
    assert Identity.of(message(4)) == Identity.of(message(4)) != Identity.of(message(4, crc=1))


def test_saved_steps_and_states_give_one_table(rng):
    """Steps at random of three members, against a plain model; the table after each is the one that is read from the file."""
    for number in range(40):
        first = SavedQueue(0, 7, -(number % 2), 0)  # of a group that has no offset of the queue yet
        queue, content = SharedQueue(first), sealed_line(first.fields())
        model: dict[int, tuple[int, int]] = {}
        top = 0
        for _ in range(30):
            member = rng.randrange(1, 4)
            mine = [offset for offset, (_, owner) in model.items() if owner == member]
            ended, back, undone = (rng.sample(mine, rng.randrange(len(mine) + 1)) for _ in range(3))
            free = [offset for offset, (_, owner) in model.items() if not owner]
            new = rng.sample(range(top, top + 5), rng.randrange(4))
            parts = {"ended": ended, "back": back, "undone": undone, "took": free + new}
            step = queue.step(member, parts, max(new, default=top - 1) + 1 + rng.randrange(2))
            for offset in ended:
                del model[offset]
            for offset in set(back) - set(ended):
                model[offset] = model[offset][0], 0
            for offset in set(undone) - {*ended, *back}:
                model[offset] = model[offset][0] - 1, 0
            for offset in (*free, *new):
                model[offset] = model.get(offset, (0, 0))[0] + 1, member
            top = max(top, step["end"])
            line = sealed_line(step)
            content += line
            (parsed,) = parse(lines_of(line))
            queue.apply(parsed)
            assert queue.open == model and queue.end == top
            assert set(queue.free) == {offset for offset, (_, owner) in model.items() if not owner}
            (state,) = decode(content)[0]
            again = SharedQueue(state)
            assert (again.open, again.end, again.done) == (queue.open, queue.end, queue.done)


def test_the_torn_line_of_a_killed_member_is_news_once_and_damages_no_other_line(file):
    log, other = SharedLog(file), SharedLog(file)
    log.follow()
    log.add(SavedQueue(0, 5, 0, 0))
    log.write()
    with open(file.path, "ab") as torn:
        torn.write(sealed_line(log.queues[0].step(9, {"took": [0]}, 1))[:-3])
    assert log.has_news
    log.follow()
    assert not log.has_news and not log.queues[0].open
    log.add(log.queues[0].step(7, {"took": [0, 1]}, 2))
    assert log.write() and not log.has_news
    other.follow()
    assert other.queues[0].open == log.queues[0].open == {0: (1, 7), 1: (1, 7)}
    other.close()
    log.close()


def test_what_a_member_appends_that_others_have_passed_over_does_not_count(file):
    stopped, other = SharedLog(file), SharedLog(file)

    def write(log, **parts):
        log.add(log.queues[0].step(7 if log is stopped else 8, parts, 1 + max(parts.get("took", [0]))))
        return log.write()

    stopped.follow()
    stopped.add(SavedQueue(0, 5, 0, 0))
    assert stopped.write() and stopped.fence == 0
    file.raise_fence(other.read_fence() + 1)
    other.follow()
    assert write(other, took=[0]) and other.fence == other.read_fence() == 1
    for late in ({"took": [1, 2]}, {"took": [0, 1, 2]}):
        with pytest.raises(PassedOverError):
            write(stopped, **late)
    stopped.add(SavedQueue(0, 6, 0, 3))
    with pytest.raises(PassedOverError):
        stopped.write()
    for log in (stopped, other):
        log.forget()
        log.follow()
        assert log.queues[0].open == {0: (1, 8)} and log.queues[0].tenure == 5
    (state,) = file.read()[0]
    assert state.taken == ((0, 1, 8),) and state.fence == -1
    file.compact({})
    other.follow()
    assert other.fence == 1 and write(other, ended=[0]) and file.read()[0][0].acked == ((0, 1),)
    for log in (stopped, other):
        log.close()
