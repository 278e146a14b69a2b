"""`pyengine plan`: its formulae, and each of its bounds beside what a running engine takes."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import psutil
import pytest

import pyengine
from fix_cli import run
from fix_engine import wait_noted
from fix_golden import usual
from pyengine.cli import plan as plan_module
from pyengine.cli.plan import Load, longest_wait_s, make_plan, shared_memory_bytes
from pyengine.engine_config import EngineConfig
from pyengine.ipc.shared_objects import find_folder
from pyengine.storage.checkpoint import read_checkpoint
from pyengine.storage.config import load_config
from waiting import eventually

SETTINGS = {"mapped_file_size_commit_log_bytes": 1 << 20, "max_index_num": 4000, "max_hash_slot_num": 1000,
            "mapped_file_size_consume_queue_bytes": 6000}
SETS = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
READ = 1e9


def test_a_rate_and_a_size_are_a_log_of_so_much_a_day():
    load = Load(rate=1000, body_bytes=1024 - 91 - 16)
    made = make_plan(load, EngineConfig(), READ)
    assert load.record_bytes == made["record_bytes"] == 1024 and made["log_bytes_per_day"] == 1024 * 1000 * 86400
    assert made["kept_s"] == (72 + 24) * 3600, "what is 72 hours old is deleted at the next 04:00"
    assert made["messages"] == 1000 * made["kept_s"]
    segment = 1 << 30
    assert made["log_bytes"] == (-(-made["messages"] * 1024 // segment) + 3) * segment
    assert made["length_bytes"] == made["disk_bytes"] + 4 * 6_000_000
    assert made["first_bytes"] == (64 << 20) + 4 * 65536
    assert made["queue_bytes"] == made["messages"] * 20 + 4 * (6_000_000 + 65536) and made["index_bytes"] == 0
    assert made["file_system_bytes"] == -(-made["disk_bytes"] * 100 // 75)


def test_a_limit_in_bytes_counts_where_it_is_reached_first():
    load = Load(rate=1000, body_bytes=1000)
    config = EngineConfig(log_retention_bytes=10 << 30)
    made = make_plan(load, config, READ)
    assert made["log_bytes"] == 13 << 30 and made["kept_s"] == pytest.approx((10 << 30) / load.bytes_per_s)
    small = make_plan(replace(load, rate=0.1), config, READ)
    assert small["kept_s"] == 96 * 3600 and small["log_bytes"] < small["length_bytes"] - (1 << 30)


@pytest.mark.parametrize(("hours", "longest"), [("04", 24), ("04;16", 12), ("00;01;02", 22), ("3;12", 15)])
def test_old_messages_wait_for_the_next_hour_of_deletion(hours, longest):
    assert longest_wait_s(EngineConfig(delete_when=hours)) == longest * 3600


def test_keys_take_whole_index_files_and_none_without_an_index():
    load = Load(rate=10, body_bytes=100, keys=2)
    config = EngineConfig(**SETTINGS)
    messages = make_plan(load, config, READ)["messages"]
    one = -(-config.geometry.index_layout.size_bytes // 4096) * 4096
    assert make_plan(load, config, READ)["index_bytes"] == (-(-messages * 2 // 4000) + 1) * one
    assert make_plan(load, replace(config, message_index_enable=False), READ)["index_bytes"] == 0
    full_size = make_plan(load, EngineConfig(), READ)
    assert full_size["first_bytes"] == (64 + 20 << 20) + 4 * 65536 < 120_000_000


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A store with 12,000 messages, while its engine runs: (load that was put, what was seen)."""
    root = tmp_path_factory.mktemp("plan") / "store"
    load = Load(rate=1, body_bytes=300, topic_bytes=6, properties_bytes=len("KEYS\1key00000"), keys=1, queues=8, producers=3)
    seen: dict[str, int] = {}
    with pyengine.Engine(root, **SETTINGS) as engine:
        producers = [engine.connect() for _ in range(load.producers)]
        for number in range(0, 12_000, 100):
            producer = producers[number // 100 % load.producers]
            assert producer.put_many("orders", [bytes(300)] * 100, queue_id=number // 100 % load.queues, keys=f"key{number:05}").ok
        wait_noted(root)
        folder = find_folder(root).path
        seen["shared"] = sum(one.stat().st_size for one in folder.iterdir() if one.is_file())
        supervisor = psutil.Process(engine.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        seen["descriptors"] = max(one.num_fds() for one in processes)
        seen["processes"] = sum(one.memory_full_info().uss for one in processes)
        eventually(lambda: sum(1 for _ in (root / "commitlog").iterdir()) >= 6, "a segment is allocated ahead")
        for part in ("commitlog", "consumequeue", "index"):
            seen[part] = sum(os.stat(os.path.join(folder, name)).st_blocks * 512
                             for folder, _, names in os.walk(root / part) for name in names)
        with engine.open_store() as reader:
            seen["end"] = reader.max_physical_offset()
        for one in producers:
            one.close()
    return root, load, seen


def planned(load: Load, count: int = 12_000) -> dict:
    """As if just those messages were kept."""
    config = EngineConfig(**SETTINGS, log_retention_bytes=count * load.record_bytes)
    return make_plan(load, config, READ)


def test_a_record_has_as_many_bytes_as_planned(measured):
    _, load, seen = measured
    blanks = (seen["end"] // (1 << 20)) * load.record_bytes
    assert 12_000 * load.record_bytes <= seen["end"] <= 12_000 * load.record_bytes + blanks


@pytest.mark.parametrize(("part", "field", "least"), [
    ("commitlog", "log_bytes", 0.7), ("consumequeue", "queue_bytes", 0.3), ("index", "index_bytes", 0.6)])
def test_files_take_no_more_than_planned_and_not_much_less(measured, part, field, least):
    _, load, seen = measured
    bound = planned(load)[field]
    assert least * bound <= seen[part] <= bound, (seen[part], bound)


def test_memory_and_descriptors_take_no_more_than_planned(measured):
    _, load, seen = measured
    made = planned(load)
    assert 0.7 * made["shared_memory_bytes"] <= seen["shared"] <= made["shared_memory_bytes"]
    assert 0.1 * made["process_bytes"] <= seen["processes"] <= made["process_bytes"]
    assert 0.3 * made["descriptors"] <= seen["descriptors"] <= made["descriptors"]


def test_a_master_and_a_gateway_are_in_the_plan():
    load = Load(rate=1, body_bytes=300, topic_bytes=1, producers=2)
    alone, master, gateway = (make_plan(load, EngineConfig(**settings), READ) for settings in (
        {}, {"broker_role": "SYNC_MASTER"}, {"gateway_enable": True, "gateway_connections_max": 100, "gateway_memory_max_bytes": 1 << 30}))
    assert master["process_bytes"] - alone["process_bytes"] == plan_module.PROCESS_BYTES
    assert gateway["process_bytes"] - alone["process_bytes"] == plan_module.PROCESS_BYTES + (1 << 30)
    assert gateway["descriptors"] - alone["descriptors"] == 100 - 2


def test_buffers_of_tls_are_in_the_plan():
    load, settings = Load(rate=1, body_bytes=300), {"gateway_enable": True, "gateway_connections_max": 4096}
    plain, with_tls = (make_plan(load, EngineConfig(**settings, **more), READ) for more in (
        {}, {"gateway_tls_mode": "permissive", "gateway_tls_cert_file": "c", "gateway_tls_key_file": "k"}))
    assert with_tls["process_bytes"] - plain["process_bytes"] == 4096 * plan_module.TLS_CONNECTION_BYTES


@pytest.mark.parametrize("rate", usual([100_000, 10], [100_000], pytest.mark.ci), ids=["more-than-a-segment-in-5-s", "a-slow-one"])
def test_a_recovery_reads_no_more_than_planned(make_engine, rate):
    engine = make_engine("async", **SETTINGS)
    engine.start()
    load = Load(rate=rate, body_bytes=300, topic_bytes=1)
    with pyengine.connect(engine.root) as producer:
        for _ in range(40):
            assert producer.put_many("T", [bytes(300)] * 250).ok
        if rate == 10:
            stored_ms = time.time() * 1000
            eventually(lambda: producer.put("T", b"slowly").ok and read_checkpoint(engine.root).min_timestamp_ms > stored_ms,
                       "all segments are older than the checkpoint")
    engine.kill_all()
    found = run("recover", engine.root, "--json").document
    read = found["end_offset"] - found["scan_from"]
    assert 0 < read <= make_plan(load, EngineConfig(**SETTINGS), READ)["recovery_read_bytes"]


def test_the_pool_and_more_producers_take_more_shared_memory():
    config = load_config(None, {"transient_store_pool_enable": "true", "transient_store_pool_size": "3",
                                "mapped_file_size_commit_log_bytes": "64MiB"})
    without = replace(config, transient_store_pool_enable=False)
    assert shared_memory_bytes(config, 1, 1) - shared_memory_bytes(without, 1, 1) == 3 * 64 << 20
    assert shared_memory_bytes(without, 9, 1) - shared_memory_bytes(without, 1, 1) >= 8 * without.session_ring_bytes


def test_it_shows_a_table_and_one_document(monkeypatch):
    monkeypatch.setattr(plan_module, "measure_reading", lambda body_bytes: 2e9)
    words = ("plan", "--rate", "5000", "--size", "1KiB", "--retention", "48h", *SETS)
    shown = run(*words)
    assert shown.code == 0 and "a message is kept for up to 72 h" in shown.stdout and "file system" in shown.stdout
    made = run(*words, "--json").document
    assert made["kept_s"] == 72 * 3600 and made["recovery_s"] == pytest.approx(0.5 + made["recovery_read_bytes"] / 2e9)


@pytest.mark.parametrize("words", [("--size", "1KiB"), ("--rate", "5", "--size", "x"), ("--rate", "0", "--size", "1"),
                                   ("--rate", "1", "--size", "1", "--retention", "soon")])
def test_a_missing_or_wrong_option_is_named(words):
    ran = run("plan", *words)
    assert ran.code == 2 and ran.stdout == "" and "Traceback" not in ran.stderr


def test_reading_is_measured_with_a_body_of_that_size():
    assert plan_module.measure_reading(100) > 0 and plan_module.measure_reading(100_000) > 0
