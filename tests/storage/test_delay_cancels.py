"""config/delay-cancels: the order of its lines decides between a cancel and the scheduler, whatever dies in between."""

from __future__ import annotations

import os
import threading

import pytest

from interrupting import interrupted_at_each_place
from pyengine.errors import DiskError, EngineError, StoreBusyError
from pyengine.formats.delayed_message import DelayMark
from pyengine.storage import consumer_offset, durable_file
from pyengine.storage.consumer_offset import CANCELS_NAME, DelayCancels, DelayOffsets, cancelled_messages, delay_marks
from pyengine.storage.durable_file import sealed_line

BROKERS = '{\n\t"offsetTable":{1:5}\n\t}'  # keys without quotes


def of_level(queue_offset: int, level: int = 1) -> DelayMark:
    return DelayMark(1000 + queue_offset, 1_700_000_000_000, level, queue_offset, 0)


def lines_of(cancels: DelayCancels) -> durable_file.AppendedLines:
    """A process's end of the file."""
    return cancels._lines


def timed(due_ms: int, queue_offset: int = 0) -> DelayMark:
    return DelayMark(9000 + due_ms, 1_700_000_000_000, 3, queue_offset, due_ms)


@pytest.fixture
def root(tmp_path):
    (tmp_path / "config").mkdir()
    return tmp_path


@pytest.fixture
def make(root):
    """One of the processes that have the file."""
    made = []

    def new() -> DelayCancels:
        made.append(DelayCancels(root))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_a_mark_counts_if_no_line_before_it_takes_the_message(make):
    scheduler, program = make(), make()
    assert program.cancel(of_level(4)) and program.cancel(of_level(5))
    scheduler.take(1, 6, 0)
    assert scheduler.is_cancelled(of_level(4).id) and scheduler.is_cancelled(of_level(5).id)
    assert not scheduler.is_cancelled(of_level(3).id)
    assert not program.cancel(of_level(3)), "taken and not cancelled before"
    assert program.cancel(of_level(5)), "it never comes, however often it is asked"
    assert program.cancel(of_level(6)) and program.cancel(of_level(0, level=2)), "not taken: a later one, one of another level"
    scheduler.take(1, 7, 0)
    assert scheduler.is_cancelled(of_level(6).id) and not scheduler.is_cancelled(of_level(3).id)


def test_a_mark_that_comes_after_the_scheduler_has_looked_is_void(make, root, monkeypatch):
    """The program looked when the message was not taken; the line that takes it comes before the mark."""
    scheduler, program = make(), make()
    program.cancel(of_level(99))
    append = durable_file.AppendedLines.append

    def late(lines, fields) -> None:
        if lines is lines_of(program):
            scheduler.take(1, 5, 0)
        append(lines, fields)

    monkeypatch.setattr(durable_file.AppendedLines, "append", late)
    synced = []
    monkeypatch.setattr(durable_file, "sync_descriptor", lambda descriptor, path, **_: synced.append(os.fstat(descriptor).st_size))
    assert not program.cancel(of_level(4))
    assert synced == [program.path.stat().st_size], "a power cut must not keep the mark alone"
    assert not scheduler.is_cancelled(of_level(4).id)
    monkeypatch.undo()
    again = make()
    again.take(1, 5, 0)
    assert not again.is_cancelled(of_level(4).id), "for no later scheduler either"


def test_a_mark_that_comes_before_the_scheduler_takes_the_message_counts(make, monkeypatch):
    """By any time, however short."""
    scheduler, program = make(), make()
    append, answers = durable_file.AppendedLines.append, []

    def just_before(lines, fields) -> None:
        if lines is lines_of(scheduler):
            answers.append(program.cancel(of_level(4)))
        append(lines, fields)

    monkeypatch.setattr(durable_file.AppendedLines, "append", just_before)
    scheduler.take(1, 5, 0)
    assert answers == [True] and scheduler.is_cancelled(of_level(4).id)


