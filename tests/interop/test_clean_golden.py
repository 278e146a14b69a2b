"""What is left after a clean-up is what RocketMQ's own clean-up leaves: the recipe `cleaned`, put and cleaned here.

Its note says that the store deleted its first three segments; here they are made old and
`pyengine clean` takes them, beside the running engine in each mode and on the stopped store.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fix_cli import run
from fix_engine import wait_noted
from fix_golden import GOLDEN, compare_inspect, load_verify, unpack
from interop.compare_stores import index_differences, log_differences, queue_differences
from pyengine.engine_config import MODES
from replay import engine_for, load_manifest, replay_puts, settings_of
from waiting import scaled_timeout_s

RECIPE = "cleaned"
OLD_S = 80 * 3600
WAYS = [("running", "pool"), ("stopped", "async"),
        *(pytest.param(("running", mode), marks=pytest.mark.ci) for mode in MODES if mode != "pool")]


def age_first_segments(root: Path, count: int) -> None:
    for name in sorted(os.listdir(root / "commitlog"))[:count]:
        os.utime(root / "commitlog" / name, (time.time() - OLD_S,) * 2)


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def cleaned(request, tmp_path_factory) -> tuple[Path, Path]:
    """(our store, RocketMQ's), each cleaned by its own program."""
    way, mode = request.param
    folder = tmp_path_factory.mktemp(f"{way}-{mode}")
    manifest = load_manifest(GOLDEN / f"{RECIPE}.json.gz")
    root, theirs = folder / "ours", unpack(RECIPE, folder / "theirs")
    with engine_for(root, settings_of(manifest, mode)) as producer:
        assert replay_puts(manifest, producer).differences == []
        if way == "running":
            wait_noted(root)
            age_first_segments(root, 3)
            told = run("clean", root, "--json")
    if way == "stopped":
        age_first_segments(root, 3)
        told = run("clean", root, "--json")
    assert told.code == 0, told.stderr
    assert (told.document["segments"], told.document["min"]) == (3, 3 * 16384)
    assert told.document["queue_files"] > 0 and told.document["index_files"] > 0
    return root, theirs


@pytest.mark.ci
def test_the_files_that_are_left_are_rocketmqs_byte_for_byte(cleaned):
    root, theirs = cleaned
    manifest = load_manifest(GOLDEN / f"{RECIPE}.json.gz")
    assert log_differences(root, theirs, manifest.document["records"], 16384) == []
    assert queue_differences(root, theirs) == []
    assert index_differences(root, theirs) == []


def test_readers_and_check_agree(cleaned):
    root, _ = cleaned
    assert compare_inspect(run("inspect", root, "--json").document, load_verify(RECIPE), ignore=("byTime",)) == []
    checked = run("check", root, "--json")
    assert (checked.code, checked.document["findings"]) == (0, [])


@pytest.mark.ci
@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_opens_it_and_reads_what_it_reads_from_its_own(cleaned, judge):
    root, _ = cleaned
    found = judge.verify(root, load_manifest(GOLDEN / f"{RECIPE}.json.gz").config).result(timeout=scaled_timeout_s(240))
    assert (found["loadOk"], found["path"]) == (True, "normal")
    assert compare_inspect(found, load_verify(RECIPE), ignore=("byTime",)) == []
