"""The tables of config/: one that cannot be used is a finding, whose advice leads to a store without findings."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from pyengine.errors import ExitCode
from pyengine.storage.check.check import check
from pyengine.storage.check.report import Grade
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover

TABLES = {
    "topics.json": '{"dataVersion":{"counter":1},"topicConfigTable":{"T":{"perm":6,"topicName":"T"}}}',
    "consumerOffset.json": '{"offsetTable":{"topic-0@g":{0:1}}}',
    "delayOffset.json": '{"offsetTable":{3:1}}',
    "subscriptionGroup.json": '{"subscriptionGroupTable":{"g":{"groupName":"g"}}}',
    "consumerFilter.json": '{"filterDataByTopic":{}}',
}
GARBAGE = {"bytes": b"\xff\xfe\x00garbage", "empty": b"", "zeros": bytes(64), "cut": b'{"offsetTable":{"T@', "list": b"[1, 2]"}


@pytest.fixture
def stopped(build_store):
    store = build_store(10)
    recover(MessageStore(store.root, store.geometry))
    for name, text in TABLES.items():
        (store.root / "config" / name).write_text(text)
    assert checked(store).findings == []
    return store


def checked(store):
    return check(MessageStore(store.root, store.geometry))


def follow(store, finding) -> None:
    """The command that the advice gives, carried out."""
    (command,) = re.findall(r"`(.*?)`", finding.advice)
    subprocess.run(command.replace("STORE", str(store.root)), shell=True, check=True)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", TABLES)
def test_garbage_in_a_table_is_an_error_and_its_backup_repairs_it(stopped, name, garbage):
    path = stopped.root / "config" / name
    path.with_name(name + ".bak").write_bytes(path.read_bytes())
    path.write_bytes(GARBAGE[garbage])
    report = checked(stopped)
    (finding,) = report.findings
    assert (finding.kind, finding.file, finding.grade) == ("config", f"config/{name}", Grade.REPAIRABLE)
    assert report.exit_code is ExitCode.CORRUPTION and f"{name}.bak" in finding.text
    follow(stopped, finding)
    assert checked(stopped).findings == []


@pytest.mark.parametrize("backup", [None, b"garbage"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_without_a_backup_that_can_be_used_is_a_loss(stopped, name, backup):
    path = stopped.root / "config" / name
    path.write_bytes(b"garbage")
    if backup is not None:
        path.with_name(name + ".bak").write_bytes(backup)
    (finding,) = checked(stopped).findings
    assert (finding.kind, finding.grade) == ("config lost", Grade.LOSS)
    follow(stopped, finding)
    assert checked(stopped).findings == []


def test_a_table_that_is_gone_has_its_backup_told(stopped):
    path = stopped.root / "config" / "topics.json"
    path.rename(path.with_name("topics.json.bak"))
    (finding,) = checked(stopped).findings
    assert finding.kind == "config" and "is not there" in finding.text
    follow(stopped, finding)
    assert checked(stopped).findings == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_table_that_a_running_broker_is_replacing_is_read_again(stopped, monkeypatch, comes_back):
    """It writes `.bak`, deletes the table and renames the new one to it."""
    path = stopped.root / "config" / "topics.json"
    path.with_name("topics.json.bak").write_bytes(path.read_bytes())
    path.rename(path.with_name("topics.json.tmp"))
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if comes_back and len(waits) == 3:
            path.with_name("topics.json.tmp").rename(path)

    monkeypatch.setattr("pyengine.storage.check.check.time.sleep", sleep)
    monkeypatch.setattr("pyengine.storage.check.check.BROKER_REPLACES_S", 0.2)
    report = check(MessageStore(stopped.root, stopped.geometry), limit=stopped.end, beside="a broker")
    assert waits and [one.kind for one in report.findings if one.kind != "broker"] == ([] if comes_back else ["config"])


def test_a_bad_backup_beside_a_good_table_is_worth_a_notice(stopped):
    (stopped.root / "config" / "topics.json.bak").write_bytes(b"garbage")
    report = checked(stopped)
    assert [(one.kind, one.file) for one in report.findings] == [("config backup", "config/topics.json.bak")]
    assert (report.grade, report.exit_code) == (Grade.NOTICE, ExitCode.OK)


def test_a_wrong_shape_in_a_known_table_is_damage(stopped):
    (stopped.root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": 5}))
    (stopped.root / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"T@g": {"0": "x"}}}))
    assert sorted(one.file for one in checked(stopped).findings) == ["config/consumerOffset.json", "config/topics.json"]


def test_config_tables_that_this_engine_writes_have_no_findings(stopped):
    for name in TABLES:
        (stopped.root / "config" / name).unlink()
    ConsumerOffsets(stopped.root).commit("topic-0", "g", {0: 1})
    ConsumerOffsets(stopped.root).commit("topic-0", "g", {0: 2})
    TopicConfigs(stopped.root).create(TopicConfig("T"))
    assert checked(stopped).findings == []


def test_a_table_that_is_no_file_cannot_be_read(stopped):
    path = stopped.root / "config" / "topics.json"
    path.unlink()
    path.mkdir()
    (finding,) = checked(stopped).findings
    assert "cannot be read" in finding.text


def test_a_garbled_engine_run_file_has_no_findings(stopped):
    for content in GARBAGE.values():
        (stopped.root / "config" / "engine-run.json").write_bytes(content)
        assert checked(stopped).findings == []
