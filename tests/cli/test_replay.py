"""A replay sends every input of a put and compares every field of the answer."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fix_golden import GOLDEN
from pyengine.errors import UsageError
from pyengine.formats.record import BatchMember, encode_batch
from pyengine.results import PutResult, PutStatus
from pyengine.storage.config import load_config
from replay import compare, load_manifest, replay_puts, send, settings_of

TOO_LONG = 64  # of the recipe `batch`: a body of zeros, longer than any message may be


class RecordingProducer:
    """Answers every put as the manifest says, and keeps what it was given."""

    def __init__(self, manifest):
        self.answers = iter([answer_of(put) for put in manifest.puts])
        self.calls = []

    def put_raw(self, message):
        self.calls.append(("put_raw", message, message.body))
        return next(self.answers)

    def put_batch_raw(self, message, members):
        self.calls.append(("put_batch_raw", message, members))
        return next(self.answers)


def answer_of(put):
    expected = put.expected
    if expected.msg_id is None:
        return PutResult(PutStatus[expected.status], topic=put.topic)
    return PutResult(
        PutStatus[expected.status], expected.msg_id, expected.queue_offset, expected.physical_offset, expected.size_bytes,
        expected.store_timestamp_ms, put.topic, put.queue_id, expected.count,
    )


def test_every_input_reaches_the_producer():
    manifest = load_manifest(GOLDEN / "batch.json.gz")
    producer = RecordingProducer(manifest)
    report = replay_puts(manifest, producer)
    assert report.differences == []
    assert (report.puts, report.stored, report.refused) == (66, 64, 2)
    records = [record for record in manifest.document["records"] if not record.get("blank")]
    assert (report.records, report.end_offset) == (len(records), manifest.document["facts"]["maxPhy"])
    kinds = [call[0] for call in producer.calls]
    assert kinds == ["put_batch_raw" if put.is_batch else "put_raw" for put in manifest.puts]
    for put, (kind, message, body) in zip(manifest.puts, producer.calls):
        sent = encode_batch(body) if kind == "put_batch_raw" and put.number != TOO_LONG else body
        assert sent == (put.body if put.number != TOO_LONG else [BatchMember(put.body)])
        inputs = {field.name: getattr(message, field.name) for field in fields(message) if field.name != "body"}
        assert inputs == {name: getattr(put, name) for name in inputs}


@pytest.mark.parametrize(
    "field, value", [("physical_offset", 1), ("queue_offset", 5), ("msg_id", "00"), ("size_bytes", 3),
                     ("store_timestamp_ms", 9), ("count", 2)]
)
def test_one_wrong_field_is_named(field, value):
    put = load_manifest(GOLDEN / "basic.json.gz").puts[3]
    answer = answer_of(put)
    assert compare(put, answer) == []
    other = replace(put, expected=replace(put.expected, **{field: value}))
    assert compare(other, answer) == [f"put 3: {field} is {getattr(answer, field)}, RocketMQ's is {value}"]


def test_a_wrong_status_is_named_with_its_reason():
    put = load_manifest(GOLDEN / "basic.json.gz").puts[0]
    refused = PutResult(PutStatus.MESSAGE_ILLEGAL, reason="too long")
    assert compare(put, refused) == ["put 0: status MESSAGE_ILLEGAL (too long), RocketMQ answered PUT_OK"]


def test_an_absent_body_is_sent_as_an_empty_one():
    manifest = load_manifest(GOLDEN / "emptybody.json.gz")
    producer = RecordingProducer(manifest)
    assert not manifest.puts[0].has_body
    send(producer, manifest.puts[0])
    assert producer.calls[0][2] == b""


@pytest.mark.parametrize("mode, given", [("async", "async"), ("pool", "pool"), ("sync", "sync"), (None, "pool")])
def test_the_mode_overrides_the_manifest(mode, given):
    config = load_config(None, settings_of(load_manifest(GOLDEN / "pool.json.gz"), mode), {})
    assert config.mode == given
    assert config.replay_clock and config.mapped_file_size_commit_log_bytes == 1 << 20


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"puts": [' + b"[" * 200_000, b"\x1f\x8b\x08" + b"x" * 50],
                         ids=["deep", "deeper", "no gzip"])
def test_a_manifest_of_nonsense_is_a_sentence(tmp_path, content):
    (tmp_path / "m.json").write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as a manifest"):
        load_manifest(tmp_path / "m.json")
