"""A failing disk under recovery: whichever system call fails, it says why in one sentence, and the next one repairs all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from faults.failing_calls import build_shim, preload
from pyengine.errors import ExitCode
from pyengine.storage.checkpoint import create_abort_file
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover

RIG = Path(__file__).with_name("fail_each_call.py")
CALLS = ("open", "pwrite", "write", "fsync", "ftruncate", "fallocate", "link", "rename", "mkdir", "unlink", "mmap")
SHORT_FORM = [[call, "ENOSPC" if call in ("fallocate", "link", "mkdir") else "EIO"] for call in CALLS]
SHORT_FORM += [["pwrite", "SHORT"], ["write", "SHORT"]]
FIRST_CALLS = 2
LONG_FORM = [[call, name] for call in CALLS for name in ("EIO", "ENOSPC", "EROFS", "EMFILE", "ENOMEM", "EACCES", "EINTR")]
LONG_FORM += [["pwrite", "SHORT"], ["write", "SHORT"]]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def killed(build_store):
    """A store that needs everything recovery can do: a hole in the tail, a stray segment, no queues, no index."""
    store = build_store(40)
    hole = store.records[-4]
    store.poke(hole.start, bytes(len(hole.data)))
    create_abort_file(store.root)
    return store


def fail_each(shim, store, folder, cases, limit) -> list[dict]:
    sources = Path(__file__).parents[2]
    command = [sys.executable, "-P", str(RIG), str(store.root), str(folder), json.dumps(cases), str(limit)]
    environ = os.environ | preload(shim) | {"PYTHONPATH": str(sources), "NO_COLOR": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def undisturbed(store, folder) -> tuple[int, dict]:
    shutil.copytree(store.root, folder)
    report = recover(MessageStore(folder, store.geometry))
    return report.end_offset, dict(report.queue_ends)


def assert_all_held(seen, end, queue_ends) -> None:
    bad = []
    for row in seen:
        where = f"{row['call']} number {row['n']}, {row['errno']}"
        if row["code"] not in (ExitCode.OK, ExitCode.REPAIRED, ExitCode.FAILED, ExitCode.CORRUPTION, ExitCode.USAGE):
            bad.append(f"{where}: ended with {row['code']}: {row['stderr'][-1500:]}")
        elif row["code"] not in (ExitCode.OK, ExitCode.REPAIRED) and row["stderr"].count("\n") != 1:
            bad.append(f"{where}: not one sentence: {row['stderr'][-1500:]}")
        if row["again"] not in (ExitCode.OK, ExitCode.REPAIRED):
            bad.append(f"{where}: the next recovery ended with {row['again']}: {row['again_stderr'][-1500:]}")
            continue
        document = json.loads(row["document"])
        ends = {(queue["topic"], queue["queueId"]): queue["end"] for queue in document["queue_ends"]}
        if (document["end_offset"], ends) != (end, queue_ends):
            bad.append(f"{where}: the next recovery left the log at {document['end_offset']}, not {end}, queues {ends}")
    assert not bad, f"{len(bad)} of {len(seen)}:\n" + "\n".join(bad[:20])


@pytest.mark.ci
def test_a_recovery_with_a_failing_call_ends_in_order_and_the_next_one_repairs_all(shim, killed, tmp_path):
    """The first of each kind; the long form goes to the last."""
    seen = fail_each(shim, killed, tmp_path / "scratch", SHORT_FORM, FIRST_CALLS)
    came = {row["call"] for row in seen if row["came"]}
    assert came >= {"open", "pwrite", "write", "fsync", "ftruncate", "fallocate", "link", "rename", "unlink", "mmap"}
    assert_all_held(seen, *undisturbed(killed, tmp_path / "undisturbed"))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_call_fails_in_turn_with_every_error(shim, killed, tmp_path, proof, share):
    cases = share(LONG_FORM)
    seen = fail_each(shim, killed, tmp_path / "scratch", cases, 1000)
    proof("failing disk, recovery", "every call, every error", failed_calls=sum(row["came"] for row in seen),
          left_out=len(LONG_FORM) - len(cases),
          bad=sum(row["again"] not in (ExitCode.OK, ExitCode.REPAIRED) for row in seen))
    assert_all_held(seen, *undisturbed(killed, tmp_path / "undisturbed"))
