"""A failing disk under a running engine: a clear reason, no false acknowledgement, and afterwards everything goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults.failing_calls import build_shim
from fix_golden import usual
from pyengine.cli.torture import processes_of

RIG = Path(__file__).with_name("fail_engine.py")
PAIR_RIG = Path(__file__).with_name("fail_replicas.py")
CHECKOUT = Path(__file__).parents[2]
# One of each sort: a log that cannot be opened, made, noted, dispatched, synced.
SHORT_FORM = [
    ["writer", "open", "EMFILE", "once"],
    ["allocator", "fallocate", "ENOSPC", "lasting"],
    ["checkpointer", "rename", "EIO", "once"],
    ["reputter", "pwrite", "ENOSPC", "lasting"],
    ["supervisor", "open", "EMFILE", "lasting"],
    ["flusher", "fsync", "EIO", "once"],
]
CALLS_OF = {
    "writer": ("open", "pwrite", "mmap", "mlock"),
    "committer": ("open", "pwrite", "mmap"),
    "flusher": ("open", "fsync", "mmap"),
    "reputter": ("mkdir", "open", "pwrite", "fallocate", "mmap", "ftruncate", "link", "fsync"),  # a queue's folder is made once
    "allocator": ("open", "fallocate", "ftruncate", "fsync", "link", "mmap"),
    "checkpointer": ("open", "pwrite", "fsync", "rename", "mmap"),
    "scheduler": ("open", "mmap", "pwrite", "fsync", "rename", "link"),
    "cleaner": ("open", "unlink", "fsync", "fallocate"),
    "supervisor": ("open",),  # the others at a start: START_CALLS
}
ONLY_IN = {("writer", "pwrite"): ("sync", "async"), ("writer", "mlock"): ("pool",)}  # call -> the modes in which it is made
# Of a SYNC_MASTER and its slave: the replicator of either, and what a slave's records go through.
CALLS_OF_ROLE = {
    "master": {"replicator": ("open", "pread", "mmap", "pwrite", "fsync", "rename", "link", "accept", "recv", "send")},
    "slave": {"replicator": ("open", "mmap", "pwrite", "fsync", "rename", "link", "connect", "recv", "send"),
              "writer": ("open", "pwrite", "mmap"), "flusher": ("open", "fsync"),
              "allocator": ("open", "fallocate", "fsync", "link"),
              "supervisor": ("connect", "recv", "send", "open")},
}
# Those are made by a replicator that begins, or at a start; and those by a worker that begins.
AT_A_BEGINNING = ("accept", "connect", "mmap")
BY_A_SUCCESSOR = {("writer", "mmap"), ("writer", "mlock"), ("flusher", "mmap"), ("allocator", "mmap"), ("reputter", "fallocate")}
SHORT_PAIR = [["replicator", "recv", "EIO", "once"], ["replicator", "rename", "ENOSPC", "lasting"]]
# A note whose second name cannot be linked is copied: that hinders nothing.
COPIED_INSTEAD = {("scheduler", "link"), ("replicator", "link")}
ERRORS = ("EIO", "ENOSPC", "EROFS", "EINTR", "EMFILE", "ENOMEM")
WITH_SHORT = ("pwrite", "write")
WITH_SHORT_LINK = (*WITH_SHORT, "send", "recv")
LINK_ERRORS = ("EIO", "EINTR", "EMFILE", "ENOMEM", "ECONNRESET", "ETIMEDOUT")
LINK_CALLS = ("accept", "connect", "recv", "send")
START_CALLS = ("open", "fallocate", "mmap", "mkdir", "fsync", "pwrite", "write", "link", "rename", "unlink", "ftruncate")
N_LONG = 8
BTRFS = "0x9123683E"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


def rig_command(rig: Path, *arguments: object) -> dict[str, object]:
    """Return the command line of a rig."""
    path = os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "scripts", CHECKOUT / "tests")))
    return {"args": [sys.executable, "-P", str(rig), *map(str, arguments)], "env": os.environ | {"PYTHONPATH": path}, "text": True}


def fail_engine(shim: Path, folder: Path, mode: str, cases: list[list[str]], limit: int, seed: str, *options: str,
                rig: Path = RIG, **environment: str) -> list[dict]:
    """The rig's rows; the last one is its summary."""
    command = rig_command(rig, shim, folder, mode, json.dumps(cases), limit, seed, *options)
    done = subprocess.run(**command | {"env": command["env"] | environment}, capture_output=True, timeout=10_000)
    print(done.stdout[-8000:], done.stderr[-4000:])
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


