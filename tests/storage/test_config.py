"""Settings: names, units, ranges, sources and their precedence, sizes fixed at creation."""

from __future__ import annotations

import dataclasses
import inspect
import re
import threading
from pathlib import Path

import pytest

import pyengine
from fix_golden import RECIPES
from pyengine.engine_config import EngineConfig
from pyengine.errors import ConfigError, ExitCode
from pyengine.formats.delayed_message import parse_delay_levels
from pyengine.settings import split_address
from pyengine.storage import config as config_module
from pyengine.storage import durable_file
from pyengine.storage.config import (
    FIXED_NAMES,
    SETTINGS,
    check_keywords,
    checked_set,
    config_path,
    existing_store,
    fold,
    load_config,
    parse_set,
    read_file,
    record_sizes,
    set_durably,
    settings_to_set,
    write_toml,
)

ALL_SIZES = {
    "mapped_file_size_commit_log_bytes": 262144,
    "mapped_file_size_consume_queue_bytes": 1000,
    "mapped_file_size_consume_queue_ext_bytes": 50331648,
    "max_hash_slot_num": 64,
    "max_index_num": 2000,
}


def write_settings(root, text: str) -> None:
    """A store whose engine.toml fixes every size and says `text` besides."""
    config_path(root).parent.mkdir(parents=True)
    config_path(root).write_text(write_toml(ALL_SIZES) + text)


def test_a_setting_that_nothing_reads_says_so():
    """Otherwise its documentation promises what does not happen."""
    package = Path(pyengine.__file__).parent
    sources = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "engine_config.py")
    own = inspect.getsource(EngineConfig)  # its properties read some
    unread = {name for name in SETTINGS if not re.search(rf"\b{name}\b", sources) and f"self.{name}" not in own}
    assert unread == set()


@pytest.mark.parametrize("name", ["flushCommitLogLeastPages", "flush_commit_log_thorough_interval_ms", "put_msg_index_hight_water",
                                  "schedule_async_deliver_max_resend_num_to_blocked", "flush_least_pages_when_warm_mapped_file"])
def test_a_setting_of_rocketmqs_that_changes_nothing_here_is_taken_from_every_source(tmp_path, name):
    write_settings(tmp_path, f"{name} = 8\n")
    found = load_config(tmp_path, {name: "8"}, {f"PYENGINE_{name.upper()}": "8"})
    assert name not in found.origins and checked_set([f"{name}=8"]) == {}
    check_keywords(load_config, {name: 8})
    with pytest.raises(ConfigError, match=r"\w+ \(config set\) has no effect here: \w+"):
        settings_to_set([f"{name}=8"])


def test_defaults_are_rocketmqs_where_rocketmq_has_the_setting():
    config = EngineConfig()
    assert config.mapped_file_size_commit_log_bytes == 1073741824
    assert config.mapped_file_size_consume_queue_bytes == 6000000
    assert (config.max_hash_slot_num, config.max_index_num) == (5000000, 20000000)
    assert config.flush_disk_type == "ASYNC_FLUSH"
    assert config.flush_interval_commit_log_ms == 500
    assert config.sync_flush_timeout_ms == 5000
    assert config.max_message_size_bytes == 4194304
    assert config.transient_store_pool_size == 5
    assert config.mode == "async"
    assert len(config.delay_levels_ms) == 18 and config.delay_levels_ms[-1] == 7200000


@pytest.mark.parametrize("row", SETTINGS.values(), ids=lambda row: row.name)
def test_every_setting_is_documented_and_reads_back_its_own_text(row):
    assert row.meaning.endswith(".") and row.group
    assert row.read(row.default, "here") == row.default
    assert row.read(row.show(row.default), "here") == row.default
    assert row.name.endswith({"bytes": "_bytes", "ms": "_ms", "h": "_hours"}.get(row.unit, ""))


@pytest.mark.parametrize(
    "row", [row for row in SETTINGS.values() if type(row.default) is int], ids=lambda row: row.name)
