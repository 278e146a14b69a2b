"""The whole-store check: silent on every good store, and it notices each kind of damage."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from fix_golden import CLEAN, HALTED
from pyengine.engine_config import EngineConfig
from pyengine.errors import ExitCode, NotAStoreError, UsageError
from pyengine.formats.consume_queue import ENTRY
from pyengine.formats.record import decode_record
from pyengine.formats.small_file import Checkpoint
from pyengine.storage.check import parts as check_log
from pyengine.storage.check import report as check_report
from pyengine.storage.check.check import check
from pyengine.storage.check.report import FINDINGS_PER_KIND_MAX, KINDS, Grade, Severity
from pyengine.storage.checkpoint import create_abort_file, note_sync_failure, read_checkpoint, write_checkpoint
from pyengine.storage.index_file import read_index_header
from pyengine.storage.mapped_file import used_end
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.rebuild import Selection, rebuild
from pyengine.storage.recovery.recover import recover
from record_bytes import encode_record

# Its own store cannot open it again without a loss (a topic of 180 bytes: docs/compatibility.md).
DEFECTIVE = "widetopic"


def found(report):
    return [(finding.severity.value, finding.file, finding.offset, finding.text) for finding in report.findings]


@pytest.mark.parametrize("name", [name for name in CLEAN if name != DEFECTIVE])
def test_a_store_that_rocketmq_stopped_in_order_has_no_findings(golden, name):
    store = golden(name)
    report = check(MessageStore(store.root, discover(store.root, store.sizes)))
    assert found(report) == []
    assert report.exit_code is ExitCode.OK
    assert report.messages == sum("blank" not in record for record in store.verify["records"])
    assert report.queue_entries == len(store.verify["messages"])


@pytest.mark.parametrize("name", sorted({*HALTED, DEFECTIVE} - {"abnormal-shortfile"}))
def test_a_recovered_store_has_no_findings(golden, name):
    store = golden(name)
    geometry = discover(store.root, store.sizes)
    recover(MessageStore(store.root, geometry))
    assert found(check(MessageStore(store.root, geometry))) == []


@pytest.mark.parametrize(("name", "exit_code"), [
    ("abnormal", ExitCode.OK), ("abnormal-torn", ExitCode.OK), ("abnormal-zeroed", ExitCode.OK),
    ("abnormal-cqahead", ExitCode.OK), ("abnormal-cqbehind", ExitCode.OK), ("abnormal-cqgone", ExitCode.OK),
    ("abnormal-garbled", ExitCode.CORRUPTION), ("abnormal-badlen", ExitCode.CORRUPTION),
    ("abnormal-shortfile", ExitCode.CORRUPTION), (DEFECTIVE, ExitCode.CORRUPTION)])
def test_damage_that_recovery_settles_is_no_error_and_other_damage_is(golden, name, exit_code):
    store = golden(name)
    report = check(MessageStore(store.root, discover(store.root, store.sizes)))
    assert report.exit_code is exit_code, found(report)
    assert report.findings


@pytest.fixture
def stopped(build_store):
    """A store of ours, stopped in order, nothing wrong."""
    store = build_store(60)
    recover(MessageStore(store.root, store.geometry))
    assert found(check(MessageStore(store.root, store.geometry))) == []
    return store


@pytest.mark.parametrize("place", ["commitlog", "consumequeue", "index"])
def test_a_file_in_a_folders_place_is_a_finding_that_says_what_to_do(stopped, place):
    shutil.rmtree(stopped.root / place)
    (stopped.root / place).write_text("a user's")
    report = check(MessageStore(stopped.root, stopped.geometry))
    assert report.exit_code is ExitCode.CORRUPTION
    assert any(one.file == place and "move it away" in one.text for one in report.findings), found(report)


def test_one_message_is_one_message(build_store):
    store = build_store(1)
    recover(MessageStore(store.root, store.geometry))
    assert check(MessageStore(store.root, store.geometry)).sentence == "Nothing is wrong: 1 message, 1 queue entry, 1 key."
    create_abort_file(store.root)
    assert check(MessageStore(store.root, store.geometry)).sentence.startswith("1 info in 1 message up to")


def queue_file(store):
    return store.root / "consumequeue" / "topic-0" / "0" / f"{0:020d}"


def change(path, at, data):
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def index_file(store):
    return sorted((store.root / "index").iterdir())[0]


def flip_body(store):
    store.flip(store.records[20].start + 90)


def flip_offset_field(store):
    store.flip(store.records[20].start + 35)


def lose_a_segment(store):
    store.segment(4096).unlink()


def lose_the_newest_segments(store):
    for path in sorted((store.root / "commitlog").iterdir())[-2:]:
        path.unlink()


def zero_the_last_record(store):
    store.poke(store.records[-1].start, bytes(len(store.records[-1].data)))


def bytes_behind_the_end(store):
    store.poke(store.end + 100, b"stray")


def point_elsewhere(store):
    change(queue_file(store), 40, ENTRY.pack(store.records[0].start, len(store.records[0].data), 0))


def wrong_size(store):
    change(queue_file(store), 48, b"\0\0\0\x63")


def wrong_tags(store):
    change(queue_file(store), 55, b"\x01")


def swap_two_entries(store):
    content = queue_file(store).read_bytes()
    change(queue_file(store), 20, content[40:60] + content[20:40])


def hole_in_a_queue(store):
    change(queue_file(store), 60, bytes(20))


def lose_entries(store):
    change(sorted(queue_file(store).parent.iterdir())[-1], 0, bytes(400))


def lose_a_queue(store):
    shutil.rmtree(queue_file(store).parent)


def entry_beyond_the_log(store):
    last = sorted(queue_file(store).parent.iterdir())[-1]
    used = len(last.read_bytes().rstrip(b"\0"))
    change(last, -(-used // 20) * 20, ENTRY.pack(1 << 20, 200, 0))


def lose_a_queue_file(store):
    sorted(queue_file(store).parent.iterdir())[0].unlink()


def break_a_chain(store):
    change(index_file(store), 40 + 4 * 16 + 20 * 5 + 16, b"\0\0\0\x3f")


def break_a_slot(store):
    change(index_file(store), 40, b"\0\0\0\x63")


def other_key(store):
    """A hash in the same slot that no message has."""
    content = index_file(store).read_bytes()
    at = 40 + 4 * 16 + 20 * 5
    change(index_file(store), at, (int.from_bytes(content[at : at + 4], "big") ^ 0x100).to_bytes(4, "big"))


def bad_index_header(store):
    change(index_file(store), 36, b"\x7f\xff\xff\xff")


def lose_an_index_file(store):
    sorted((store.root / "index").iterdir())[-1].unlink()


def test_an_index_that_was_full_before_the_clock_was_set_back_is_right(builder):
    for number in range(builder.geometry.index_layout.max_index_num):
        builder.put("T", keys=f"k{number}")
    builder.now_ms -= 3_600_000
    builder.put("T")
    store = MessageStore(builder.root, builder.geometry)
    recover(store)
    assert read_checkpoint(store).index_msg_timestamp_ms > builder.now_ms
    assert found(check(store)) == []


def checkpoint_ahead(store):
    write_checkpoint(store.root, Checkpoint(store.records[-1].store_timestamp_ms + 1, 0, 0))


def watermark_ahead(store):
    store.mark(store.end + 1)


def short_segment(store):
    path = store.segment(4096)
    path.write_bytes(path.read_bytes()[:-1])


def foreign_file(store):
    (store.root / "commitlog" / "notes.txt").write_text("x")


def unreadable_watermark(store):
    (store.root / "config" / "watermark").write_text("x")


def unfinished_recovery(store):
    (store.root / "config" / "recovery").write_text("{}")


def sync_not_made_good(store):
    note_sync_failure(store.root, 0, "a segment", "Input/output error")


ERRORS = [flip_body, flip_offset_field, lose_a_segment, lose_the_newest_segments, zero_the_last_record,
          bytes_behind_the_end, point_elsewhere, wrong_size, wrong_tags, swap_two_entries, hole_in_a_queue, lose_entries,
          lose_a_queue, entry_beyond_the_log, lose_a_queue_file, break_a_chain, break_a_slot, other_key, bad_index_header,
          lose_an_index_file, checkpoint_ahead, watermark_ahead, short_segment, foreign_file]
WARNINGS = [unreadable_watermark, unfinished_recovery, sync_not_made_good]
# What is not here is repairable: the log holds everything.
GRADES = dict.fromkeys([flip_body, flip_offset_field, lose_a_segment, lose_the_newest_segments, zero_the_last_record,
                        bytes_behind_the_end, watermark_ahead, short_segment], "loss") | {unreadable_watermark: "notice"}


@pytest.mark.parametrize("damage", ERRORS + WARNINGS)
def test_each_kind_of_damage_is_found_and_nothing_is_written(stopped, damage):
    damage(stopped)
    before = stopped.tree()
    report = check(MessageStore(stopped.root, stopped.geometry))
    worst = Severity.ERROR if damage in ERRORS else Severity.WARNING
    assert report.findings and report.findings[0].severity is worst, found(report)
    assert report.exit_code is (ExitCode.CORRUPTION if worst is Severity.ERROR else ExitCode.OK)
    assert all(finding.text and str(stopped.root) not in finding.text for finding in report.findings if finding.file)
    assert report.grade.label == GRADES.get(damage, "repairable"), found(report)
    assert all(finding.advice for finding in report.findings if finding.grade > Grade.NOTICE)
    assert json.loads(json.dumps(report.to_dict()))["findings"]
    assert stopped.tree() == before


@pytest.mark.parametrize(("damage", "file", "number"), [
    (flip_body, "commitlog/00000000000000004096", 20), (zero_the_last_record, None, -1), (flip_offset_field, None, 20)])
def test_damage_in_the_log_is_named_by_file_and_offset(stopped, damage, file, number):
    damage(stopped)
    record = stopped.records[number]
    findings = check(MessageStore(stopped.root, stopped.geometry)).findings
    named = [(finding.file, finding.offset) for finding in findings if finding.severity is Severity.ERROR]
    segment = str(stopped.segment(record.start).relative_to(stopped.root))
    assert (segment, record.start % stopped.size_bytes) in named or ("commitlog", record.start) in named


def test_records_after_the_damage_are_mentioned(stopped):
    flip_body(stopped)
    (text,) = [finding.text for finding in check(MessageStore(stopped.root, stopped.geometry)).findings if "whole records" in finding.text]
    assert f"from {stopped.records[21].start} on" in text


def test_the_end_of_a_segment_with_many_damaged_records_is_looked_up_once(stopped, monkeypatch):
    """Each look reads the rest of the segment: with a gigabyte and thousands of damaged records that took hours."""
    first = [record for record in stopped.records if record.start < stopped.size_bytes]
    for record in first[::4]:
        stopped.poke(record.start + 88, bytes([record.data[88] ^ 1]))
    looked = []
    monkeypatch.setattr(check_log, "used_end", lambda path, start=0: looked.append((path, start)) or used_end(path, start))
    damaged = [finding for finding in check(MessageStore(stopped.root, stopped.geometry)).findings if finding.kind == "below watermark"]
    assert len(damaged) == len(first[::4]) > 2
    assert len([path for path, _ in looked if path == stopped.segment(0)]) == 1


def test_a_record_after_zeros_is_found_although_it_ends_in_zeros(build_store):
    """Without properties a record ends in two zeros, with a body of zeros in more."""
    store = build_store(3)
    recover(MessageStore(store.root, store.geometry))
    hidden_at = store.end + 300
    hidden = encode_record(topic="T", body=bytes(50), physical_offset=hidden_at, store_timestamp_ms=1)
    assert hidden.endswith(bytes(2)) and hidden_at + len(hidden) < store.size_bytes
    store.poke(hidden_at, hidden)
    report = check(MessageStore(store.root, store.geometry))
    assert [finding.kind for finding in report.findings if "whole records follow" in finding.text] == ["unreachable"]
    assert f"whole records follow from {hidden_at} on" in str(found(report))


def test_the_same_losses_of_a_rocketmq_store_are_warnings(build_store):
    """RocketMQ lives with a lost queue and with keys that its recovery lost."""
    for damage in (lose_a_queue, lose_entries, lose_an_index_file):
        store = build_store(60, ours=False, name=damage.__name__)
        recover(MessageStore(store.root, store.geometry))
        damage(store)
        report = check(MessageStore(store.root, store.geometry))
        assert report.findings and report.exit_code is ExitCode.OK, found(report)


def test_a_crashed_store_says_so_and_its_backlog_is_no_error(build_store):
    store = build_store(60)
    create_abort_file(store.root)
    report = check(MessageStore(store.root, store.geometry))
    assert report.exit_code is ExitCode.OK
    assert any(finding.file == "abort" for finding in report.findings)


def test_of_many_findings_of_one_kind_some_are_shown_and_the_rest_counted(stopped):
    for path in (stopped.root / "consumequeue").rglob("0*0"):
        if path.is_file():
            content = bytearray(path.read_bytes())
            for at in range(0, len(content.rstrip(b"\0")), 20):
                content[at + 11] ^= 1
            path.write_bytes(content)
    report = check(MessageStore(stopped.root, stopped.geometry))
    wrong = [finding for finding in report.findings if "does not point" in finding.text]
    assert len(wrong) == FINDINGS_PER_KIND_MAX
    assert report.left_out > 0


@pytest.mark.parametrize(("count", "messages"), [(1, "1 message"), (2, "2 messages")])
def test_a_finding_counts_in_words_that_fit(builder, count, messages):
    for _ in range(count):
        builder.put("T", queue_id=2)
    shutil.rmtree(builder.root / "consumequeue" / "T")
    texts = [finding.text for finding in check(MessageStore(builder.root, builder.geometry)).findings]
    assert f"the log holds {messages} of this queue, which has no files" in texts


@pytest.mark.parametrize("gone", ["a", "ab"])
def test_lost_light_queues_are_missed(builder, gone):
    for number in range(3):
        builder.put("T", queue_id=2, properties={"INNER_MULTI_DISPATCH": "%LMQ%a,%LMQ%b",
                                                 "INNER_MULTI_QUEUE_OFFSET": f"{number},{number}"})
    recover(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    shutil.rmtree(builder.root / "consumequeue")
    recover(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    assert check(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True)).findings == []
    for name in gone:
        shutil.rmtree(builder.root / "consumequeue" / f"%LMQ%{name}")
    report = check(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    assert [(finding.kind, finding.file, finding.text) for finding in report.findings] == [
        ("missing entries", f"consumequeue/%LMQ%{name}/0",
         "only 0 of the 3 messages with this queue as a further one have an entry in it") for name in gone]


def test_a_queue_that_a_record_names_twice_has_one_entry_of_it(builder):
    """RocketMQ gives both the same number and passes over the next one."""
    for number in range(4):
        builder.put("T", queue_id=2, dispatch=False, properties={
            "INNER_MULTI_DISPATCH": "%LMQ%a,archive,%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": f"{2 * number},{number},{2 * number}"})
    builder.put("T", queue_id=2, dispatch=False,
                properties={"INNER_MULTI_DISPATCH": "T,%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": "4,8"})
    recover(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    assert check(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True)).findings == []
    file = next((builder.root / "consumequeue" / "%LMQ%a" / "0").iterdir())
    entries = file.read_bytes()
    file.write_bytes(entries[:20] + entries[40:] + bytes(20))  # one is lost, the others move up
    report = check(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    assert [(finding.kind, finding.file, finding.text) for finding in report.findings] == [
        ("missing entries", "consumequeue/%LMQ%a/0",
         "only 4 of the 5 messages with this queue as a further one have an entry in it")]


def test_light_queues_are_looked_at_without_another_walk_over_the_log(builder, monkeypatch):
    for number in range(3):
        builder.put("T", dispatch=False,
                    properties={"INNER_MULTI_DISPATCH": "%LMQ%a", "INNER_MULTI_QUEUE_OFFSET": str(number)})
    recover(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True))
    walks, touched = [], check_log.touched_queues
    monkeypatch.setattr(check_log, "touched_queues", lambda *of, **how: walks.append(of) or touched(*of, **how))
    assert check(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_multi_dispatch=True)).findings == []
    with_light_queues = len(walks)
    shutil.rmtree(builder.root / "consumequeue" / "%LMQ%a")
    assert check(MessageStore(builder.root, builder.geometry)).findings == []
    assert 0 < with_light_queues == len(walks) - with_light_queues


def test_a_running_engines_log_is_judged_up_to_its_limit_only(stopped):
    stopped.poke(stopped.end, b"half a record")
    create_abort_file(stopped.root)
    assert found(check(MessageStore(stopped.root, stopped.geometry), limit=stopped.end)) == []
    flip_body(stopped)
    assert check(MessageStore(stopped.root, stopped.geometry), limit=stopped.end).exit_code is ExitCode.CORRUPTION


def test_an_index_file_that_is_filled_beyond_a_running_engines_limit_meanwhile_is_no_finding(stopped):
    """It was not full when the limit was read, and is when files are listed."""
    first = sorted((stopped.root / "index").iterdir())[0]
    limit = stopped.records[5].start
    assert read_index_header(first).begin_physical_offset < limit < read_index_header(first).end_physical_offset
    findings = check(MessageStore(stopped.root, stopped.geometry), limit=limit).findings
    assert "index" not in {finding.file.split("/")[0] for finding in findings}


def test_a_folder_that_is_no_store_is_refused(tmp_path, build_store):
    with pytest.raises(NotAStoreError):
        check(MessageStore(tmp_path / "nowhere", build_store(3).geometry))


# -- acknowledged messages --------------------------------------------------------


def acks(store):
    return [
        {"topic": record.topic, "queue_id": record.queue_id, "queue_offset": record.queue_offset,
         "physical_offset": record.start, "body_sha256": hashlib.sha256(decode_record(record.data).body).hexdigest()}
        for record in store.records
    ]


def test_a_damaged_segment_is_a_loss_also_in_a_folder_whose_name_has_spaces(stopped, tmp_path):
    root = stopped.root.rename(tmp_path / "a store")
    os.truncate(root / "commitlog" / f"{0:020d}", 100)
    (finding,) = check(MessageStore(root, stopped.geometry)).findings
    assert (finding.file, finding.grade, finding.steps) == (f"commitlog/{0:020d}", Grade.LOSS, [check_report.RESTORE])


def write_acks(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_acknowledged_messages_that_are_there_are_counted(stopped, tmp_path):
    report = check(MessageStore(stopped.root, stopped.geometry), acked=write_acks(tmp_path / "acked", acks(stopped)))
    assert (found(report), report.acked, report.acked_missing) == ([], 60, 0)


@pytest.mark.parametrize(("field", "value", "why"), [
    ("topic", "topic-9", "is there"), ("queue_id", 7, "is there"), ("queue_offset", 1000, "is there"),
    ("physical_offset", 1 << 30, "the log holds"), ("physical_offset", 1, "no whole record"),
    ("body_sha256", "00", "another one")])
def test_an_acknowledged_message_that_is_not_there_is_an_error(stopped, tmp_path, field, value, why):
    lines = acks(stopped)
    lines[7] = lines[7] | {field: value}
    report = check(MessageStore(stopped.root, stopped.geometry), acked=write_acks(tmp_path / "acked", lines))
    assert (report.exit_code, report.acked, report.acked_missing) == (ExitCode.CORRUPTION, 60, 1)
    assert why in report.findings[0].text


def test_an_acknowledged_message_without_its_queue_entry_is_an_error(stopped, tmp_path):
    lines = [line for line in acks(stopped) if (line["topic"], line["queue_id"], line["queue_offset"]) == ("topic-0", 0, 1)]
    change(queue_file(stopped), 20, queue_file(stopped).read_bytes()[:20])
    report = check(MessageStore(stopped.root, stopped.geometry), acked=write_acks(tmp_path / "acked", lines))
    assert report.acked_missing == 1


@pytest.mark.parametrize("never", [{"queue_offset": -1}, {"queue_offset": -(1 << 70)}, {"queue_offset": 1 << 70}, {"queue_id": -1},
                                   {"topic": "a\0b"}, {"topic": "\ud800"}, {"topic": "x" * 9999}])
def test_an_acknowledged_message_that_no_queue_can_have_is_an_error(stopped, tmp_path, never):
    line = acks(stopped)[0] | {"physical_offset": None} | never
    report = check(MessageStore(stopped.root, stopped.geometry), acked=write_acks(tmp_path / "acked", [line]))
    assert (report.exit_code, report.acked_missing) == (ExitCode.CORRUPTION, 1)
    assert "its queue has no such entry" in report.findings[0].text


def test_a_torn_last_line_of_the_list_is_left_out_and_said(stopped, tmp_path):
    path = write_acks(tmp_path / "acked", acks(stopped))
    path.write_bytes(path.read_bytes()[:-5])
    report = check(MessageStore(stopped.root, stopped.geometry), acked=path)
    assert (report.exit_code, report.acked, report.acked_missing) == (ExitCode.OK, 59, 0)
    (finding,) = report.findings
    assert (finding.file, finding.grade, finding.steps) == (str(path), Grade.NOTICE, []) and "line, 60, is torn" in finding.text


@pytest.mark.parametrize("line", ["x", "[]", '{"topic": "T"}',
                                  '{"topic": 1, "queue_id": 0, "queue_offset": 0, "physical_offset": 0, "body_sha256": ""}'])
def test_a_list_that_cannot_be_read_names_its_line(stopped, tmp_path, line):
    path = write_acks(tmp_path / "acked", acks(stopped)[:1])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match="line 2"):
        check(MessageStore(stopped.root, stopped.geometry), acked=path)
    with pytest.raises(UsageError, match="nowhere"):
        check(MessageStore(stopped.root, stopped.geometry), acked=tmp_path / "nowhere")


def test_every_kind_of_finding_in_the_sources_has_its_grade():
    sources = "".join(path.read_text() for path in Path(check_report.__file__).parent.glob("*.py"))
    kinds = set(re.findall(r'report\.(?:error|warning|info)\(\s*"([a-z ]+)"', sources))
    kinds |= set(re.findall(r'\.(?:add|_add)\(\s*[\w.]+(?: if .*? else [\w.]+)?, "([a-z ]+)"', sources))
    assert kinds and kinds | {"acked", "acked entry"} == set(KINDS)


def test_the_advice_for_a_lost_queue_names_it_and_helps(stopped):
    lose_a_queue(stopped)
    (finding,) = check(MessageStore(stopped.root, stopped.geometry)).findings
    assert finding.advice.startswith("run `pyengine rebuild STORE --topic ") and finding.grade is Grade.REPAIRABLE
    topic, queue_id = re.search(r"--topic (\S+) --queue-id (\d+)`", finding.advice).groups()
    rebuild(MessageStore(stopped.root, stopped.geometry), Selection(topic=topic, queue_id=int(queue_id), index=False))
    assert check(MessageStore(stopped.root, stopped.geometry)).findings == []


def test_entries_that_have_moved_up_are_found_and_the_advised_command_repairs_them(stopped):
    """The queue has no hole, it only ends one entry sooner: recovery tells that, and where the next message's number is."""
    folder = queue_file(stopped).parent
    file = sorted(folder.iterdir())[-1]
    queue = folder.parent.name, int(folder.name)
    (end,) = [end for key, end in recover(MessageStore(stopped.root, stopped.geometry)).queue_ends.items() if key == queue]
    entries = file.read_bytes()
    assert len(entries.rstrip(b"\0")) > 40
    file.write_bytes(entries[20:] + bytes(20))
    report = recover(MessageStore(stopped.root, stopped.geometry))
    assert not report.changed and report.queue_ends[queue] == end
    assert [note for note in report.notes if f"rebuild STORE --topic {queue[0]} --queue-id {queue[1]}" in note] == list(report.notes)
    report = check(MessageStore(stopped.root, stopped.geometry))
    assert {finding.kind for finding in report.findings} == {"wrong entry", "missing entries"}
    (advice,) = {finding.advice for finding in report.findings}
    topic, queue_id = re.fullmatch(r"run `pyengine rebuild STORE --topic (\S+) --queue-id (\d+)`", advice).groups()
    rebuild(MessageStore(stopped.root, stopped.geometry), Selection(topic=topic, queue_id=int(queue_id), index=False))
    assert check(MessageStore(stopped.root, stopped.geometry)).findings == [] and file.read_bytes() == entries


def test_a_queue_without_the_file_in_which_the_lost_messages_begin_is_checked(golden):
    """The entries of what is gone begin in the file after the missing one."""
    store = golden("roll")
    (store.root / "commitlog" / f"{196608:020d}").unlink()
    (store.root / "consumequeue" / "Roll1" / "0" / f"{400:020d}").unlink()
    kinds = {finding.kind for finding in check(MessageStore(store.root, discover(store.root))).findings}
    assert {"lost messages", "queue gap"} <= kinds
