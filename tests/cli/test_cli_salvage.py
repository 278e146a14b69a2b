"""`pyengine salvage`: a new store from a damaged one, which stays as it is."""

from __future__ import annotations

import pytest
from damage import flip
from fix_cli import changes, picture, run


def bodies(root) -> list[tuple[str, int, str]]:
    """(topic, queue id, body hash) of every message, as the queues show them."""
    document = run("inspect", root, "--json").document
    return sorted((one["topic"], one["queueId"], one["bodySha"]) for one in document["messages"])


def test_a_whole_store_comes_over_whole(golden, tmp_path):
    store = golden("roll")
    before = picture(store.root)
    ran = run("salvage", store.root, tmp_path / "new", "--json")
    assert ran.code == 0 and ran.document["skipped"] == []
    assert ran.document["records"] == sum(1 for record in store.verify["records"] if record.get("topic"))
    assert changes(before, picture(store.root)) == []
    assert run("check", tmp_path / "new").code == 0
    assert bodies(tmp_path / "new") == bodies(store.root)


def test_what_is_damaged_is_left_out_and_told(golden, tmp_path):
    store = golden("roll")
    record = store.verify["records"][3]
    segment = sorted((store.root / "commitlog").iterdir())[0]
    flip(segment, record["phy"] + 4)
    before = picture(store.root)
    ran = run("salvage", store.root, tmp_path / "new", "--json")
    assert ran.code == 4
    skipped = ran.document["skipped"][0]
    assert skipped["start"] == record["phy"] and skipped["end"] == record["phy"] + record["size"]
    assert changes(before, picture(store.root)) == []
    assert run("check", tmp_path / "new").code == 0
    human = run("salvage", store.root, tmp_path / "other")
    assert human.code == 4 and f"{record['phy']:,}" in human.stdout


@pytest.mark.parametrize("what", ["full", "file"])
def test_a_destination_that_is_taken_is_refused(golden, tmp_path, what):
    store = golden("basic")
    dest = tmp_path / "new"
    if what == "full":
        dest.mkdir()
        (dest / "letter").write_text("mine")
    else:
        dest.write_text("mine")
    before = picture(tmp_path)
    ran = run("salvage", store.root, dest)
    assert ran.code == 2 and str(dest) in ran.stderr
    assert changes(before, picture(tmp_path)) == []
