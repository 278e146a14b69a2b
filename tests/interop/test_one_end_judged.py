"""The real store opens stores with random damage: the log ends where it ends it, and nothing is missing that it serves."""

from __future__ import annotations

import shutil

import pytest

from damaged_stores import RECIPES, THEIRS, damaged_stores, ends_of, recover_accepting
from pyengine.storage.inspect import inspect

pytestmark = [pytest.mark.java, pytest.mark.maven]

JUDGED_AT_ONCE = 4


@pytest.mark.parametrize("name", RECIPES)
def test_the_log_ends_where_the_real_store_ends_it(name, judge, tmp_path):
    hold_against_the_judge(name, judge, range(2), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_the_log_ends_where_the_real_store_ends_it_after_many_damages(name, judge, tmp_path):
    hold_against_the_judge(name, judge, range(2, 30), tmp_path)


def hold_against_the_judge(name, judge, seeds, folder):
    (folder / "kept").mkdir()
    wrong = []
    for few in (seeds[at : at + JUDGED_AT_ONCE] for at in range(0, len(seeds), JUDGED_AT_ONCE)):
        asked = [(store, judge.verify(keep(store, folder), store.manifest["config"]))
                 for store in damaged_stores(name, THEIRS, few, folder)]
        wrong += [f"{store.told}: {said}" for store, answer in asked if (said := differences(store, answer.result(timeout=240)))]
    assert not wrong, "\n".join(wrong)


def keep(store, folder):
    """The store goes when the next one is made."""
    kept = folder / "kept" / store.root.name
    shutil.copytree(store.root, kept, symlinks=True)
    store.root = kept
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