def test_every_number_has_a_range_and_the_error_names_it(row):
    assert row.low is not None and row.high is not None
    words = list(row.words.values())
    for beyond in (min([row.low, *words]) - 1, row.high + 1):
        with pytest.raises(ConfigError) as caught:
            row.read(beyond, "here")
        assert f"{row.low:,} to {row.high:,}" in str(caught.value)
    assert row.read(row.low, "here") >= row.low


def test_no_two_settings_share_a_spelling():
    owners = {}
    for row in SETTINGS.values():
        for spelling in {fold(row.name), fold(row.key or row.name)}:
            assert owners.setdefault(spelling, row.name) == row.name


@pytest.mark.parametrize(("key", "value", "name", "meant"), [
    ("flushDiskType", "sync_flush", "flush_disk_type", "SYNC_FLUSH"),
    ("flush_disk_type", "SYNC_FLUSH", "flush_disk_type", "SYNC_FLUSH"),
    ("mapedFileSizeCommitLog", "16384", "mapped_file_size_commit_log_bytes", 16384),
    ("mappedFileSizeCommitLog", "16384", "mapped_file_size_commit_log_bytes", 16384),
    ("mapped_file_size_commit_log", "16384", "mapped_file_size_commit_log_bytes", 16384),
    ("mapedFileSizeConsumeQueue", "401", "mapped_file_size_consume_queue_bytes", 420),
    ("destroyMapedFileIntervalForcibly", "7", "destroy_mapped_file_interval_forcibly_ms", 7),
    ("destroyMappedFileIntervalForcibly", "7", "destroy_mapped_file_interval_forcibly_ms", 7),
    ("osPageCacheBusyTimeOutMills", "9", "os_page_cache_busy_timeout_ms", 9),
    ("checkCRCOnRecover", "off", "check_crc_on_recover", False),
])
def test_rocketmqs_own_keys_are_accepted(tmp_path, key, value, name, meant):
    config = load_config(tmp_path / "new", {key: value}, {})
    assert getattr(config, name) == meant
    assert config.origins[name] == "--set"


def test_precedence_is_file_then_environment_then_set(tmp_path):
    write_settings(tmp_path, "flushIntervalCommitLog = 1\nsyncFlushTimeout = 2\nput_timeout_ms = 3\n")
    config = load_config(
        tmp_path,
        {"put_timeout_ms": "30"},
        {"PYENGINE_SYNC_FLUSH_TIMEOUT_MS": "20", "PYENGINE_PUT_TIMEOUT_MS": "21", "UNRELATED": "x"},
    )
    assert (config.flush_interval_commit_log_ms, config.sync_flush_timeout_ms, config.put_timeout_ms) == (1, 20, 30)
    where = {name: (value, default, origin) for name, value, default, origin in config.explain()}
    assert where["flush_interval_commit_log_ms"] == ("1", "500", "engine.toml")
    assert where["sync_flush_timeout_ms"] == ("20", "5000", "environment")
    assert where["put_timeout_ms"] == ("30", "10000", "--set")
    assert where["slave_timeout_ms"] == ("3000", "3000", "default")
    sizes = {name: str(getattr(config, name)) for name in FIXED_NAMES}
    assert config.overrides() == {"sync_flush_timeout_ms": "20", "put_timeout_ms": "30"} | sizes


