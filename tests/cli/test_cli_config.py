"""`pyengine config`: what is explained, and what is changed in a file and in a running engine."""

from __future__ import annotations

import asyncio
import signal
from datetime import timedelta

import pytest

import pyengine
from fix_cli import environment, picture, run, spawn
from fix_golden import usual
from pyengine.client.outgoing import RawMessage
from pyengine.engine_config import FIXED_NAMES
from pyengine.formats.record import BatchMember, decode_message_id
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.storage.config import LOG_PATHS, SETTINGS, config_path, read_file
from pyengine.storage.config_table import TopicConfigs
from waiting import eventually


@pytest.fixture
def stopped(tmp_path):
    """A store on which no engine has run."""
    root = tmp_path / "store"
    (root / "commitlog").mkdir(parents=True)
    (root / "config").mkdir()
    config_path(root).write_text("# mine\nflush_disk_type = 'SYNC_FLUSH'\n")
    return root


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
        "key": "maxIndexNum", "fixed": True, "live": False, "takes_effect": "never", "meaning": ""}
    assert {name for name, row in by_name.items() if row["fixed"]} == set(FIXED_NAMES)


def test_explain_changed_shows_only_settings_that_differ_from_their_defaults(tmp_path):
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


def test_the_store_may_stand_before_the_action(stopped):
    assert run("config", stopped, "explain", "--json").document == run("config", "explain", stopped, "--json").document
    ran = run("config", stopped, "explane")
    assert ran.code == 2 and "No such command" in ran.stderr


