"""`pyengine rebuild`: options, exit codes, what it says, and stores that are not to be touched."""

from __future__ import annotations

import re
import shutil

import pytest

from broker_lock import held_by_a_broker
from damage import flip
from fix_cli import changes, picture, run
from fix_golden import compare_inspect
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark


def settings_of(store) -> list[str]:
    return [word for key, value in store.manifest["config"].items() for word in ("--set", f"{key}={value}")]


def test_a_lost_queue_comes_back_and_the_store_reads_as_before(golden):
    store = golden("roll")
    folder = sorted(path for path in (store.root / "consumequeue").glob("*/*"))[0]
    shutil.rmtree(folder)
    assert run("check", store.root, *settings_of(store)).stdout.count("pyengine rebuild") == 1
    ran = run("rebuild", store.root, "--topic", folder.parent.name, "--queue-id", folder.name, "--json", *settings_of(store))
    assert ran.code == 0, ran
    assert ran.document["queues"] == [{"topic": folder.parent.name, "queueId": int(folder.name)}]
    assert ran.document["index"] is False and ran.document["replaced"] == []
    inspected = run("inspect", store.root, "--json", *settings_of(store)).document
    assert compare_inspect(inspected, store.verify, ignore=("byTime",)) == []
    assert run("check", store.root).code == 0


def test_all_for_people_and_the_sizes_are_kept(golden):
    store = golden("multi-index")
    ran = run("rebuild", store.root, *settings_of(store))
    assert ran.code == 0 and "and the index from" in ran.stdout and "rebuild-1" in ran.stdout
    assert "max_index_num" in (store.root / "config" / "engine.toml").read_text()
    assert compare_inspect(run("inspect", store.root, "--json").document, store.verify) == []
    ran = run("rebuild", store.root, "--index")
    assert ran.code == 0 and ran.stdout.startswith("Rebuilt the index from") and "rebuild-2" in ran.stdout


def test_rebuild_refuses_damage_below_the_durable_end(golden):
    store = golden("basic")
    WATERMARK.write(store.root, DurableWatermark("6f1c7b0e-0000-4000-8000-000000000001", 1, store.verify["facts"]["maxPhy"]))
    flip(store.root / "commitlog" / ("0" * 20), store.verify["records"][50]["phy"] + 4)
    run("config", "explain", store.root)
    before = picture(store.root)
    ran = run("rebuild", store.root, "--json")
    assert ran.code == 3 and ran.document["state"] == "degraded" and "Nothing was changed" in ran.stderr
    assert re.search(r"^queues +0$", run("rebuild", store.root).stdout, re.MULTILINE)
    assert [name for name in changes(before, picture(store.root)) if "config" not in str(name) and "lock" not in str(name)] == []


@pytest.mark.parametrize("words", [("--queue-id", "1"), ("--topic", "nobody")])
def test_wrong_options_are_a_usage_error(golden, words):
    assert run("rebuild", golden("basic").root, *words).code == 2


def test_a_store_that_a_broker_has_open_is_busy(golden):
    store = golden("basic")
    before = picture(store.root)
    with held_by_a_broker(store.root) as pid:
        ran = run("rebuild", store.root)
        assert ran.code == 5 and f"pid {pid}" in ran.stderr
    assert changes(before, picture(store.root)) == []