@pytest.mark.parametrize(("key", "value", "sentence"), [
    ("flushDiskTyp", "SYNC_FLUSH", "did you mean flush_disk_type?"),
    ("mapedFileSizeComitLog", "4096", "did you mean mapped_file_size_commit_log_bytes?"),
    ("zzzzqqqq", "1", "config explain"),
    ("enableDLegerCommitLog", "true", "raft"),
    ("flush_disk_type", "SOMETIMES", "give ASYNC_FLUSH"),
    ("max_message_size_bytes", "0", "1 to 2,147,418,111 bytes"),
    ("max_message_size_bytes", "many", "1 to 2,147,418,111 bytes"),
    ("max_message_size_bytes", "1.5MiB", "1 to 2,147,418,111 bytes"),
    ("max_message_size_bytes", "1mb", "1 to 2,147,418,111 bytes"),
    ("max_message_size_bytes", "5s", "1 to 2,147,418,111 bytes"),
    ("put_timeout_ms", "-1", "1 to 86,400,000 ms"),
    ("put_timeout_ms", True, "1 to 86,400,000 ms"),
    ("put_timeout_ms", 1.5, "1 to 86,400,000 ms"),
    ("transient_store_pool_enable", "perhaps", "true or false"),
    ("session_ring_bytes", "100000", "power of two"),
    ("store_host", "127.0.0.1", "127.0.0.1:10911"),
    ("store_host", "::1:10911", "[IPv6]:port"),
    ("store_host", "[127.0.0.1]:1", "IPv4:port"),
    ("message_delay_level", "1s 5y", "'5y' is not a delay"),
    ("message_delay_level", "", "at least one"),
    ("message_delay_level", "1s 1000001d", "'1000001d' is not a delay"),
    ("message_delay_level", "1s " + "9" * 5000 + "s", "1,000,000 days at most"),
    ("put_timeout_ms", "9" * 5000, "1 to 86,400,000 ms"),
    ("spin", "-2", "auto, 0 to 100,000 us"),
])
def test_a_wrong_setting_is_refused_with_a_sentence_that_says_what_is_allowed(tmp_path, key, value, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "new", {key: value}, {})
    assert sentence in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE


def test_index_files_beyond_two_gibibytes_are_refused():
    with pytest.raises(ConfigError, match="40 \\+ 4 x slots"):
        EngineConfig(max_hash_slot_num=200_000_000, max_index_num=100_000_000)


@pytest.mark.parametrize(("text", "meant"), [
    ("65536", 65536), ("64k", 65536), ("64KiB", 65536), ("1 MiB", 1 << 20), ("1m", 1 << 20), ("1_000", 1000),
])
def test_sizes_read_with_binary_units(tmp_path, text, meant):
    assert load_config(tmp_path / "new", {"max_message_size_bytes": text}, {}).max_message_size_bytes == meant


@pytest.mark.parametrize(("text", "meant"), [("750", 750), ("750ms", 750), ("2s", 2000), ("1m", 60000)])
def test_times_read_with_units(tmp_path, text, meant):
    assert load_config(tmp_path / "new", {"put_timeout_ms": text}, {}).put_timeout_ms == meant


@pytest.mark.parametrize(("text", "meant"), [("48", 48), ("48h", 48), ("90d", 2160), ("60m", 1), ("7200 s", 2), ("0ms", 0)])
def test_hours_read_with_units(tmp_path, text, meant):
    assert load_config(tmp_path / "new", {"file_reserved_time_hours": text}, {}).file_reserved_time_hours == meant


@pytest.mark.parametrize("text", ["90m", "1s", "2w", "-1d", "100000000d"])
def test_a_time_that_is_no_whole_number_of_hours_is_refused_for_hours(tmp_path, text):
    with pytest.raises(ConfigError, match="give 0 to 2,147,483,647 h, as 90d: whole hours"):
        load_config(tmp_path / "new", {"file_reserved_time_hours": text}, {})


def test_queue_files_hold_whole_entries():
    assert EngineConfig(mapped_file_size_consume_queue_bytes=1001).mapped_file_size_consume_queue_bytes == 1020


def test_spin_knows_the_word_auto():
    row = SETTINGS["spin"]
    assert (row.read("auto", "x"), row.read("0", "x"), row.show(-1)) == (-1, 0, "auto")


