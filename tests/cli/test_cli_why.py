"""`pyengine why`: what it says of recorded stalls, and where there is nothing to say."""

from __future__ import annotations

import dataclasses
import re
import signal

import pytest

import pyengine
from fix_cli import run
from pyengine.cli import why
from pyengine.native import control as native
from pyengine.native import recorder
from pyengine.native.flush import monotonic_ns
from pyengine.native.recorder import CurrentPhase, Minute, Ring, Stall
from waiting import eventually

S = 1_000_000_000
MS = 1_000_000
NOW_NS, NOW_MS = 10_000 * S, 1_700_000_000_000.0
PLAIN = Stall(native.WRITER, 1, NOW_NS - S, 100 * MS, "puts", "unknown", {}, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1)


def stall(kind: int, what: str, cause: str, ago_ms: float = 1000, took_ms: float = 100, **more: object) -> Stall:
    return PLAIN._replace(kind=kind, what=what, cause=cause, began_ns=round(NOW_NS - ago_ms * MS), took_ns=round(took_ms * MS), **more)


def explained(*stalls: Stall, current: dict[int, CurrentPhase] | None = None, minutes: list[Minute] | None = None,
              since_s: float = 3600) -> why.Why:
    rings = [Ring(0, (current or {}).get(kind), [one for one in stalls if one.kind == kind],
                  minutes or [] if kind == recorder.PUTS_RING else []) for kind in range(recorder.PUTS_RING + 1)]
    return why.explain(rings, (current or {}), round(NOW_NS - since_s * S), NOW_NS, NOW_MS)


PUTS = recorder.PUTS_RING


def test_stalls_that_puts_waited_for_are_listed_apart_from_the_others():
    found = explained(
        stall(PUTS, "puts", "stopped"), stall(native.FLUSHER, "sync", "sync", detail=1), stall(native.REPLICATOR, "confirm", "slave"),
        stall(native.FLUSHER, "sync", "sync"), stall(native.WRITER, "pass", "fault"), stall(native.ALLOCATOR, "round", "round"))
    assert sorted((one.what, one.worker) for one in found.waits) == [
        ("confirm", "replicator"), ("puts", "writer"), ("sync", "flusher")]
    assert len(found.others) == 3


def test_waits_at_the_same_time_count_once():
    found = explained(stall(PUTS, "puts", "sync", 1000, 200), stall(PUTS, "puts", "sync", 900, 200), stall(PUTS, "puts", "cpu", 500, 50))
    assert found.total_ms == pytest.approx(350)
    assert [(cause.cause, cause.waits, cause.total_ms) for cause in found.causes] == [
        ("sync", 2, pytest.approx(300)), ("cpu", 1, pytest.approx(50))]
    assert "3 times, 350 ms in all, 200 ms at the longest; most of it because the device took long to sync" in found.sentence


def test_only_stalls_that_ended_since_the_given_time_are_listed():
    old, new = stall(PUTS, "puts", "cpu", 20_000), stall(PUTS, "puts", "sync", 5000)
    assert [one.cause for one in explained(old, new, since_s=10).waits] == ["sync"]


@pytest.mark.parametrize("cause, keeper", [("segment", native.ALLOCATOR), ("pool", native.COMMITTER), ("lock", native.SUPERVISOR)])
def test_a_wait_of_the_writer_names_the_stopped_worker_that_caused_it(cause, keeper):
    behind = stall(keeper, "stopped", "stopped", 1040, 90)
    beside = stall(keeper, "blocked", "no_room", 500, 90)
    [one] = explained(stall(PUTS, "puts", cause), behind, beside).waits
    name = ["supervisor", "writer", "committer", "flusher", "reputter", "allocator"][keeper]
    assert one.sentence.endswith(f": the {name} was stopped by a signal, for no longer than 90 ms")