def test_a_message_with_a_time_can_be_cancelled_until_the_scheduler_delivers_that_time(make):
    scheduler, program = make(), make()
    scheduler.take(3, 10, 5000)
    assert not program.cancel(timed(5000)) and program.cancel(timed(5001)), "its place in a level means nothing: it moves"
    scheduler.take(1, 1, 4000)
    assert not program.cancel(timed(4500)), "the clock was set back"
    scheduler.take(1, 2, 6000)
    assert scheduler.is_cancelled(timed(5001).id)


def test_after_the_clock_was_set_back_a_message_that_is_put_then_can_be_cancelled(make, monkeypatch):
    """By its place in the log: a delivery before that is none of it."""
    scheduler, program = make(), make()
    scheduler.take(3, 10, 5000, 10_000)
    old, new, later = (timed(4500)._replace(physical_offset=offset) for offset in (9999, 10_000, 20_000))
    assert not program.cancel(old) and program.cancel(new), "no line takes what begins beyond it"
    scheduler.take(1, 1, 4000, 15_000)
    assert scheduler.is_cancelled(new.id) and program.cancel(new._replace(physical_offset=14_999)), "it waits in another level"
    assert not program.cancel(old) and not program.cancel(new._replace(physical_offset=12_000, due_ms=4000))
    scheduler.take(1, 2, 4400, 30_000)
    for below in range(3, 20):
        scheduler.take(1, below, 3000, 40_000)
    assert not program.cancel(later), "the clock was set back again: it may have been delivered"
    assert program.cancel(later._replace(physical_offset=30_000))
    size_bytes = scheduler.path.stat().st_size
    monkeypatch.setattr(consumer_offset, "CANCELS_SHORTEN_BYTES", 0)
    scheduler.shorten(0, None)
    assert scheduler.path.stat().st_size < size_bytes
    for each in (scheduler, make()):
        assert not each.cancel(later) and each.cancel(later._replace(physical_offset=30_001)), "a short file says the same"


def test_a_line_is_durable_while_the_clock_is_set_back(make, monkeypatch):
    """Without it after a power cut a delivered message would count as not taken, if the clock was set back again."""
    synced, scheduler = [], make()
    monkeypatch.setattr(durable_file, "sync_descriptor", lambda descriptor, path, **_: synced.append(os.fstat(descriptor).st_size))
    scheduler.take(1, 1, 5000, 10_000)
    assert synced == []
    scheduler.take(1, 2, 4000, 20_000)
    assert synced == [scheduler.path.stat().st_size]
    scheduler.take(1, 3, 5000, 30_000)
    assert len(synced) == 1


def test_a_message_that_is_due_is_not_cancelled_any_more(make):
    program = make()
    assert not program.cancel(of_level(4), is_due=True)
    assert program.cancel(of_level(4)) and program.cancel(of_level(4), is_due=True), "it was cancelled in time"


def test_a_restarted_scheduler_counts_what_had_its_time_as_taken(make, root):
    program = make()
    make().resume({1: 0}, 5000)
    assert not (root / "config" / CANCELS_NAME).exists(), "a store without delayed messages gets no file"
    assert program.cancel(timed(4000))
    scheduler = make()
    scheduler.resume({1: 0}, 5000)
    assert scheduler.is_cancelled(timed(4000).id) and not program.cancel(timed(4500)) and program.cancel(timed(5500))


def test_a_mark_is_durable_before_the_answer(make, monkeypatch):
    synced = []
    monkeypatch.setattr(durable_file, "sync_descriptor", lambda descriptor, path, **_: synced.append(os.fstat(descriptor).st_size))
    monkeypatch.setattr(durable_file, "sync_folder", lambda path: synced.append(path.name))
    program = make()
    assert program.cancel(of_level(1)) and synced == [len(sealed_line(of_level(1)._asdict())), "config"]
    assert program.cancel(of_level(1)) and synced[2:] == [2 * synced[0]], "the first one's process may be dead before its sync"

    def fails(*_, **__):
        raise DiskError("the disk is gone")

    monkeypatch.setattr(durable_file, "sync_descriptor", fails)
    with pytest.raises(DiskError):
        program.cancel(of_level(2))