def test_explain_takes_names_of_settings_with_and_without_a_store(stopped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run("config", "explain", "ha_peers", "flushDiskType")
    assert (shown.code, shown.stderr) == (0, "")
    assert SETTINGS["ha_peers"].meaning in shown.stdout and "ASYNC_FLUSH or SYNC_FLUSH" in shown.stdout
    document = run("config", "explain", stopped, "ha_peers", "--json").document
    assert document["store"] == str(stopped) and [row["name"] for row in document["settings"]] == ["ha_peers"]
    for words, says in ((["ha_pers"], "did you mean ha_peers?"), ([stopped, "ha_pers"], "did you mean ha_peers?"),
                        (["duplicationEnable"], "no duplication mode"),
                        (["sendMessageThreadPoolNums"], "cannot be set: the gateway serves its clients from one loop")):
        ran = run("config", "explain", *words)
        assert ran.code == 2 and says in ran.stderr and ran.stdout == ""
    (tmp_path / "ha_peers").mkdir()  # a store may have any name
    assert "holds no store" in run("config", "explain", "ha_peers").stderr


def test_explain_refuses_a_file_and_notes_that_a_missing_store_is_none(tmp_path, stopped):
    (tmp_path / "file").write_text("hello")
    for wrong, sentence in ((tmp_path / "file", "is a file; STORE is the store's root directory"), ("", "STORE is empty")):
        ran = run("config", "explain", wrong)
        assert ran.code == 2 and ran.stdout == "" and sentence in ran.stderr
    (tmp_path / "folder").mkdir()
    for name, sentence in (("nowhere", "holds no store"), ("folder", "holds no store")):
        ran = run("config", "explain", tmp_path / name, "--json")
        assert ran.code == 0 and ran.document["settings"]
        assert sentence in ran.stderr and "these are the settings that a new store there gets" in ran.stderr
    assert run("config", "explain", stopped).stderr == ""


def test_a_wrong_file_is_reported_and_left_alone(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "engine.toml").write_text("flush_disk_type = [\n")
    before = picture(tmp_path)
    ran = run("config", "explain", tmp_path)
    assert ran.code == 2 and "not valid TOML" in ran.stderr and picture(tmp_path) == before


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


def test_settings_of_a_brokers_file_are_taken_and_each_outcome_is_listed(golden, broker_conf):
    store = golden("roll")  # its segments have 16384 bytes
    document = run("config", "explain", store.root, "--broker-conf", broker_conf, "--set", "file_reserved_time_hours=7", "--json").document
    values = {row["name"]: row["value"] for row in document["settings"]}
    assert values["store_host"] == "10.2.3.4:10931" and values["message_delay_level"] == "1s 5s 2h"
    assert (values["flush_disk_type"], values["delete_when"], values["file_reserved_time_hours"]) == ("SYNC_FLUSH", "04", 7)
    assert values["mapped_file_size_commit_log_bytes"] == 16384
    said = outcomes(document)
    assert said["messageDelayLevel"] == "taken as message_delay_level"
    assert said["listenPort"] == "taken as store_host; taken as gateway_broker_port"
    assert said["brokerIP1"] == "taken as store_host; taken as gateway_advertised_host", "a broker's routes and messages have one address"
    assert (values["gateway_advertised_host"], values["gateway_broker_port"]) == ("10.2.3.4", 10931)
    assert said["fileReservedTime"] == "not taken: --set says 7"
    assert said["mapedFileSizeCommitLog"] == "differs: the store's files have 16384, which stays"
    assert said["storePathRootDir"] == f"differs: the command names {store.root}"
    assert "raft" in said["enableDLegerCommitLog"] and said["brokerName"] == "taken as broker_name"
    origins = {row["name"]: row["from"] for row in document["settings"]}
    assert (origins["broker_name"], origins["file_reserved_time_hours"], origins["ha_listen_port"]) == ("broker.conf", "--set", "default")
    text = run("config", "explain", store.root, "--broker-conf", broker_conf, "--changed").stdout
    assert "in broker.conf" in text and "10.2.3.4:10931" in text


@pytest.mark.parametrize("key", ["mappedFileSizeConsumeQueue", "mapedFileSizeConsumeQueue"])
def test_a_size_in_a_brokers_file_that_its_files_do_not_have_is_left_out(tmp_path, key):
    conf, root = tmp_path / "broker.conf", tmp_path / "store"
    conf.write_text(f"{key}=300000\n")
    sizes = {"mapped_file_size_commit_log_bytes": 1 << 20, "max_message_size_bytes": 256 << 10}
    with pyengine.Engine(root, message_index_enable=False, **sizes) as engine, engine.connect() as producer:
        producer.put("T", b"x")
    config_path(root).unlink()  # as of a broker, whose queue files have the usual size
    document = run("config", "explain", root, "--broker-conf", conf, "--json").document
    assert outcomes(document)[key] == "differs: the store's files have 6000000, which stays"
    document = run("config", "explain", "--broker-conf", conf, "--json").document
    is_old = key.startswith("maped")
    assert outcomes(document)[key] == "taken as mapped_file_size_consume_queue_bytes" + (
        "; RocketMQ 4.9 ignores this key: it reads mappedFileSizeConsumeQueue" if is_old else "")


@pytest.mark.parametrize(("text", "says"), [
    ("fileReservedTime=soon", "soon (broker.conf)"), ("flushDiskType=LATER", "ASYNC_FLUSH"), ("brokerIP1=my-host", "is not an address"),
])
def test_a_wrong_value_in_a_brokers_file_is_refused(tmp_path, text, says):
    path = tmp_path / "broker.conf"
    path.write_text(text)
    ran = run("config", "explain", "--broker-conf", path)
    assert ran.code == 2 and says in ran.stderr


def test_a_log_in_the_brokers_store_is_taken_as_one_in_the_store_that_is_named(tmp_path):
    conf, theirs, mine = tmp_path / "broker.conf", tmp_path / "theirs", tmp_path / "mine"
    conf.write_text(f"storePathRootDir={theirs}\nstorePathCommitLog={theirs}/log, /disk/log\n")
    document = run("config", "explain", mine, "--broker-conf", conf, "--json").document
    assert next(row["value"] for row in document["settings"] if row["name"] == "store_path_commit_log") == "log,/disk/log"
    assert outcomes(document)["storePathCommitLog"] == f"taken as store_path_commit_log; in {mine}: log,/disk/log"
    document = run("config", "explain", theirs, "--broker-conf", conf, "--json").document
    assert outcomes(document)["storePathCommitLog"] == "taken as store_path_commit_log"


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


def explained(root) -> dict:
    return {row["name"]: row for row in run("config", "explain", root, "--json").document["settings"]}


def test_each_setting_says_when_a_change_takes_effect():
    by_name = {row["name"]: row["takes_effect"] for row in run("config", "explain", "--json").document["settings"]}
    assert {by_name[name] for name in FIXED_NAMES} == {"never"}
    assert by_name["flush_disk_type"] == "at a restart" and by_name["log_retention_bytes"] == "at once"
    assert by_name["put_timeout_ms"] == "for producers that connect afterwards"
    assert by_name["access_message_in_memory_max_ratio"] == "for readers that are opened afterwards"
    cleaning = [row for row in SETTINGS.values() if row.group == "cleaning"]
    assert len(cleaning) == 14 and all(row.live == "at once" for row in cleaning)


def test_config_set_on_a_stopped_store_is_kept_for_its_next_start(stopped):
    ran = run("config", "set", stopped, "fileReservedTime=24", "log_retention_bytes=200G", "--json")
    assert ran.code == 0 and not ran.document["running"], ran
    assert {row["name"]: (row["value"], row["live"], row["takes_effect"]) for row in ran.document["settings"]} == {
        "file_reserved_time_hours": ("24", False, "at the next start"), "log_retention_bytes": (str(200 << 30), False, "at the next start")}
    assert config_path(stopped).read_text() == (
        "# mine\nflush_disk_type = 'SYNC_FLUSH'\nfile_reserved_time_hours = 24\nlog_retention_bytes = 214748364800\n")
    assert explained(stopped)["file_reserved_time_hours"]["from"] == "engine.toml"


def test_the_option_of_all_commands_means_the_same_and_nothing_is_refused(stopped):
    assert run("config", "set", stopped, "--set", "put_timeout_ms=5s").code == 0
    assert read_file(config_path(stopped))["put_timeout_ms"] == 5000
    ran = run("config", "set", stopped)
    assert ran.code == 2 and "nothing to set" in ran.stderr


@pytest.mark.parametrize(("pair", "says"), [
    ("file_reserved_tim=24", "did you mean file_reserved_time_hours?"), ("file_reserved_time_hours=soon", "is not allowed"),
    ("delete_when=25", "not an hour"), ("max_index_num=400", "fixed at creation"), ("debugLockEnable=true", "has no effect here"),
    ("nonsense", "give key=value"), ("dispatch_at=replicated", "set ha_listen_port")])
def test_one_that_is_wrong_changes_nothing(stopped, pair, says):
    before = config_path(stopped).read_text()
    ran = run("config", "set", stopped, "put_timeout_ms=5s", pair)
    assert ran.code == 2 and says in ran.stderr, ran
    assert config_path(stopped).read_text() == before


def test_config_set_reaches_the_workers_of_a_running_engine(make_engine):
    """Segments go by size at once, and bytes that waited for a long interval are flushed; each by another worker."""
    engine = make_engine(flush_interval_commit_log_ms=86_400_000, clean_resource_interval_ms=86_400_000)
    engine.start()
    with pyengine.connect(engine.root) as producer:
        for number in range(60):
            assert producer.put("T", b"%05d" % number * 20_000).ok  # six segments
    engine_status = run("status", engine.root, "--json").document
    assert engine_status["positions"]["flushed"] < engine_status["positions"]["wrote"] and engine_status["positions"]["min"] == 0
    ran = run("config", "set", engine.root, "flush_interval_commit_log_ms=20ms", "flushIntervalConsumeQueue=20ms",
              f"log_retention_bytes={2 << 20}", "max_message_size_bytes=1M", "--json")
    assert ran.code == 0 and ran.document["running"], ran
    by_name = {row["name"]: row for row in ran.document["settings"]}
    assert by_name["log_retention_bytes"]["live"] and by_name["log_retention_bytes"]["takes_effect"] == "at once"
    assert by_name["flush_interval_commit_log_ms"]["note"] == "the next start with the same command line overrides the file"
    assert by_name["max_message_size_bytes"]["takes_effect"] == "at the next start: pyengine stop, then start"
    eventually(lambda: engine.positions()["flushed"] == engine.positions()["wrote"], "the flusher flushes")

    def kept() -> int:
        positions = run("status", engine.root, "--json").document["positions"]
        return positions["wrote"] - positions["min"]

    # The cleaner's round came before the queues were durable, perhaps; the next one is a day away unless that is set.
    assert run("config", "set", engine.root, "clean_resource_interval_ms=20ms").code == 0
    eventually(lambda: kept() <= 2 << 20, "the cleaner deletes")
    now = explained(engine.root)
    assert (now["log_retention_bytes"]["value"], now["log_retention_bytes"]["from"]) == (2 << 20, "live")
    assert (now["max_message_size_bytes"]["value"], now["mapped_file_size_commit_log_bytes"]["from"]) == (4 << 20, "--set")
    document = run("status", engine.root, "--json").document
    assert document["verdict"] == "warning" and "max_message_size_bytes = 1048576 in the file, 4194304 runs" in document["summary"]
    assert "log_retention_bytes" not in document["summary"]
    assert read_file(config_path(engine.root))["log_retention_bytes"] == 2 << 20
    engine.stop()
    assert run("check", engine.root).code == 0


def test_producers_that_connect_afterwards_have_the_new_limits(make_engine):
    engine = make_engine(put_timeout_ms=9000)
    engine.start()
    assert run("config", "set", engine.root, "put_timeout_ms=7000", "sessionRingBytes=64K").code == 0
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"x").ok
        session, = run("status", engine.root, "--json").document["session_list"]
        assert session["ring_bytes"] == 65_536
    with engine.memory() as memory:
        assert memory.identity.put_timeout_ms == 7000


