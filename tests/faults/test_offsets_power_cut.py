"""Power cuts while groups commit: what commit() has returned for is there, and the file is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.power_cut import build_shim, explore, read_journal, shim_environment
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import scaled_timeout_s

COMMITS = 60
# Two groups by turns; argv: store, acks, what it forgets.
COMMITTER = """
import os, sys
from pyengine.storage import durable_writes
from pyengine.storage.consumer_offset import ConsumerOffsets
store, acks, forgets = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), sys.argv[3]
if forgets == "sync":
    durable_writes.sync_descriptor = lambda *_, **__: None
if forgets == "folder":
    durable_writes.sync_folder = lambda *_: None
for number in range(1, %d):
    ConsumerOffsets(store).commit("orders", ("billing", "audit")[number %% 2], {number %% 5: number})
    os.write(acks, b"%%d\\n" %% number)
""" % (COMMITS + 1)


def table_after(count: int) -> dict[tuple[str, str], dict[int, int]]:
    """The offsets in the file after so many commits."""
    found: dict[tuple[str, str], dict[int, int]] = {}
    for number in range(1, count + 1):
        found.setdefault(("orders", ("billing", "audit")[number % 2]), {})[number % 5] = number
    return found


def check(tree: Path, acks: list[bytes]) -> str | None:
    count = int(acks[-1]) if acks else 0
    offsets = ConsumerOffsets(tree)
    if offsets.table().notes:
        return f"damaged: {offsets.table().notes}"
    found = offsets.groups()
    return None if found in (table_after(count), table_after(count + 1)) else f"{found} after {count} commits"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


def run(shim: Path, folder: Path, forgets: str):
    root, acks, journal = folder / "store", folder / "acks", folder / "journal"
    acks.touch()
    environ = os.environ | shim_environment(shim, journal, root, acks)
    subprocess.run([sys.executable, "-c", COMMITTER, str(root), str(acks), forgets], env=environ, check=True, timeout=scaled_timeout_s(120))
    return root, read_journal(journal)


def test_a_power_cut_keeps_every_commit_that_returned(shim, tmp_path, seed):
    root, records = run(shim, tmp_path, "nothing")
    outcome = explore(records, root, check, states=600, seed=seed, scratch=tmp_path / "scratch")
    assert (outcome.bad, outcome.states, outcome.acknowledged) == ([], 600, COMMITS)


@pytest.mark.parametrize("forgets", ["sync", "folder"])
def test_a_commit_that_forgets_to_sync_is_caught(shim, tmp_path, seed, forgets):
    root, records = run(shim, tmp_path, forgets)
    assert explore(records, root, check, states=300, seed=seed, scratch=tmp_path / "scratch").bad
