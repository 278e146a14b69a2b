"""What `check` advises is carried out here, step by step: it leads to a store in which `check` finds nothing."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from damaged_stores import OURS, RECIPES, THEIRS, damaged_stores
from fix_cli import run
from pyengine.formats.small_file import Checkpoint
from pyengine.storage.checkpoint import create_abort_file, read_checkpoint, write_checkpoint
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from storage.check import test_check

MINUTE_MS = 60_000


def follow(root: Path) -> list[str]:
    """Do what `check` says, in its order. A salvaged store must be clean; so must this one, but for what only a copy restores.

    What is cut may bring up more to do; the third look must find nothing more. Gives the first look's commands.
    """
    first = said = run("check", root, "--json").document
    for number in range(2):
        for step in said["advice"]:
            carry_out(step, said, root, f"{root.name}-{number}")
        left = run("check", root, "--json").document
        if all(step.startswith("restore") for step in left["advice"]):
            assert bool(left["findings"]) <= any(step.startswith("restore") for step in said["advice"]), left
            return [re.sub(r".*`pyengine (\w+).*", r"\1", step) for step in first["advice"]]
        said = left
    raise AssertionError(f"first {first['advice']}, then {said['advice']}: {said['findings']}")


def carry_out(step: str, said: dict, root: Path, name: str) -> None:
    if step.startswith("move away"):
        for path in {finding["file"] for finding in said["findings"] if finding["kind"] == "refused"}:
            shutil.move(root / path, root.parent / f"{name}-moved")
        return
    commands = ["start STORE", "stop STORE"] if step.startswith("start the store") else re.findall(r"`pyengine ([^`]+)`", step)
    assert commands, step
    for command in commands:
        dest = root.parent / f"{name}-salvaged"
        ran = run(*shlex.split(command.replace("STORE", str(root)).replace("DEST", str(dest))))
        assert ran.code in (0, 4), (command, ran)
        if "DEST" in command:
            assert run("check", dest, "--json").document["findings"] == [], command


@pytest.fixture
def stopped(build_store):
    store = build_store(60)
    recover(MessageStore(store.root, store.geometry))
    return store


@pytest.mark.parametrize("damage", test_check.ERRORS + test_check.WARNINGS)
def test_the_advice_for_each_kind_of_damage_helps(stopped, damage):
    damage(stopped)
    assert follow(stopped.root)


@pytest.mark.parametrize("damage", test_check.ERRORS + test_check.WARNINGS)
def test_the_advice_for_each_kind_of_damage_after_a_crash_helps(stopped, damage):
    damage(stopped)
    create_abort_file(stopped.root)
    assert follow(stopped.root)


@pytest.mark.parametrize("damage", [damage for damage in test_check.ERRORS if damage is not test_check.watermark_ahead])
def test_the_advice_for_each_kind_of_damage_to_a_rocketmq_store_helps(build_store, damage):
    store = build_store(60, ours=False)
    recover(MessageStore(store.root, store.geometry))
    damage(store)
    assert follow(store.root)


@pytest.mark.parametrize("name", ["basic", "cleaned", "roll"])
@pytest.mark.parametrize("field", ["physic", "logics", "index"])
def test_a_checkpoint_in_the_future_is_written_again(golden, name, field):
    store = golden(name)
    checkpoint = read_checkpoint(store.root)
    times = {"physic": checkpoint.physic_msg_timestamp_ms, "logics": checkpoint.logics_msg_timestamp_ms,
             "index": checkpoint.index_msg_timestamp_ms}
    write_checkpoint(store.root, Checkpoint(*(times | {field: times["physic"] + 525_600 * MINUTE_MS}).values()))
    assert follow(store.root) == ["recover"]


def test_a_checkpoint_that_speaks_of_an_index_that_is_gone_is_written_again(golden):
    store = golden("multi-index")
    assert read_checkpoint(store.root).index_msg_timestamp_ms
    shutil.rmtree(store.root / "index")
    assert follow(store.root) == ["recover"]


def test_salvage_comes_before_recover(golden):
    store = golden("basic")
    segment = store.root / "commitlog" / ("0" * 20)
    with open(segment, "r+b") as file:
        file.seek(store.verify["records"][50]["phy"] + 95)
        file.write(b"\xff\xfe")
    assert follow(store.root)[:2] == ["salvage", "recover"]


@pytest.mark.parametrize(("name", "lose"), [("cleaned", -1), ("roll", -1), ("roll", 3), ("basic", 0), ("tx", None)])
def test_a_lost_segment_or_log_is_a_loss_that_recover_refuses_until_it_is_accepted(golden, name, lose):
    store = golden(name)
    segments = sorted((store.root / "commitlog").iterdir())
    for path in segments if lose is None else [segments[lose]]:
        path.unlink()
    if lose is None:
        (store.root / "commitlog").rmdir()
    ran = run("check", store.root, "--json")
    assert (ran.code, ran.document["grade"]) == (3, "loss")
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file() and path.name != "lock"}
    ran = run("recover", store.root)
    assert ran.code == 3 and "--accept-loss" in ran.stderr and "salvage" in ran.stderr
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file() and path.name != "lock"} == before
    assert run("recover", store.root, "--accept-loss").code in (0, 4)
    assert run("check", store.root, "--json").document["findings"] == []
    assert run("recover", store.root, "--json").document["changed"] is False


@pytest.mark.parametrize("owner", [THEIRS, OURS])
@pytest.mark.parametrize("name", RECIPES)
def test_the_advice_for_random_damage_helps(name, owner, tmp_path):
    for store in damaged_stores(name, owner, range(100, 101), tmp_path):
        print(store.told)  # shown with a failure
        follow(store.root)


@pytest.mark.long
@pytest.mark.parametrize("owner", [THEIRS, OURS])
@pytest.mark.parametrize("name", RECIPES)
def test_the_advice_for_much_random_damage_helps(name, owner, tmp_path):
    wrong = []
    for store in damaged_stores(name, owner, range(101, 120), tmp_path):
        try:
            follow(store.root)
        except AssertionError as error:
            wrong.append(f"{store.told}: {error}")
    assert not wrong, "\n".join(wrong)
