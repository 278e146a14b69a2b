"""The golden data is complete, unpacks as it was packed, and the comparison sees differences."""

from __future__ import annotations

import copy
import hashlib

import pytest

from fix_golden import CLEAN, HALTED, RECIPES, compare_inspect, load_verify


def test_all_recipes_are_there():
    assert len(RECIPES) == 34 == len(CLEAN) + len(HALTED)


@pytest.mark.parametrize("name", ["basic", "roll", "abnormal-multi", "cqext"])
def test_unpacked_files_have_the_recorded_bytes_and_times(golden, name):
    store = golden(name)
    for file in store.manifest["files"]:
        path = store.root / file["path"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"], path
    before = {file["path"]: file for file in store.verify["before"]["files"]}
    present = {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}
    assert present == set(before)
    for path, file in before.items():
        assert (store.root / path).stat().st_size == file["size"]
        if not path.startswith("lock"):
            assert (store.root / path).stat().st_mtime_ns // 1_000_000 == file["mtimeMs"], path


def _damage(document: dict, part: str) -> None:
    if part == "positions":
        document["facts"]["maxPhy"] -= 1
    elif part == "records":
        document["records"][3]["recSha"] = "0"
    elif part == "queues":
        document["facts"]["queues"][0]["entries"].pop()
    elif part == "messages":
        document["messages"][2]["props"] = {}
    elif part == "queries":
        document["queries"][1]["phys"] = []
    elif part == "byTime":
        document["byTime"][0]["offset"] = 77


PARTS = ["positions", "records", "queues", "messages", "queries", "byTime"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("more_allowed", [(), PARTS], ids=["equal", "more"])
def test_the_comparison_finds_a_difference_in_every_part(part, more_allowed):
    verify = load_verify("basic")
    document = copy.deepcopy(verify)
    assert compare_inspect(document, verify) == []
    _damage(document, part)
    differences = compare_inspect(document, verify, more_allowed=more_allowed)
    assert differences and all(text.startswith(part) for text in differences)
    assert compare_inspect(document, verify, ignore=[part]) == []


def test_more_is_only_allowed_where_it_is_named():
    verify = load_verify("abnormal")
    less = copy.deepcopy(verify)
    less["queries"].pop()
    less["facts"]["queues"].pop()
    assert compare_inspect(verify, less, more_allowed=["queries", "queues"]) == []
    assert {text.split(":")[0] for text in compare_inspect(verify, less)} == {"queries", "queues"}
    assert {text.split(":")[0] for text in compare_inspect(less, verify, more_allowed=PARTS)} == {"queries", "queues"}