@pytest.mark.parametrize(("settings", "mode"), [
    ({}, "async"),
    ({"transient_store_pool_enable": True}, "pool"),
    ({"transient_store_pool_enable": True, "broker_role": "SLAVE"}, "async"),
    ({"flush_disk_type": "SYNC_FLUSH"}, "sync"),
    ({"flush_disk_type": "SYNC_FLUSH", "transient_store_pool_enable": True}, "sync"),
])
def test_mode_follows_rocketmqs_rule_for_the_pool(settings, mode):
    assert EngineConfig(**settings).mode == mode


def test_sizes_are_fixed_at_creation(tmp_path):
    write_settings(tmp_path, "")
    same = load_config(tmp_path, {"mappedFileSizeCommitLog": "256KiB"}, {})
    assert {name: getattr(same, name) for name in FIXED_NAMES} == ALL_SIZES
    for overrides, environ, said in (({"mapedFileSizeCommitLog": "1048576"}, {}, "--set"),
                                     ({}, {"PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES": "1048576"}, "environment")):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path, overrides, environ)
        for word in ("mapped_file_size_commit_log_bytes", "1048576", "262144", "fixed at creation", said):
            assert word in str(caught.value)


def test_a_misspelt_environment_name_is_refused_and_foreign_ones_are_left_alone(tmp_path):
    with pytest.raises(ConfigError, match="did you mean PYENGINE_FLUSH_DISK_TYPE"):
        load_config(tmp_path / "new", {}, {"PYENGINE_FLUSH_DISC_TYPE": "SYNC_FLUSH"})
    for name in ("PYENGINE", "PYENGINE_GATEWAY_BROKER", "PYENGINE_HA_LISTEN"):  # services of Kubernetes, whose links every pod has
        links = {f"{name}_PORT": "tcp://10.0.0.1:9876", f"{name}_SERVICE_HOST": "10.0.0.1", f"{name}_SERVICE_PORT": "9876",
                 f"{name}_SERVICE_PORT_METRICS": "9464", f"{name}_PORT_9876_TCP": "tcp://10.0.0.1:9876",
                 f"{name}_PORT_9876_TCP_PROTO": "tcp", f"{name}_PORT_9876_TCP_PORT": "9876", f"{name}_PORT_9876_TCP_ADDR": "10.0.0.1"}
        assert load_config(tmp_path / "new", {}, links) == EngineConfig()
    assert load_config(tmp_path / "new", {}, {"PYENGINE_HA_LISTEN_PORT": "10912"}).ha_listen_port == 10912
    foreign = {"PYENGINE_DEBUG": "1", "PYENGINE_REQUIRE": "java", "PYENGINE_SANITIZE": "address", "PYENGINE_KILL_AT": "x"}
    assert load_config(tmp_path / "new", {}, foreign) == EngineConfig()
    assert load_config(tmp_path / "new", {}, {"PYENGINE_PUT_TIMEOUT_MS": ""}) == EngineConfig()


