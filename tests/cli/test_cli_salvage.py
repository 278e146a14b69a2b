"""`pyengine salvage`: a new store from a damaged one, which stays as it is."""

from __future__ import annotations

import re

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


def test_a_store_with_a_file_named_like_a_piece_of_a_log_is_a_store(golden, tmp_path):
    store = golden("roll")
    (store.root / "commitlog-2024.tar").write_text("mine")
    ran = run("salvage", store.root, tmp_path / "new", "--json")
    assert ran.code == 0, ran.stderr
    assert bodies(tmp_path / "new") == bodies(store.root)


def test_salvage_leaves_out_a_damaged_record_and_reports_it(golden, tmp_path):
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
    assert human.code == 4 and re.search(rf"^dest +{tmp_path / 'other'}$", human.stdout, re.MULTILINE)
    assert re.search(rf"^ *{skipped['start']:,} +{skipped['end']:,} +{record['size']:,} ", human.stdout, re.MULTILINE)


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


def cut_only_segment(store, length: int) -> None:
    """A store of one segment whose file is shorter now, in bytes that held nothing."""
    (segment,) = sorted((store.root / "commitlog").iterdir())
    with open(segment, "r+b") as file:
        file.truncate(length)


def test_an_only_segment_that_was_cut_short_is_refused_and_can_be_carved_with_its_size(golden, tmp_path):
    store = golden("basic")
    cut_only_segment(store, 200_000)
    assert max(record["phy"] + record["size"] for record in store.verify["records"] if record.get("topic")) < 200_000
    before = picture(store.root)
    for command in (("recover",), ("start",), ("inspect",), ("rebuild", "--queues")):
        ran = run(command[0], store.root, *command[1:])
        assert ran.code == 3, command
        assert "has 200000 bytes, not 1073741824" in ran.stderr and "pyengine salvage" in ran.stderr
    checked = run("check", store.root, "--json")
    assert checked.code == 3 and checked.document["findings"][0]["kind"] == "refused"
    ran = run("salvage", store.root, tmp_path / "new", "--set", "mappedFileSizeCommitLog=256KiB", "--json")
    assert ran.code == 0, ran.stderr
    assert changes(before, picture(store.root)) == []
    assert run("check", tmp_path / "new").code == 0
    assert len(bodies(tmp_path / "new")) == sum(1 for record in store.verify["records"] if record.get("topic"))


def test_an_only_segment_of_an_odd_length_is_opened_when_the_owner_says_so(golden):
    store = golden("basic")
    cut_only_segment(store, 200_000)
    asked = ("--set", "mapped_file_size_commit_log_bytes=200000")
    assert run("check", store.root, *asked).code == 0
    assert run("recover", store.root, *asked).code == 0