@pytest.mark.parametrize("size", range(1, len(sealed_line(of_level(1)._asdict())), 7))
def test_a_torn_line_is_as_if_it_had_not_been_written(make, root, size):
    line = sealed_line(of_level(1)._asdict())
    (root / "config" / CANCELS_NAME).write_bytes(line[:size])
    scheduler, program = make(), make()
    assert program.cancel(of_level(2))
    scheduler.take(1, 3, 0)
    assert scheduler.is_cancelled(of_level(2).id) and not scheduler.is_cancelled(of_level(1).id)


def test_a_durable_line_counts_before_a_lost_one(make, root):
    """A power cut may lose a line and keep a later one: the lost one is zeros then, which follow the line before."""
    lost = sealed_line({"level": 2, "below": 7})
    (root / "config" / CANCELS_NAME).write_bytes(
        sealed_line(of_level(1)._asdict()) + bytes(len(lost)) + sealed_line(of_level(2)._asdict()) + bytes(9))
    scheduler = make()
    scheduler.take(1, 3, 0)
    assert scheduler.is_cancelled(of_level(1).id) and scheduler.is_cancelled(of_level(2).id)


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(make, root):
    scheduler, program = make(), make()
    program.cancel(of_level(1))
    line = sealed_line(of_level(2)._asdict())
    with open(root / "config" / CANCELS_NAME, "ab", buffering=0) as file:
        file.write(line[:30])
        lines_of(scheduler).renew()
        scheduler._follow()
        assert not scheduler.is_cancelled(of_level(2).id)
        file.write(line[30:])
    scheduler._follow()
    assert scheduler.is_cancelled(of_level(1).id) and scheduler.is_cancelled(of_level(2).id)


@pytest.mark.parametrize("fields", [{}, {"level": 1, "below": "3"}, {"level": 1, "below": 3, "at_ms": 1 << 64},
                                    {**of_level(1)._asdict(), "more": 1}, {**of_level(1)._asdict(), "level": None}])
def test_a_line_of_another_kind_is_left_out(make, root, fields):
    (root / "config" / CANCELS_NAME).write_bytes(sealed_line(fields))
    scheduler = make()
    scheduler.take(2, 1, 0)
    assert make().cancel(of_level(1))


# ---- the file is shortened -------------------------------------------------------------


@pytest.fixture
def always_long(monkeypatch):
    monkeypatch.setattr(consumer_offset, "CANCELS_SHORTEN_BYTES", -1)
    monkeypatch.setattr(consumer_offset, "CANCELS_SHORTEN_FACTOR", 0)


def test_a_shortened_file_says_the_same(make, root, always_long):
    scheduler, program = make(), make()
    scheduler.take(1, 3, 700)
    program.cancel(of_level(4)), program.cancel(timed(900))
    for below in range(3, 50):
        scheduler.take(2, below, 800)
    size_bytes = (root / "config" / CANCELS_NAME).stat().st_size
    scheduler.shorten(0, None)
    assert (root / "config" / CANCELS_NAME).stat().st_size < size_bytes / 2
    for each in (scheduler, make()):
        each.take(1, 5, 0)
        assert each.is_cancelled(of_level(4).id) and each.is_cancelled(timed(900).id)
    assert not program.cancel(of_level(2)) and not program.cancel(of_level(48, level=2)) and not program.cancel(timed(800))
    assert program.cancel(of_level(49, level=2)) and program.cancel(of_level(4))


def test_a_short_file_is_left_alone(make, root):
    scheduler = make()
    scheduler.take(1, 3, 0), scheduler.take(1, 4, 0)
    before = (root / "config" / CANCELS_NAME).read_bytes()
    scheduler.shorten(10, 10)
    assert (root / "config" / CANCELS_NAME).read_bytes() == before