def test_producers_put_as_the_engine_runs_until_its_next_start(make_engine):
    engine = make_engine()
    engine.start()
    assert run("config", "set", engine.root, "default_topic_queue_nums=4", "message_delay_level=1h 2h").code == 0
    with pyengine.connect(engine.root) as producer:
        assert {producer.put("T", b"x").queue_id for _ in range(8)} == {0}
        assert producer.put("T", b"x", delay_level=18).queue_id == 17
        assert producer.put("T", b"x", deliver_at=timedelta(hours=1)).queue_id == 16
        engine.stop()
        engine.start()
        assert producer.put("T", b"x", delay_level=18).queue_id == 1, "its last level has the longest delay"
        assert producer.put("T", b"x", deliver_at=timedelta(hours=1)).queue_id == 0
    with pyengine.connect(engine.root) as producer, pyengine.connect(engine.root, default_topic_queue_nums=2) as other:
        assert {producer.put("next", b"x").queue_id for _ in range(8)} == {0, 1, 2, 3}
        assert {other.put("own", b"x").queue_id for _ in range(8)} == {0, 1}


async def in_a_loop(producer, topic, body=b"x", **options):
    return await producer.put_async(topic, body, **options)


FIRST_PUTS = {
    "put": lambda producer, topic, **options: producer.put(topic, b"x", **options),
    "put_many": lambda producer, topic, **options: producer.put_many(topic, (b"x" for _ in range(2)), **options),
    "put_batch": lambda producer, topic, **options: producer.put_batch(topic, [b"x"], **options),
    "put_async": lambda producer, topic, **options: asyncio.run(in_a_loop(producer, topic, **options)),
}


