"""Manifests are decoded into puts, or refused with a sentence."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json

import pytest

from fix_golden import GOLDEN, RECIPES
from pyengine.errors import UsageError
from pyengine.formats.record import decode_batch
from replay import decode_put, load_manifest, pattern_body


def row(body: bytes = b"hello", **changes):
    made = {
        "clock": 1700000000000, "topic": "T", "queueId": 2, "flag": 3, "sysFlagIn": 4, "born": 1699999999990,
        "bornHost": "1.2.3.4:5", "storeHost": "[fd00:0:0:0:0:0:0:1]:10911", "reconsume": 6, "prepared": 7,
        "waitStoreMsgOK": False, "delayLevel": 8, "propsIn": "KEYS\x01k", "props": "KEYS\x01k",
        "bodyLen": len(body), "bodySha": hashlib.sha256(body).hexdigest(),
        "bodyB64": base64.b64encode(body).decode(), "status": "MESSAGE_ILLEGAL",
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_golden_manifest_decodes(recipe):
    """Lengths and hashes of all bodies are checked on the way, those of encoded batches too."""
    manifest = load_manifest(GOLDEN / f"{recipe}.json.gz")
    assert len(manifest.puts) == len(manifest.document["puts"])
    assert all(put.expected.status == row["status"] for put, row in zip(manifest.puts, manifest.document["puts"]))


def test_a_plain_manifest_is_read_as_well_as_a_packed_one(tmp_path):
    packed = GOLDEN / "basic.json.gz"
    plain = tmp_path / "basic.json"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert load_manifest(plain).puts == load_manifest(packed).puts


def test_batches_are_told_by_their_missing_answer_text():
    puts = load_manifest(GOLDEN / "batch.json.gz").puts
    assert [put.number for put in puts if put.is_batch][-2:] == [64, 65]
    assert len(decode_batch(puts[0].body)) == puts[0].expected.count
    assert puts[64].body == bytes(4 * 1024 * 1024 + 1)


def test_every_field_goes_to_its_place():
    put = decode_put(9, row())
    assert (put.number, put.is_batch, put.topic, put.queue_id, put.body) == (9, False, "T", 2, b"hello")
    assert (put.properties_text, put.flag, put.sys_flag, put.born_timestamp_ms) == ("KEYS\x01k", 3, 4, 1699999999990)
    assert (put.born_host, put.store_host) == ("1.2.3.4:5", "[fd00:0:0:0:0:0:0:1]:10911")
    assert (put.reconsume_times, put.prepared_transaction_offset) == (6, 7)
    assert (put.wait_store_msg_ok, put.delay_level, put.clock_ms) == (False, 8, 1700000000000)
    assert put.expected.status == "MESSAGE_ILLEGAL" and put.expected.physical_offset is None


def test_an_absent_body_is_not_an_empty_one():
    assert decode_put(0, row(b"", bodyNull=True, bodyB64=None)).has_body is False
    assert decode_put(0, row(b"")).has_body is True


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 4095, 4096, 4097, 20000])
def test_pattern_bodies_follow_their_rule(length):
    assert pattern_body(250, 3, 4, length) == bytes((250 + (i >> 4) * 3) & 0xFF for i in range(length))


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"bodyB64": "aGVsbG8h"}, "the body has 6 bytes, the row says 5"),
        ({"bodySha": "0" * 64}, "another hash"),
        ({"bodyB64": "%%%"}, "Error"),
        ({"topic": None}, "KeyError: 'topic'"),
        ({"append": "PUT_OK"}, "KeyError: 'phy'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, changes, reason):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"config": {}, "puts": [row(), row(**changes)]}))
    with pytest.raises(UsageError, match="put 1 cannot be decoded") as caught:
        load_manifest(path)
    assert reason in str(caught.value)


@pytest.mark.parametrize("data", [
    b"", b"{", b"[]", b'{"puts": 3, "config": {}}', b'{"puts": []}', b"\x1f\x8bnot gzip", gzip.compress(b"{}", mtime=0)[:-8] + bytes(8)])
def test_another_document_than_a_manifest_is_refused(tmp_path, data):
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match="manifest") as refused:
        load_manifest(path)
    assert "None" not in str(refused.value)


def test_a_missing_manifest_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read as a manifest"):
        load_manifest(tmp_path / "none.json")