def held(rows: list[dict]) -> dict:
    """The summary, once nothing was wrong."""
    *rows, last = rows
    bad = [(row["kind"], row["call"], row["errno"], row["how"], row["n"], row["bad"]) for row in rows if row["bad"]]
    assert (bad, last["summary"]["bad"]) == ([], [])
    return last["summary"]


def tell_and_judge(proof, what: str, left_out: int, all_rows: list[dict]) -> None:
    """`left_out`: cases that did not run; those in which the call did not come even once have shown nothing, and are added."""
    *rows, last = all_rows
    proof("failing disk, engine", what, failed_calls=sum(row["came"] for row in rows), acknowledged=last["summary"]["acknowledged"],
          left_out=left_out + sum(row["n"] == 1 and not row["came"] for row in rows),
          bad=sum(bool(row["bad"]) for row in rows) + len(last["summary"]["bad"]))
    held(all_rows)


def is_made(kind: str, call: str, mode: str) -> bool:
    return mode in ONLY_IN.get((kind, call), (mode,))


def never_came(rows: list[dict]) -> set[tuple[str, str]]:
    """The (kind, call) that failed in no case of it."""
    asked = {(row["kind"], row["call"]) for row in rows[:-1]}
    return asked - {(row["kind"], row["call"]) for row in rows[:-1] if row["came"]}


@pytest.mark.ci
def test_an_engine_reports_and_survives_a_failing_disk(shim, tmp_path, seed):
    rows = fail_engine(shim, tmp_path, "sync", SHORT_FORM, 1, seed, "--traffic", "30")
    summary = held(rows)
    assert all(row["came"] for row in rows[:-1]) and summary["acknowledged"] > 0 and summary["restarts"] == 1
    assert [row["kind"] for row in rows[:-1] if row["read_only"]] == ["flusher"]
    assert "allocator: cannot reserve space for the log" in rows[1]["reason"] and "No space left" in rows[1]["reason"]
    assert "reputter: write queue" in rows[3]["reason"] and "No space left" in rows[3]["reason"]
    assert rows[4]["reason"] == "supervisor: no session can be opened: Too many open files"
    assert "read-only from now on" in rows[5]["reason"] and "Input/output error" in rows[5]["reason"]


@pytest.mark.parametrize("mode, kind, file_system", usual([
    ("sync", "writer", ""), ("pool", "committer", ""), ("async", "writer", ""), ("async", "writer", BTRFS), ("async", "reputter", BTRFS),
], [("sync", "writer", "")], pytest.mark.ci))
def test_a_log_that_finds_no_room_waits_for_it_and_is_never_read_only(shim, tmp_path, seed, mode, kind, file_system):
    environment = {"PYENGINE_FAKED_FILE_SYSTEM": file_system} if file_system else {}
    cases = [[kind, "pwrite", "ENOSPC", "once"], [kind, "pwrite", "ENOSPC", "lasting"], [kind, "pwrite", "EDQUOT", "once"]]
    rows = fail_engine(shim, tmp_path, mode, cases, 2, seed, "--traffic", "30", **environment)
    summary = held(rows)
    assert all(row["came"] for row in rows[:-1]) and summary["acknowledged"] > 0
    assert (summary["restarts"], [row for row in rows[:-1] if row["read_only"]]) == (0, [])
    assert [row["reason"] for row in rows[:-1] if row["how"] == "lasting" and "No space left" in row["reason"]]


@pytest.mark.ci
def test_an_engine_survives_a_failing_write_of_a_large_async_pass(shim, tmp_path, seed):
    rows = fail_engine(shim, tmp_path, "async", [["writer", "pwrite", name, "once"] for name in ("SHORT", "EINTR", "EIO")], 2, seed,
                       "--traffic", "30")
    summary = held(rows)
    assert all(row["came"] for row in rows[:-1]) and summary["acknowledged"] > 0
    assert {row["errno"] for row in rows[:-1] if row["read_only"]} == {"EIO"}


@pytest.mark.ci
@pytest.mark.parametrize("mode, kind, step", [("sync", "writer", "pass_without_room"), ("pool", "committer", "pool_without_room")])
def test_the_successor_of_a_worker_killed_at_a_full_disk_loses_nothing(shim, tmp_path, seed, mode, kind, step):
    rows = fail_engine(shim, tmp_path, mode, [[kind, "pwrite", "ENOSPC", "once"]], 3, seed, "--traffic", "30",
                       PYENGINE_FAILPOINT=f"{step}@{kind}:1:kill")
    assert held(rows)["restarts"] == 0 and all(row["came"] and not row["read_only"] for row in rows[:-1])