def test_each_cause_has_a_clause_and_advice():
    assert set(why.CAUSES) == set(recorder.CAUSE_NAMES)
    for cause, (means, advice) in why.CAUSES.items():
        [one] = explained(stall(PUTS, "puts", cause, bytes=2048, major_faults=2, queued_ns=50 * MS, window_ns=200 * MS)).waits
        assert one.sentence.startswith(means.format(kind="writer")) and advice


@pytest.mark.parametrize("one, said", [
    (stall(native.FLUSHER, "sync", "sync", bytes=2048, phase_ns={"sync": 90 * MS}), "the device took long to sync: 90 ms for 2.0 KiB"),
    (stall(PUTS, "puts", "cpu", queued_ns=50 * MS, window_ns=200 * MS),
     "the writer was ready to run and had no processor for 50 ms of 200 ms"),
    (stall(native.SUPERVISOR, "died", "restart", took_ms=0, detail=native.FLUSHER), "the flusher died, and was started again"),
    (stall(native.SUPERVISOR, "died", "restart", took_ms=0, detail=999), "the worker died, and was started again"),
    (stall(native.SUPERVISOR, "start", "start", took_ms=2500), "the engine was started, which took 2.5 s"),
    (stall(native.WRITER, "blocked", "no_room", took_ms=0), "the disk was full, from here on")])
def test_each_kind_of_stall_has_its_sentence(one, said):
    found = explained(one)
    assert [each.sentence for each in found.waits + found.others] == [said]


def test_a_put_that_a_frozen_disk_held_up_is_not_put_down_to_memory_alone():
    [cause] = explained(stall(PUTS, "puts", "fault", took_ms=16_000, minor_faults=2)).causes
    assert "made writable" in cause.means and cause.advice.startswith("a disk that hangs, or is frozen")


def test_a_phase_that_still_lasts_long_is_shown_with_its_worker_and_duration():
    found = explained(current={native.FLUSHER: CurrentPhase("sync", NOW_NS - 12 * S), native.WRITER: CurrentPhase("other", NOW_NS - S),
                             native.ALLOCATOR: CurrentPhase("blocked", NOW_NS - MS)})
    assert found.now == ["just now the flusher syncs, for 12 s"]


def test_overwritten_stalls_are_counted():
    minute = (NOW_NS - S) // (60 * S)
    found = explained(stall(PUTS, "puts", "cpu"), minutes=[Minute(minute, 41), Minute(minute - 200, 7)], since_s=3600)
    assert found.forgotten == 40 and "41 times" in found.sentence


def test_the_timeline_marks_how_much_of_each_moment_was_waited():
    found = explained(*(stall(PUTS, "puts", "cpu", ago_ms, took_ms) for ago_ms, took_ms in ((30_000, 5), (20_000, 50), (10_000, 1500))))
    legend, *rows = why.timeline(found)
    assert legend.startswith("each mark is 1 s") and "".join(rows).count(".") >= 1 and "o" in rows[-1] + rows[0] and "##" in rows[-1]


def test_a_long_time_has_longer_marks():
    found = explained(stall(PUTS, "puts", "cpu", 3_500_000), stall(PUTS, "puts", "cpu", 1000))
    assert why.timeline(found)[0].startswith("each mark is 60 s")


def since(text):
    """The time in ms that --since means."""
    return why.since_of(text)(NOW_MS)


@pytest.mark.parametrize("text, back_ms", [("90s", 90_000), ("1.5m", 90_000), ("2h", 7_200_000), ("1d", 86_400_000)])
def test_since_takes_a_span(text, back_ms):
    assert since(text) == NOW_MS - back_ms


def test_since_takes_a_time():
    assert since("@1700000000123") == 1700000000123
    assert since("2023-11-14T22:13:20") == 1700000000000


def test_a_wrong_since_says_what_it_can_be(make_engine):
    engine = make_engine()
    engine.start()
    ran = run("why", engine.root, "--since", "yesterday")
    assert ran.code == 2 and "give a span (90s, 10m, 2h, 1d)" in ran.stderr


def test_a_store_whose_engine_stopped_says_so(make_engine):
    engine = make_engine()
    engine.start()
    engine.stop()
    ran = run("why", engine.root)
    assert ran.code == 1 and "stopped in order, which ends the record" in ran.stderr


