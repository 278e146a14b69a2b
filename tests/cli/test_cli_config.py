"""`pyengine config explain`."""

from __future__ import annotations

import pytest

from fix_cli import environment, picture, run, spawn
from pyengine.cli.config import parse_properties
from pyengine.engine_config import FIXED_NAMES
from pyengine.storage.config import SETTINGS


def test_explain_shows_every_setting_with_its_origin(monkeypatch):
    monkeypatch.setenv("PYENGINE_PUT_TIMEOUT_MS", "77")
    document = run("config", "explain", "--json", "--set", "flushDiskType=SYNC_FLUSH").document
    by_name = {row["name"]: row for row in document["settings"]}
    assert set(by_name) == set(SETTINGS)
    assert document["mode"] == "sync"
    assert (by_name["flush_disk_type"]["value"], by_name["flush_disk_type"]["from"]) == ("SYNC_FLUSH", "--set")
    assert (by_name["put_timeout_ms"]["value"], by_name["put_timeout_ms"]["from"]) == (77, "environment")
    assert by_name["max_index_num"] | {"meaning": ""} == {
        "name": "max_index_num", "value": 20000000, "default": 20000000, "from": "default", "unit": "",
        "key": "maxIndexNum", "fixed": True, "without_effect_because": None, "meaning": ""}
    assert {name for name, row in by_name.items() if row["fixed"]} == set(FIXED_NAMES)


def test_changed_shows_only_what_differs(tmp_path):
    ran = run("config", "explain", "--changed", "--set", "put_timeout_ms=5s")
    assert "put_timeout_ms" in ran.stdout and "5000" in ran.stdout and "flush_disk_type" not in ran.stdout


def test_no_color_in_a_pipe_and_none_with_no_color():
    ran = spawn("config", "explain", env=environment(NO_COLOR="1"))
    assert ran.code == 0 and "\x1b" not in ran.stdout
    assert len(ran.stdout.splitlines()) >= len(SETTINGS)


def test_a_wrong_setting_is_a_usage_error_with_a_sentence(tmp_path):
    for wrong, sentence in (("flushDiskTyp=x", "did you mean flush_disk_type?"), ("put_timeout_ms=0", "1 to 86,400,000 ms"),
                            ("nonsense", "give key=value")):
        ran = run("config", "explain", "--set", wrong)
        assert ran.code == 2 and ran.stdout == "" and sentence in ran.stderr


def test_a_wrong_file_is_reported_and_left_alone(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "engine.toml").write_text("flush_disk_type = [\n")
    before = picture(tmp_path)
    ran = run("config", "explain", tmp_path)
    assert ran.code == 2 and "no valid TOML" in ran.stderr and picture(tmp_path) == before


BROKER_CONF = r"""
# a broker's file
! and so is this
brokerName = broker-a
brokerIP1=10.2.3.4
listenPort: 10931
messageDelayLevel=1s 5s \
    2h
fileReservedTime 48
deleteWhen=04
flushDiskType=SYNC_FLUSH
brokerRole=ASYNC_MASTER
mapedFileSizeCommitLog=65536
mapedFileSizeConsumeQueue=20000
enableDLegerCommitLog=true
transferMsgByHeap=true
storePathRootDir=/home/rocketmq/store
"""


@pytest.fixture
def broker_conf(tmp_path):
    path = tmp_path / "broker.conf"
    path.write_text(BROKER_CONF)
    return path


def outcomes(document: dict) -> dict[str, str]:
    return {row["key"]: row["outcome"] for row in document["broker_conf"]}


def test_a_brokers_file_is_taken_and_what_differs_is_named(golden, broker_conf):
    store = golden("roll")  # its segments have 16384 bytes
    document = run("config", "explain", store.root, "--broker-conf", broker_conf, "--set", "file_reserved_time_hours=7", "--json").document
    values = {row["name"]: row["value"] for row in document["settings"]}
    assert values["store_host"] == "10.2.3.4:10931" and values["message_delay_level"] == "1s 5s 2h"
    assert (values["flush_disk_type"], values["delete_when"], values["file_reserved_time_hours"]) == ("SYNC_FLUSH", "04", 7)
    assert values["mapped_file_size_commit_log_bytes"] == 16384
    said = outcomes(document)
    assert said["messageDelayLevel"] == "taken as message_delay_level" and said["brokerIP1"] == "taken as store_host"
    assert said["fileReservedTime"] == "not taken: --set says 7"
    assert said["mapedFileSizeCommitLog"] == "differs: the store's files have 16384, which stays"
    assert said["storePathRootDir"] == f"differs: the command names {store.root}"
    assert "raft" in said["enableDLegerCommitLog"] and said["brokerName"] == "no setting of a store here"
    text = run("config", "explain", store.root, "--broker-conf", broker_conf, "--changed").stdout
    assert "in broker.conf" in text and "10.2.3.4:10931" in text


@pytest.mark.parametrize(("text", "says"), [
    ("fileReservedTime=soon", "soon (broker.conf)"), ("flushDiskType=LATER", "ASYNC_FLUSH"), ("brokerIP1=my-host", "is no address"),
])
def test_a_wrong_value_in_a_brokers_file_is_refused(tmp_path, text, says):
    path = tmp_path / "broker.conf"
    path.write_text(text)
    ran = run("config", "explain", "--broker-conf", path)
    assert ran.code == 2 and says in ran.stderr


def test_without_an_address_the_store_host_is_not_guessed(tmp_path):
    path = tmp_path / "broker.conf"
    path.write_text("listenPort=10931\n")
    document = run("config", "explain", "--broker-conf", path, "--json").document
    assert "without brokerIP1" in outcomes(document)["listenPort"]
    assert next(row["value"] for row in document["settings"] if row["name"] == "store_host") == "127.0.0.1:10911"
    assert run("config", "explain", "--broker-conf", tmp_path / "gone").code == 2


def test_an_engine_runs_as_the_brokers_file_says(tmp_path, broker_conf):
    root = tmp_path / "store"
    ran = run("start", root, "--broker-conf", broker_conf, "--set", "max_index_num=4000", "--set", "max_hash_slot_num=1000")
    try:
        assert ran.code == 0 and "enableDLegerCommitLog = true: not taken" in ran.stderr and "brokerName" not in ran.stderr
        put = run("put", root, "--topic", "T", "x", "--json").document
        assert run("message", root, put["msg_id"], "--json").document["store_host"] == "10.2.3.4:10931"
        assert (root / "commitlog" / f"{0:020d}").stat().st_size == 65536
    finally:
        assert run("stop", root).code == 0


def test_a_properties_file_is_read_as_java_reads_it():
    text = "a=1\n b : two words \nc\\ d=e\\=f\n\\u0041=\\t\\\\x\nempty=\nlast\\\n   =joined\\\n  on"
    assert parse_properties(text) == {"a": "1", "b": "two words", "c d": "e=f", "A": "\t\\x", "empty": "", "last": "joinedon"}