@pytest.mark.long
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("kind", CALLS_OF)
@pytest.mark.parametrize("mode", ["sync", "async", "pool"])
def test_every_call_of_every_worker_fails_in_turn(shim, tmp_path, seed, proof, share, mode, kind):
    if kind == "committer" and mode != "pool":
        pytest.skip("a committer runs in pool mode only")
    cases = [[kind, call, name, how] for call in CALLS_OF[kind] if is_made(kind, call, mode)
             for name in (*ERRORS, *(("SHORT",) if call in WITH_SHORT else ()))
             for how in (("killed",) if (kind, call) in BY_A_SUCCESSOR else ("once", "lasting"))
             if how != "lasting" or name in ("ENOSPC", "EMFILE") and (kind, call) not in COPIED_INSTEAD]
    chosen = share(cases)
    rows = fail_engine(shim, tmp_path, mode, chosen, N_LONG, seed)
    tell_and_judge(proof, f"{kind}, {mode}", len(cases) - len(chosen), rows)
    assert len(chosen) < len(cases) or never_came(rows) == set()  # not each error hits: a share may have none that does


def cases_of_role(role: str) -> list[list[str]]:
    cases = []
    for kind, calls in CALLS_OF_ROLE[role].items():
        for call in calls:
            names = LINK_ERRORS if call in LINK_CALLS else ERRORS
            for name in (*names, *(("SHORT",) if call in WITH_SHORT_LINK else ())):
                if kind == "supervisor":
                    cases.append([kind, call, name, "start"])
                    continue
                cases.append([kind, call, name, "killed" if call in AT_A_BEGINNING else "once"])
                if (name in ("ENOSPC", "ECONNRESET") and kind == "replicator" and call not in AT_A_BEGINNING
                        and (kind, call) not in COPIED_INSTEAD):
                    cases.append([kind, call, name, "lasting"])
    return cases


@pytest.mark.long
@pytest.mark.parametrize("role", CALLS_OF_ROLE)
def test_a_link_that_breaks_and_a_note_that_cannot_be_written_are_told_and_survived(shim, tmp_path, seed, role):
    rows = fail_engine(shim, tmp_path, "sync", SHORT_PAIR, 1, seed, "--traffic", "30", "--role", role, rig=PAIR_RIG)
    assert held(rows)["acknowledged"] > 0 and all(row["came"] for row in rows[:-1])
    assert "how far the log is confirmed cannot be noted" in rows[1]["reason"] and "No space left" in rows[1]["reason"]


@pytest.mark.long
@pytest.mark.parametrize("rig, options", [(RIG, ()), (PAIR_RIG, ("--role", "slave"))])
def test_a_rig_that_is_ended_from_outside_leaves_no_process(shim, tmp_path, seed, rig, options):
    def left() -> list[int]:
        return [pid for store in ("store", "slave") for pid in processes_of(tmp_path / store, b"")]

    cases = json.dumps([["writer", "open", "EMFILE", "once"]] * 1000)
    with subprocess.Popen(**rig_command(rig, shim, tmp_path, "sync", cases, 1, seed, *options), stdout=subprocess.PIPE) as ended:
        try:
            ended.stdout.readline()  # it runs, and fails calls
        finally:
            ended.terminate()
    assert ended.returncode == -signal.SIGINT and left() == []


@pytest.mark.long
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("role", CALLS_OF_ROLE)
@pytest.mark.parametrize("mode", ["sync", "async", "pool"])
def test_every_call_of_both_ends_of_a_replication_fails_in_turn(shim, tmp_path, seed, proof, share, mode, role):
    cases = [case for case in cases_of_role(role) if is_made(*case[:2], mode)]
    chosen = share(cases)
    rows = fail_engine(shim, tmp_path, mode, chosen, N_LONG, seed, "--role", role, rig=PAIR_RIG)
    tell_and_judge(proof, f"replication, {role}, {mode}", len(cases) - len(chosen), rows)
    assert len(chosen) < len(cases) or never_came(rows) == set()


@pytest.mark.long
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("how", ["start", "stop"])
def test_every_call_of_a_start_and_a_stop_fails_in_turn(shim, tmp_path, seed, proof, share, how):
    cases = [["supervisor", call, name, how] for call in START_CALLS for name in ("EIO", "ENOSPC")]
    cases += [[kind, call, "EMFILE" if call == "open" else "EIO", how] for kind, calls in CALLS_OF.items()
              if kind not in ("supervisor", "committer") for call in calls]
    chosen = share(cases)
    rows = fail_engine(shim, tmp_path, "async", chosen, N_LONG, seed)
    tell_and_judge(proof, f"{how} of the engine", len(cases) - len(chosen), rows)
