"""The power-cut model finds what a careless writer loses, and nothing wrong with a careful one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from faults.power_cut import Disk, Record, build_shim, cut_points, explore, read_journal, shim_environment
from fix_golden import usual
from in_child import InChild
from waiting import scaled_timeout_s

# A store of numbered 700-byte lines in files of 40 lines; argv: folder, acks, what it forgets.
TOY = """
import mmap, os, sys
from pyengine.storage.durable_writes import create_file
folder, acks, forgets = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND), sys.argv[3]
os.mkdir(folder)
names = os.open(folder, os.O_RDONLY)
for number in range(160):
    part, place = divmod(number, 40)
    if place == 0:
        if forgets == "nothing, with create_file":
            fd = create_file(folder, f"{part:03}", 40 * 700, allocate="full")
        else:
            fd = os.open(f"{folder}/{part:03}", os.O_CREAT | os.O_RDWR)
            os.posix_fallocate(fd, 0, 40 * 700)
        if forgets not in ("folder", "nothing, with create_file"):
            os.fsync(names)
    line = b"%08d" % number + bytes([65 + number % 26]) * 692
    if forgets.endswith("through a mapping"):
        with mmap.mmap(fd, 40 * 700) as mapping:
            mapping[place * 700 : place * 700 + 700] = line
    else:
        os.pwrite(fd, line, place * 700)
    if forgets == "order":
        os.write(acks, b"%d\\n" % number)
    if not forgets.startswith("sync"):
        os.fdatasync(fd)
    if forgets != "order":
        os.write(acks, b"%d\\n" % number)