def test_a_mark_is_dropped_when_no_record_of_its_message_waits_any_more(make, always_long):
    scheduler = make()
    make().cancel(timed(900))

    def has_it(noted_end: int, log_end: int | None) -> bool:
        scheduler.shorten(noted_end, log_end)
        scheduler.take(1, 0, 0)
        return scheduler.is_cancelled(timed(900).id)

    assert has_it(5000, None), "a put of the scheduler has no answer yet: a record may come"
    assert has_it(5000, 6000) and has_it(6000, 6500)
    assert has_it(6001, 6500), "an older copy of delayOffset.json does not say so yet"
    assert not has_it(6002, 6500)


def test_a_mark_found_by_another_scheduler_is_kept_until_it_knows(make, always_long):
    make().cancel(timed(900))
    first = make()
    first.shorten(5000, 6000)
    second = make()
    second.shorten(7000, 7500), second.shorten(7200, 7500), second.shorten(7400, 7500)
    second.take(1, 0, 0)
    assert second.is_cancelled(timed(900).id)


def test_the_scheduler_never_waits_for_a_program_that_cancels(make, root, always_long):
    scheduler, program = make(), make()
    scheduler.take(1, 3, 0)
    before = os.stat(root / "config" / CANCELS_NAME).st_ino
    with lines_of(program).hold():
        scheduler.take(1, 4, 0)
        scheduler.shorten(0, None)
        assert os.stat(root / "config" / CANCELS_NAME).st_ino == before
    scheduler.shorten(0, None)
    assert os.stat(root / "config" / CANCELS_NAME).st_ino != before
    assert not program.cancel(of_level(3)) and program.cancel(of_level(4)), "in the new file"
    scheduler.take(1, 5, 0)
    assert scheduler.is_cancelled(of_level(4).id)


def test_a_mark_is_never_written_into_a_file_that_was_shortened_before(make, always_long, monkeypatch):
    scheduler, program = make(), make()
    assert program.cancel(of_level(1))
    wait = durable_file.wait_until_held

    def after_others(*given) -> None:
        monkeypatch.undo()
        scheduler.take(1, 1, 0)
        lines_of(scheduler).shorten(scheduler._state.lines)
        wait(*given)

    monkeypatch.setattr(durable_file, "wait_until_held", after_others)
    assert program.cancel(of_level(2))
    scheduler.take(1, 3, 0)
    assert scheduler.is_cancelled(of_level(1).id) and scheduler.is_cancelled(of_level(2).id)


def test_a_cancel_beside_a_stopped_scheduler_gives_up(make, monkeypatch):
    scheduler, program = make(), make()
    scheduler.take(1, 1, 0)
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0.05)
    assert durable_file.try_lock(lines_of(scheduler)._descriptor, 0, scheduler.path)
    with pytest.raises(StoreBusyError, match=CANCELS_NAME):
        program.cancel(of_level(5))


def test_a_shortened_file_that_cannot_be_opened_is_the_error(make, monkeypatch):
    program = make()
    assert program.cancel(of_level(1))
    wait = durable_file.wait_until_held

    def replaced(*given) -> None:
        wait(*given)
        program.path.unlink()
        program.path.mkdir()

    monkeypatch.setattr(durable_file, "wait_until_held", replaced)
    with pytest.raises(DiskError, match=CANCELS_NAME):
        program.cancel(of_level(2))


def test_after_a_cancel_that_a_signal_handler_interrupts_each_mark_counts(make, root):
    program, path = make(), root / "config" / CANCELS_NAME
    before, after = of_level(2), of_level(1)

    def cancel() -> None:
        program.close()
        program.cancel(of_level(0))

    path.write_bytes(sealed_line(before._asdict()))
    for _ in interrupted_at_each_place(cancel):
        assert program.cancel(after)
        assert {before.id, after.id} <= cancelled_messages(root).keys()
        path.write_bytes(sealed_line(before._asdict()))


def test_after_an_interrupted_cancel_the_next_one_knows_what_the_scheduler_took(make):
    """Lines that were read and not applied were never read again."""
    scheduler, program = make(), make()

    def begin() -> None:
        program.path.unlink(missing_ok=True)
        assert program.cancel(of_level(9))
        scheduler.take(1, 6, 0)

    begin()
    for _ in interrupted_at_each_place(lambda: program.cancel(of_level(5))):
        assert not program.cancel(of_level(5))
        begin()