@pytest.mark.parametrize(("text", "sentence"), [
    ("flush_disk_type = ", "not valid TOML"),
    ("put_timeout_ms = 7s", "put words, and numbers with a unit, in quotes"),
    ("put_timeout_ms = " + "9" * 5000, "not valid TOML"),
    ("[writing]\nflush_disk_type = 'SYNC_FLUSH'", "writing is a table"),
    ("flush_disk_type = ['SYNC_FLUSH']", "flush_disk_type is a list"),
    ("flushDiskType = 'SYNC_FLUSH'\nflush_disk_type = 'SYNC_FLUSH'", "twice"),
    ("flush_disk_tipe = 'SYNC_FLUSH'", "did you mean flush_disk_type?"),
    ("put_timeout_ms = 0", "1 to 86,400,000 ms"),
    ("put_timeout_ms = 1979-05-27", "1 to 86,400,000 ms"),
])
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path, text, sentence):
    write_settings(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path, {}, {})
    assert sentence in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    write_settings(tmp_path, "")
    config_path(tmp_path).write_bytes(b"put_timeout_ms = 1\n\xff\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path, {}, {})


def test_parse_set_takes_the_last_of_a_doubled_key_and_refuses_what_is_no_pair():
    assert parse_set(["a=1", "b = x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    for wrong in ("a", "=1", ""):
        with pytest.raises(ConfigError, match="give key=value"):
            parse_set([wrong])


def test_written_toml_reads_back(tmp_path):
    values = {"flush_disk_type": "SYNC_FLUSH", "transient_store_pool_enable": True, "put_timeout_ms": 7,
              "shm_directory": '/dev/shm/a "b" \\ \x01 \u00fc'}
    path = tmp_path / "engine.toml"
    path.write_text(write_toml(values), encoding="utf-8")
    assert read_file(path) == values


def test_a_config_is_frozen_and_comparable():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.spin = 0
    assert dataclasses.replace(config, spin=0) != config and hash(config) == hash(EngineConfig())


@pytest.mark.parametrize(("text", "meant"), [("1s", (1000,)), ("1s  2m 1h 1d", (1000, 120000, 3600000, 86400000))])
def test_a_text_of_delay_levels_means_these_delays(text, meant):
    assert parse_delay_levels(text) == meant


@pytest.mark.parametrize("recipe", RECIPES)
def test_sizes_of_a_store_that_rocketmq_made_come_from_its_files_or_from_set(golden, recipe):
    """With the settings that the store was made with, every golden store is opened with the right sizes."""
    store = golden(recipe)
    config = load_config(store.root, store.manifest["config"], {})
    assert {name: getattr(config, name) for name in store.sizes} == store.sizes
    assert config.geometry.mapped_file_size_commit_log_bytes == store.sizes["mapped_file_size_commit_log_bytes"]
    assert not config_path(store.root).exists()


def test_sizes_that_the_files_tell_need_no_setting_and_allow_no_other(golden):
    store = golden("basic")
    config = load_config(store.root, {}, {})
    assert {name: getattr(config, name) for name in store.sizes} == store.sizes
    assert {config.origins[name] for name in store.sizes} == {"files"}
    with pytest.raises(ConfigError, match="fixed at creation and its files have 64"):
        load_config(store.root, {"maxHashSlotNum": "65"}, {})


def test_keep_sizes_writes_what_is_missing_in_front_of_what_the_user_wrote(tmp_path):
    config_path(tmp_path).parent.mkdir()
    config_path(tmp_path).write_text("# mine\nmaxIndexNum = 40  # few\nflush_disk_type = 'SYNC_FLUSH'\n")
    config = load_config(tmp_path, {"maxHashSlotNum": "16", "put_timeout_ms": "7"}, {})
    assert record_sizes(tmp_path, config)
    text = config_path(tmp_path).read_text()
    assert text.endswith("# mine\nmaxIndexNum = 40  # few\nflush_disk_type = 'SYNC_FLUSH'\n")
    again = load_config(tmp_path, {}, {})
    assert (again.max_hash_slot_num, again.max_index_num, again.flush_disk_type) == (16, 40, "SYNC_FLUSH")
    assert {again.origins[name] for name in FIXED_NAMES} == {"engine.toml"}
    assert again.put_timeout_ms == 10_000, "only sizes are kept"
    assert not record_sizes(tmp_path, again)
    assert config_path(tmp_path).read_text() == text


def test_a_setting_that_is_set_while_a_store_starts_is_kept(tmp_path, monkeypatch):
    config, write, setting = load_config(tmp_path, {}, {}), config_module.write_toml, []

    def set_meanwhile(values):
        if not setting:
            setting.append(threading.Thread(target=set_durably, args=(tmp_path, {"put_timeout_ms": 7})))
            setting[0].start()
            setting[0].join(0.3)
        return write(values)

    monkeypatch.setattr(config_module, "write_toml", set_meanwhile)
    assert record_sizes(tmp_path, config)
    setting[0].join()
    kept = read_file(config_path(tmp_path))
    assert kept["put_timeout_ms"] == 7 and set(FIXED_NAMES) <= kept.keys()


def test_sizes_that_another_process_has_written_meanwhile_are_there_once(tmp_path, monkeypatch):
    config, exclusive, others = load_config(tmp_path, {}, {}), durable_file.exclusive, []

    def locked_after_another(path):
        if not others:
            others.append(path)
            assert record_sizes(tmp_path, config)
        return exclusive(path)

    monkeypatch.setattr(durable_file, "exclusive", locked_after_another)
    record_sizes(tmp_path, config)
    assert others and set(FIXED_NAMES) <= read_file(config_path(tmp_path)).keys()


def test_a_new_store_keeps_the_sizes_it_was_made_with(tmp_path):
    root = tmp_path / "store"
    record_sizes(root, load_config(root, {"mappedFileSizeCommitLog": "64KiB"}, {}))
    assert load_config(root, {}, {}).mapped_file_size_commit_log_bytes == 65536
    with pytest.raises(ConfigError, match="config/engine.toml says 65536"):
        load_config(root, {"mappedFileSizeCommitLog": "128KiB"}, {})


def test_settings_of_queue_contents_are_kept_from_the_last_start(tmp_path):
    path = config_path(tmp_path)
    path.parent.mkdir()
    path.write_text("# mine\nenableLmq = true\nspin = 0\n")
    record_sizes(tmp_path, load_config(tmp_path, {"enable_multi_dispatch": "true", "enable_lmq": "false"}, {}))
    again = load_config(tmp_path, {}, {})
    assert (again.enable_multi_dispatch, again.enable_lmq, again.enable_consume_queue_ext) == (True, False, False)
    text = path.read_text()
    assert "# mine\n" in text and "spin = 0\n" in text and "enableLmq" not in text and "consume_queue_ext =" not in text
    assert not record_sizes(tmp_path, again)


@pytest.mark.parametrize(("text", "pair"), [
    ("10.0.0.1:10912", ("10.0.0.1", 10912)), ("[::1]:10912", ("::1", 10912)), ("master.example:1", ("master.example", 1)),
    ("0.0.0.0:0", ("0.0.0.0", 0)), ("10.0.0.1", None), (":10912", None), ("[]:10912", None), ("10.0.0.1:", None),
    ("10.0.0.1:65536", None), ("10.0.0.1:1_0", None), ("10.0.0.1:-1", None), ("", None),
])
def test_a_host_and_a_port_are_told_apart_or_refused(text, pair):
    if pair is None:
        with pytest.raises(ValueError, match=re.escape(f"{text} is not host:port")):
            split_address(text)
    else:
        assert split_address(text) == pair


@pytest.mark.parametrize("setting", ["ha_master_address", "ha_peers"])
@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536"])
def test_an_address_of_another_store_needs_a_port_that_can_be(setting, text):
    """Port 0 is "any free one", to which nothing connects."""
    with pytest.raises(ConfigError, match=rf"{setting} = {text} is not an address: give host:port"):
        EngineConfig(**{setting: text}, ha_secret_file="secret")


def test_a_master_needs_room_for_the_slaves_that_confirm():
    with pytest.raises(ConfigError, match="min_in_sync_replicas = 3 is more than ha_connections_max = 2, .*: raise ha_connections_max"):
        EngineConfig(broker_role="SYNC_MASTER", min_in_sync_replicas=3, ha_connections_max=2)
    for role in ("ASYNC_MASTER", "SLAVE"):  # without a port for slaves
        EngineConfig(broker_role=role, min_in_sync_replicas=3, ha_connections_max=2)


def test_a_link_to_a_disk_that_is_not_mounted_is_a_sign_of_a_store(tmp_path):
    (tmp_path / "commitlog").symlink_to(tmp_path / "not-mounted" / "commitlog")
    assert existing_store(tmp_path) == tmp_path