@pytest.mark.parametrize("way", usual(FIRST_PUTS, ["put"], pytest.mark.ci))
def test_a_producer_follows_the_next_run_from_its_first_put_on(make_engine, way):
    engine, put = make_engine(), FIRST_PUTS[way]
    engine.start(default_topic_queue_nums=4)
    with pyengine.connect(engine.root) as producer:
        assert {producer.put("T", b"x").queue_id for _ in range(8)} == {0, 1, 2, 3}
        engine.stop()
        TopicConfigs(engine.root).update("T", read_queue_nums=1, write_queue_nums=1)
        assert run("config", "set", engine.root, "message_delay_level=1h 2h").code == 0
        engine.start()
        assert put(producer, "T", delay_level=18).queue_id == 1
        assert {put(producer, "T").queue_id for _ in range(8)} == {0}
        assert {producer.put("T", b"x").queue_id for _ in range(8)} == {0}
        engine.stop()
        TopicConfigs(engine.root).delete("T")
        assert run("config", "set", engine.root, "default_topic_queue_nums=2").code == 0
        engine.start()
        assert {put(producer, "T").queue_id for _ in range(8)} == {0, 1}


SIZES = {
    "put": lambda producer, body: producer.put("T", body),
    "put_many": lambda producer, body: producer.put_many("T", (each for each in [b"x", body])),
    "put_batch": lambda producer, body: producer.put_batch("T", (each for each in [b"x", body])),
    "put_raw": lambda producer, body: producer.put_raw(RawMessage("T", body, queue_id=0)),
    "put_batch_raw": lambda producer, body: producer.put_batch_raw(RawMessage("T", b"", queue_id=0), [BatchMember(body)]),
    "put_async": lambda producer, body: asyncio.run(in_a_loop(producer, "T", body)),
}