def test_cancels_at_once_all_count(make, always_long):
    """Beside a scheduler that shortens the file all the time."""
    scheduler, over = make(), threading.Event()
    programs = [make() for _ in range(4)]
    answers: list[bool] = []

    def cancel(program, number: int) -> None:
        for offset in range(40):
            answers.append(program.cancel(of_level(10 * offset + number)))

    def shorten() -> None:
        while not over.is_set():
            scheduler.take(2, 1, 0)
            scheduler.shorten(0, None)

    threads = [threading.Thread(target=cancel, args=(program, number % 2)) for number, program in enumerate(programs)]
    shortens = threading.Thread(target=shorten)
    for thread in (*threads, shortens):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    shortens.join()
    assert answers == [True] * 160
    last = make()
    last.take(1, 1000, 0)
    assert all(last.is_cancelled(of_level(10 * offset + number).id) for offset in range(40) for number in range(2))


# ---- other programs ----------------------------------------------------------------------


def test_what_a_broker_moved_on_cannot_be_cancelled_and_what_it_delivered_is_delivered(make, root):
    """It writes delayOffset.json without pyengine's checksum; nothing says where the messages of its levels went."""
    scheduler, program = make(), make()
    scheduler.take(3, 2, 0)
    (root / "config" / "delayOffset.json").write_text(BROKERS.replace("1:5", "1:5,3:5"))
    for state in ("stopped", "started", "has written its own"):
        with pytest.raises(EngineError, match="broker"):
            program.cancel(timed(5000, queue_offset=4))
        assert not program.cancel(of_level(4)) and program.cancel(of_level(5)) and program.cancel(timed(6000, queue_offset=5))
        if state == "stopped":
            scheduler.resume({1: 5, 3: 5}, 1000)
        else:
            DelayOffsets(root).write({1: 5, 3: 6})


def test_what_a_scheduler_of_this_kind_moved_on_can_be_cancelled(make, root):
    """Also at a promoted slave, which has its master's marks and delayOffset.json, and no lines of what was taken."""
    DelayOffsets(root).write({1: 5, 3: 5})
    scheduler, program = make(), make()
    scheduler.resume({1: 5, 3: 5}, 1000)
    assert program.cancel(timed(5000, queue_offset=4)) and not program.cancel(of_level(4)) and not program.cancel(timed(900))


def test_a_slave_gets_the_marks_that_count(make, root):
    scheduler, program = make(), make()
    path = root / "config" / CANCELS_NAME
    program.cancel(of_level(1))
    scheduler.take(1, 3, 0)
    marks = delay_marks(path.read_bytes() + sealed_line(of_level(2)._asdict()))
    assert delay_marks(marks) == marks == sealed_line(of_level(1)._asdict())
    assert delay_marks(b"") == delay_marks(b"\n") == b"\n", "the protocol has no empty table"


# ---- recovery -----------------------------------------------------------------------------


def test_what_comes_in_place_of_messages_that_a_power_cut_took_is_not_taken(make, root):
    make().take(1, 9, 0)
    assert DelayCancels(root).lower({("SCHEDULE_TOPIC_XXXX", 0): 4}) == []
    program = make()
    assert not program.cancel(of_level(3)) and program.cancel(of_level(4))
    before = (root / "config" / CANCELS_NAME).read_bytes()
    assert DelayCancels(root).lower({("SCHEDULE_TOPIC_XXXX", 0): 4}) == []
    assert (root / "config" / CANCELS_NAME).read_bytes() == before


def test_a_store_without_cancels_gets_no_file_from_recovery(root):
    assert DelayCancels(root).lower({}) == []
    assert not (root / "config" / CANCELS_NAME).exists()


def test_a_folder_in_the_place_of_the_file_is_a_note(root):
    (root / "config" / CANCELS_NAME).mkdir()
    [note] = DelayCancels(root).lower({})
    assert CANCELS_NAME in note
