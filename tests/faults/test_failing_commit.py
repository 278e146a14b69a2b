"""A failing disk under a consumer group's commit: it says so, and the offset is the one before or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.failing_calls import build_shim, preload
from waiting import scaled_timeout_s

SOURCES = str(Path(__file__).parents[2])
CALLS = ("open", "write", "pwrite", "fsync", "rename", "link", "unlink", "mkdir")
SHORT = ("write", "pwrite")
# Each commit but the first finds an older file, which it keeps. argv: store, cases. Prints a JSON line for each commit.
COMMITTER = """
import ctypes, errno, json, sys
from pyengine.errors import EngineError
from pyengine.storage.consumer_offset import ConsumerOffsets
shim, store, number = ctypes.CDLL(None), sys.argv[1], 0
shim.fail_count.restype = ctypes.c_long
offsets = ConsumerOffsets(store)
for call, name in json.loads(sys.argv[2]):
    for n in range(1, 100):
        before, number, said = number, number + 1, ""
        shim.fail_at(store.encode(), call.encode(), ctypes.c_long(n), -1 if name == "SHORT" else getattr(errno, name))
        try:
            offsets.commit("orders", "billing", {0: number})
        except EngineError as error:
            said = str(error) or "nothing"
        came = shim.fail_count() >= n
        shim.fail_at(store.encode(), b"", ctypes.c_long(0), 0)
        table = offsets.table()
        found = table.offsets.get("orders@billing", {}).get(0, 0)
        offsets.commit("orders", "billing", {0: number})
        again = offsets.read("orders", "billing")[0]
        print(json.dumps([call, name, n, came, said, before, found, number, again, table.notes]))
        if not came:
            break
"""


@pytest.mark.parametrize("names", [
    ("EIO", "SHORT"), pytest.param(("ENOSPC", "EROFS", "EMFILE", "ENOMEM", "EINTR"), marks=pytest.mark.long)])
def test_a_failing_call_in_a_commit_leaves_the_old_or_new_offset_and_the_next_commit_works(tmp_path, names, proof):
    cases = [[call, name] for call in CALLS for name in names if name != "SHORT" or call in SHORT]
    store = tmp_path / "store"
    (store / "config").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", COMMITTER, str(store), json.dumps(cases)], capture_output=True, text=True,
                          timeout=scaled_timeout_s(300), env=os.environ | preload(build_shim(tmp_path)) | {"PYTHONPATH": SOURCES})
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [row for row in rows for _, _, _, _, said, before, found, number, again, notes in [row]
           if found not in ((before, number) if said else (number,)) or again != number or notes or "\n" in said]
    proof("failing disk, commits", "each call of a commit", failed_calls=sum(row[3] for row in rows), bad=len(bad))
    assert bad == []
    assert {row[0] for row in rows if row[3]} >= {"open", "pwrite", "fsync", "rename", "link"}
    assert any(row[3] and row[4] for row in rows), "none was told"