@pytest.mark.parametrize("way", usual(SIZES, ["put_batch_raw"], pytest.mark.ci))
def test_a_producer_obeys_the_sizes_of_the_next_run_from_its_first_put_on(make_engine, way):
    engine, put = make_engine(), SIZES[way]
    engine.start(max_message_size_bytes=10_000)
    with pyengine.connect(engine.root) as producer:
        with pytest.raises(pyengine.PutRefusedError, match="max_message_size_bytes"):
            put(producer, bytes(15_000))
        engine.stop()
        engine.start(max_message_size_bytes=20_000)
        assert put(producer, bytes(15_000)).ok
        engine.stop()
        engine.start(max_message_size_bytes=10_000)
        with pytest.raises(pyengine.PutRefusedError, match="max_message_size_bytes"):
            put(producer, bytes(15_000))


def test_a_producer_puts_with_the_host_of_the_next_run(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert decode_message_id(producer.put("T", b"x").msg_id)[0] == "127.0.0.1:10911"
        engine.stop()
        assert run("config", "set", engine.root, "store_host=[::1]:4567").code == 0
        engine.start()
        puts = [producer.put("T", b"x"), producer.put("T", b"y"), producer.put("T", b"z", keys="k")]
    assert {decode_message_id(put.msg_id)[0] for put in puts} == {"[::1]:4567"}
    with pyengine.open_store(engine.root) as store:
        for put in puts:
            eventually(lambda: store.message(put.msg_id) is not None, "it is readable")
            assert store.message(put.msg_id).store_host == "[::1]:4567"


def test_transactions_follow_the_next_run(make_engine):
    engine = make_engine(default_topic_queue_nums=4, transaction_check_interval_ms=86_400_000, transaction_timeout_ms=0)
    engine.start()
    asked = []
    with pyengine.connect(engine.root) as producer:
        with producer.transaction(checker=asked.append) as transaction:
            transaction.put("T", b"x")
        engine.stop()
        asked.clear()  # a round beside the first transaction asks about it, since its timeout is 0
        TopicConfigs(engine.root).update("T", read_queue_nums=1, write_queue_nums=1)
        assert run("config", "set", engine.root, "transaction_timeout_ms=86400000").code == 0
        engine.start()
        for _ in range(4):
            with producer.transaction() as transaction:
                transaction.put("T", b"x")
            assert [each.queue_id for each in transaction.results] == [0]
        begun = producer.transaction().__enter__()
        begun.put("T", b"undecided")
        assert producer.check_transactions() == 0 and asked == [], "it is too new for the settings of this run"


def test_an_engine_that_cannot_be_told_has_it_from_its_next_supervisor(make_engine):
    engine = make_engine()
    engine.start()
    engine.kill("supervisor")
    eventually(lambda: native.SUPERVISOR not in living_kinds(engine.root), "it is dead")
    ran = run("config", "set", engine.root, "file_reserved_time_hours=5")
    assert ran.code == 1 and "the engine could not be told" in ran.stderr and "gives it now" in ran.stderr
    assert explained(engine.root)["file_reserved_time_hours"]["value"] == 72
    assert engine.start()["adopted"]
    assert explained(engine.root)["file_reserved_time_hours"]["value"] == 5


@pytest.mark.parametrize("name", LOG_PATHS)
def test_where_the_log_is_cannot_be_set_while_an_engine_runs(make_engine, name):
    engine = make_engine()
    engine.start()
    before = config_path(engine.root).read_text()
    ran = run("config", "set", engine.root, f"{name}=commitlog,more")
    assert ran.code == 2 and f"{name} can be set only while no engine runs: `pyengine stop {engine.root}`" in ran.stderr, ran
    assert config_path(engine.root).read_text() == before and not (engine.root / "more").exists()


def test_a_worker_that_has_not_taken_it_is_named(make_engine, monkeypatch):
    engine = make_engine()
    engine.start()
    monkeypatch.setattr("pyengine.cli.config.TAKEN_TIMEOUT_S", 0.5)
    engine.kill("cleaner", signal.SIGSTOP)
    ran = run("config", "set", engine.root, "file_reserved_time_hours=5")
    assert ran.code == 1 and "not used yet by: cleaner" in ran.stderr
    engine.kill("cleaner", signal.SIGCONT)
    monkeypatch.undo()
    assert run("config", "set", engine.root, "file_reserved_time_hours=6").code == 0