def test_a_stall_as_people_and_programs_see_it(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"first").ok
        engine.kill("writer", signal.SIGSTOP)
        future, began_ns = producer.put_async("T", b"x"), monotonic_ns()
        eventually(lambda: monotonic_ns() - began_ns > 50 * MS, "it waits")
        engine.kill("writer", signal.SIGCONT)
        assert future.result(60).ok
    document = eventually(lambda: (ran := run("why", engine.root, "--json").document)["waits"] and ran, "it is recorded")
    longest = max(document["waits"], key=lambda one: one["took_ms"])
    assert (longest["cause"], longest["worker"], longest["puts"]) == ("stopped", "writer", 1) and longest["took_ms"] > 40
    assert set(longest) == {field.name for field in dataclasses.fields(why.Entry)} and document["threshold_ms"] == 5
    said = run("why", engine.root, "--since", "10m").stdout
    assert re.search(r"ms +1 put +the writer was stopped by a signal", said) and "what helps" in said and "|" in said
    assert "the engine was started" in said and "the engine was started" in run("why", engine.root, "--all").stdout


def test_watched_stalls_are_kept_over_a_crash_and_over_newer_stalls(make_engine, monkeypatch):
    engine = make_engine()
    engine.start()
    waits = why.Waits(engine.root)
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"first").ok
        engine.kill("writer", signal.SIGSTOP)
        began_ns, future = monotonic_ns(), producer.put_async("T", b"x")
        eventually(lambda: monotonic_ns() - began_ns > 50 * MS, "it waits")
        engine.kill("writer", signal.SIGCONT)
        assert future.result(60).ok
    eventually(lambda: waits.why().waits, "it is recorded")
    engine.kill_all()
    engine.start()
    found = waits.why()
    assert "stopped" in [one.cause for one in found.waits] and "start" in [one.cause for one in found.others]
    assert "stopped" not in [one.cause for one in why.Waits(engine.root).why().waits], "what was before is not told"
    engine.stop()
    assert {one.took_ms for one in waits.why().waits} >= {one.took_ms for one in found.waits}, "an orderly stop takes nothing away"
    summary = found.summary
    assert summary["waits"] == len(found.waits) and summary["longest_ms"] > 40 and summary["causes"][0]["means"]


def test_only_stalls_overwritten_between_two_reads_are_counted_as_forgotten(monkeypatch):
    minute = (monotonic_ns() + 60 * S) // (60 * S)
    soon_ns = minute * 60 * S

    def rings(count: int, *numbers: int):
        stalls = [PLAIN._replace(kind=PUTS, number=number, began_ns=soon_ns + number) for number in numbers]
        empty = [Ring(0, None, [], []) for _ in range(PUTS)]
        return [*empty, Ring(count, None, stalls, [Minute(minute, count)])]

    looks = iter([rings(40), rings(43, 41, 42), rings(47, 45, 46), rings(47, 45, 46)])
    monkeypatch.setattr(why, "read_recorder", lambda root: next(looks))
    waits = why.Waits("somewhere")
    waits.collect()
    waits.collect()
    found = waits.why()
    assert (len(found.waits), found.forgotten) == (4, 3), "40 were there before, 44 and two more were never seen"


def test_a_table_of_stalls_shows_measured_and_merely_counted_ones(capsys):
    one, none = explained(stall(PUTS, "puts", "sync"), minutes=[Minute((NOW_NS - S) // (60 * S), 3)]).summary, explained().summary
    why.write_stalls("mode", {"sync": one, "async": none})
    told = capsys.readouterr().out
    assert re.search(r"^sync +1 +100 ms +100 ms +the device took long to sync$", told, re.MULTILINE), told
    assert "sync: 2 more were only counted" in told and "async" not in told
    why.write_stalls("mode", {"async": none})
    assert capsys.readouterr().out == "no put waited 5 ms or more for the engine\n"