"""


def toy_check(tree: Path, acks: list[bytes]) -> str | None:
    """Every acknowledged line must be there, whole."""
    for ack in acks:
        part, place = divmod(int(ack), 40)
        try:
            line = (tree / f"{part:03}").read_bytes()[place * 700 : place * 700 + 700]
        except OSError as error:
            return str(error)
        if line != b"%08d" % int(ack) + bytes([65 + int(ack) % 26]) * 692:
            return f"line {int(ack)} is not what was acknowledged"
    return None


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def run_toy(shim, tmp_path):
    def run(forgets: str):
        root, acks, journal = tmp_path / "all" / "store", tmp_path / "acks", tmp_path / "journal"
        root.parent.mkdir()
        acks.touch()
        environ = os.environ | shim_environment(shim, journal, root.parent, acks, ["store"] if "mapping" in forgets else [])
        subprocess.run([sys.executable, "-c", TOY, str(root), str(acks), forgets], env=environ, check=True, timeout=scaled_timeout_s(60))
        return root, read_journal(journal)

    return run


@pytest.mark.parametrize("forgets", usual(["nothing", "nothing, with create_file", "nothing, through a mapping"], ["nothing"],
                                          pytest.mark.ci))
def test_a_careful_writer_loses_nothing(run_toy, tmp_path, seed, forgets):
    root, records = run_toy(forgets)
    outcome = explore(records, root, toy_check, states=300, seed=seed, scratch=tmp_path / "scratch")
    assert (outcome.bad, outcome.states, outcome.acknowledged) == ([], 300, 160)


@pytest.mark.parametrize("forgets", ["sync", "folder", "order", "sync, through a mapping"])
def test_a_careless_writer_is_caught(run_toy, tmp_path, seed, forgets):
    root, records = run_toy(forgets)
    outcome = explore(records, root, toy_check, states=300, seed=seed, scratch=tmp_path / "scratch", stop_at=1)
    assert outcome.bad, f"forgetting {forgets} was not found"


@pytest.mark.parametrize("check, caught", [(lambda tree, acks: "LOST", 3), (lambda tree, acks: str(1 + "1"), 0)],
                         ids=("judged", "raises"))
def test_a_judge_that_raises_has_caught_nothing_and_passes_nothing(tmp_path, seed, check, caught):
    outcome = explore([], tmp_path / "store", InChild(check), states=3, seed=seed, scratch=tmp_path / "scratch")
    assert (len(outcome.bad), len(outcome.caught)) == (3, caught)


def test_equal_seeds_give_equal_states(run_toy, tmp_path):
    root, records = run_toy("sync")
    runs = [explore(records, root, toy_check, states=60, seed="s", scratch=tmp_path / name) for name in ("a", "b")]
    assert runs[0].bad == runs[1].bad != []


def test_a_replay_of_the_whole_journal_equals_the_folder_on_disk(run_toy, tmp_path):
    """The journal is complete: everything it saw, applied, is the folder itself."""
    root, records = run_toy("nothing")
    disk = Disk()
    for record in records:
        disk.feed(record)
    assert {Path(name).name for name, inode in disk.names.items() if inode} == {path.name for path in root.iterdir()}
    for name, inode in disk.names.items():
        if inode:
            assert bytes(disk.files[inode].safe) == Path(name).read_bytes()


def test_the_number_of_an_inode_that_is_given_again_is_another_file():
    disk = Disk()
    for record in (Record("F", 7, 0, b"", b""), Record("W", 7, 0, b"old", b""), Record("b", 7, 1, b"", b""),
                   Record("e", 7, 1, b"", b""), Record("N", 7, 0, b"/s/old", b""), Record("b", 1, 2, b"/s", b""),
                   Record("e", 1, 2, b"/s", b""), Record("U", 0, 0, b"/s/old", b""), Record("F", 7, 0, b"", b""),
                   Record("W", 7, 0, b"new", b""), Record("b", 7, 3, b"", b""), Record("e", 7, 3, b"", b""),
                   Record("N", 7, 0, b"/s/new", b"")):
        disk.feed(record)
    assert bytes(disk.files[disk.names["/s/old"]].safe) == b"old"  # its removal is not safe
    for record in (Record("b", 1, 4, b"/s", b""), Record("e", 1, 4, b"/s", b"")):
        disk.feed(record)
    assert disk.clean and list(disk.names) == ["/s/new"]
    assert bytes(disk.files[disk.names["/s/new"]].safe) == b"new"


def test_a_file_whose_rename_was_not_recorded_by_a_killed_process_is_known_at_its_next_rename(tmp_path):
    disk = Disk()
    for record in (Record("F", 7, 0, b"", b""), Record("N", 7, 0, b"/s/.tmp", b""), Record("W", 7, 0, b"kept", b""),
                   Record("b", 7, 1, b"", b""), Record("e", 7, 1, b"", b""), Record("b", 1, 2, b"/s", b""), Record("e", 1, 2, b"/s", b""),
                   Record("F", 8, 0, b"", b""), Record("N", 8, 0, b"/s/.tmp", b""),  # .tmp became /s/file, unrecorded
                   Record("b", 1, 3, b"/s", b""), Record("e", 1, 3, b"/s", b""), Record("R", 7, 0, b"/s/file", b"/s/moved"),
                   Record("b", 1, 4, b"/s", b""), Record("e", 1, 4, b"/s", b"")):
        disk.feed(record)
    disk.cut(random.Random(1), "/s", tmp_path / "tree")
    assert (tmp_path / "tree" / "moved").read_bytes() == b"kept"


def test_a_hole_is_written_down_as_far_as_the_file_reaches(shim, tmp_path):
    store, journal = tmp_path / "store", tmp_path / "journal"
    store.mkdir()
    script = ("import os, sys; from pyengine.native.flush import punch; fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR);"
              " os.write(fd, bytes(5000)); os.unlink(sys.argv[1]); code = punch(fd, 4096, 64 << 20); assert not code, code")
    environ = os.environ | shim_environment(shim, journal, store, tmp_path / "acks")
    subprocess.run([sys.executable, "-c", script, str(store / "file")], env=environ, check=True, timeout=scaled_timeout_s(60))
    assert [(record.number, len(record.a)) for record in read_journal(journal) if record.kind == "W"] == [(0, 5000), (4096, 904)]


def test_suspicious_acknowledgements_are_cut_first(run_toy):
    _, records = run_toy("order")
    points = cut_points(records, 300, random.Random(1))
    behind_acks = [point for point in points if point and records[point - 1].kind == "A"]
    assert len(behind_acks) > 150
