"""The real store opens stores with random damage: the log ends where it ends it, and nothing is missing that it serves."""

from __future__ import annotations

import shutil

import pytest

import needs
from damaged_stores import RECIPES, THEIRS, damaged_stores, ends_of, recover_accepting
from interop.judge import Judge, JudgeFailure
from pyengine.storage.inspect import inspect

pytestmark = [pytest.mark.java, pytest.mark.maven]

JUDGED_AT_ONCE = 4


@pytest.mark.ci
@pytest.mark.parametrize("name", RECIPES)
def test_the_log_ends_where_the_real_store_ends_it(name, judge, tmp_path):
    stores = kept_stores(name, range(2), tmp_path)
    asked = [(store, judge.verify(store.root, store.manifest["config"])) for store in stores]
    wrong = [f"{store.told}: {said}" for store, answer in asked if (said := differences(store, answer.result(timeout=240)))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_the_log_ends_where_the_real_store_ends_it_after_many_damages(name, tmp_path):
    """A wrong length makes the real store run out of memory, or read for ever: such a store is not judged."""
    stores = kept_stores(name, range(2, 10), tmp_path)
    wrong, judged = [], 0
    for at in range(0, len(stores), JUDGED_AT_ONCE):
        for store, theirs in verified(stores[at : at + JUDGED_AT_ONCE], tmp_path):
            judged += 1
            if said := differences(store, theirs):
                wrong.append(f"{store.told}: {said}")
    assert not wrong, "\n".join(wrong)
    assert judged


def verified(stores, folder):
    """(store, what the real store reads from it), asked for together; one by one if one of them ends its process."""
    scratch = folder / "judge"
    scratch.mkdir(exist_ok=True)
    try:
        with Judge(needs.java_command(), scratch) as judge:
            asked = [judge.verify(store.root, store.manifest["config"]) for store in stores]
            return list(zip(stores, [answer.result(timeout=60) for answer in asked]))
    except (JudgeFailure, BrokenPipeError, TimeoutError):
        return [] if len(stores) == 1 else [pair for store in stores for pair in verified([store], folder)]


def kept_stores(name, seeds, folder):
    kept = []
    for store in damaged_stores(name, THEIRS, seeds, folder):  # each goes when the next one is made
        store.root = shutil.copytree(store.root, folder / f"kept-{store.root.name}", symlinks=True)
        kept.append(store)
    return kept


def differences(store, theirs):
    if not theirs["loadOk"]:
        return "" if recover_accepting(store) is None else "the real store refuses it"
    real_end = theirs["facts"]["maxPhy"]
    before = ends_of(store)
    outcome = recover_accepting(store)
    if outcome is None:
        return "the real store opens it"
    end, loss = outcome
    if loss:  # the real store empties queues, or answers from beyond a gap
        return ""
    if {real_end} != {end, *before.values()}:
        return f"the real store ends at {real_end}, recovery at {end}, before it {before}"
    lost = whole_messages(store, theirs) - whole_messages(store, inspect(store.root, store.manifest["config"]))
    return f"the real store serves {sorted(lost)[:3]}" if lost else ""


def whole_messages(store, document):
    """(topic, queue id, physical offset) of each message that is served as it was put; damaged entries lead anywhere."""
    put = {(record["phy"], record["recSha"]) for record in store.manifest["records"] if "recSha" in record}
    return {(message["queue"], message["queueId"], message["phy"]) for message in document["messages"]
            if (message.get("phy"), message.get("recSha")) in put}
