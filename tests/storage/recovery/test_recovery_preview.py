"""`recover --dry-run`: what it tells is what the run then does, and it changes nothing."""

from __future__ import annotations

from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from damaged_stores import OURS, RECIPES, THEIRS, damaged_stores
from fix_cli import changes, picture
from fix_golden import RECIPES as GOLDEN
from fix_golden import usual
from pyengine.errors import EngineError, ExitCode
from pyengine.storage.checkpoint import CUT, REBUILD, WATERMARK, Cut, DurableWatermark, RebuildMarker
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.recover import recover

preview = partial(recover, dry_run=True)
# Known only when queues are made again, or a matter of the run itself.
_OF_THE_RUN = ("queue_ends", "dispatched_bytes", "notes", "seconds", "gigabytes_per_second", "sentence", "is_dry_run", "exit_code")


def outcome(work: Any, store: MessageStore, **arguments: Any) -> dict[str, Any]:
    """Its report, or its refusal."""
    try:
        return work(store, **arguments).to_dict()
    except EngineError as error:
        return {"refused": type(error).__name__, "why": str(error)}


def compare(store: MessageStore, told: str, **arguments: Any) -> dict[str, Any]:
    """Hold a preview against the run that follows it; the preview."""
    before = picture(store.root)
    foretold = outcome(preview, store, **arguments)
    assert changes(before, picture(store.root)) == [], told
    done = outcome(recover, store, **arguments)
    if "refused" in foretold or "refused" in done:
        assert foretold == done, told
        return foretold
    of_the_log = [piece for piece in done["quarantined"] if "lacked entries in the middle" not in piece["reason"]]
    assert foretold["quarantined"] == of_the_log, told
    assert foretold["is_dry_run"] and foretold["dispatched_bytes"] <= done["dispatched_bytes"], told
    assert {key: value for key, value in foretold.items() if key not in (*_OF_THE_RUN, "quarantined")} == {
        key: value for key, value in done.items() if key not in (*_OF_THE_RUN, "quarantined")}, told
    if len(of_the_log) == len(done["quarantined"]):
        assert foretold["exit_code"] == done["exit_code"], told
    return foretold


@pytest.mark.parametrize(("name", "owner"), usual(product(RECIPES, [THEIRS, OURS]), [*zip(RECIPES, cycle([OURS, THEIRS]))], pytest.mark.ci))
def test_a_preview_of_a_damaged_store_is_what_the_run_does(tmp_path, name, owner):
    hold_all(name, owner, range(100, 102), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("owner", [THEIRS, OURS])
@pytest.mark.parametrize("name", RECIPES)
def test_a_preview_of_many_damaged_stores_is_what_the_run_does(tmp_path, name, owner):
    hold_all(name, owner, range(102, 130), tmp_path)


def hold_all(name: str, owner: str, seeds: range, folder: Path) -> None:
    for damaged in damaged_stores(name, owner, seeds, folder):
        store = MessageStore(damaged.root, damaged.geometry)
        found = compare(store, damaged.told)
        if "refused" in found or found["state"] == "degraded":  # nothing was changed: once more, and the loss accepted
            compare(store, f"{damaged.told}, accepted", accept_loss=True)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("abnormal") or name in ("basic", "widetopic", "pool-halt")])
def test_a_preview_of_a_brokers_store_is_what_the_run_does(golden, name):
    store = golden(name)
    compare(MessageStore(store.root, discover(store.root, store.sizes)), name)


def test_a_preview_names_each_piece_that_would_be_cut(golden):
    store = golden("roll")
    segments = sorted((store.root / "commitlog").iterdir())
    record = next(record for record in store.verify["records"] if record["phy"] > int(segments[-2].name))
    with open(segments[-2], "r+b") as file:
        file.seek(record["phy"] - int(segments[-2].name) + 90)
        file.write(b"damage")
    found = preview(MessageStore(store.root, discover(store.root, store.sizes)))
    assert found.end_offset <= record["phy"] and found.exit_code is ExitCode.REPAIRED
    assert [piece.path.name for piece in found.quarantined][1:] == [f"commitlog-{segments[-1].name}"]
    assert sum(cut.entries for cut in found.cut_queues) == found.queue_entries_removed > 0
    assert not (store.root / "quarantine").exists() and "Nothing was changed" in found.sentence


def test_a_store_that_is_whole_has_nothing_to_recover(golden):
    store = golden("basic")
    found = preview(MessageStore(store.root, discover(store.root, store.sizes)))
    assert not found.changed and "would change nothing" in found.sentence


@pytest.mark.parametrize("begun", ["cut", "rebuild"])
def test_a_preview_is_refused_until_an_interrupted_cut_or_rebuild_is_finished(golden, begun):
    golden_store = golden("roll")
    store = MessageStore(golden_store.root, discover(golden_store.root, golden_store.sizes))
    end = golden_store.verify["facts"]["maxPhy"]
    if begun == "cut":
        CUT.write(store, Cut(golden_store.verify["records"][-1]["phy"], end, "its master has another end"))
        WATERMARK.write(store, DurableWatermark("00000000-0000-0000-0000-000000000000", 1, end))
    else:
        REBUILD.write(store, RebuildMarker("rebuild-1", ("index",)))
    before = picture(Path(store.root))
    with pytest.raises(EngineError, match="finishes that first"):
        preview(store)
    assert changes(before, picture(Path(store.root))) == []
    recover(store)
