"""Wrong paths, wrong stores, wrong sizes, no permission: one sentence, the right exit code, the store unharmed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from itertools import product

import pytest

from faults.failing_calls import build_shim, preload
from fix_cli import SOURCES, changes, environment, picture, run, spawn, without_override
from fix_golden import usual

# Every command that opens an existing store, with the rest of its arguments.
READING = {
    "status": [],
    "inspect": [],
    "get": ["--topic", "T", "--queue-id", "0", "--offset", "0"],
    "tail": ["--topic", "T", "--no-follow"],
    "query": ["--topic", "T", "--key", "k"],
    "message": ["0"],
    "offset-at": ["--topic", "T", "--queue-id", "0", "--timestamp", "0"],
    "dump": ["checkpoint"],
}
COMMANDS = READING | {"check": [], "recover": [], "salvage": ["DEST"], "stop": [], "put": ["--topic", "t", "--timeout", "0.1", "x"],
                      "ingest": ["--topic", "t", __file__], "export": ["DEST"], "metrics": ["--once"]}


def call(command: str, store: object, *more: object):
    return run(command, store, *COMMANDS[command], *more)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("what", "sentence"), [
    ("missing", "makes a new store"), ("file", "is a file"), ("empty", "holds no store"), ("inside", "did you mean"),
])
def test_a_wrong_path_is_a_usage_error(tmp_path, golden, command, what, sentence):
    path = tmp_path / "there"
    if what == "file":
        path.write_text("hello")
    elif what == "empty":
        path.mkdir()
    elif what == "inside":
        path = golden("empty").root / "config"
        path.mkdir(exist_ok=True)
    before = picture(tmp_path)
    ran = call(command, path)
    assert ran.code == 2 and ran.stdout == "" and ran.stderr.count("\n") == 1
    assert sentence in ran.stderr and str(path) in ran.stderr
    assert changes(before, picture(tmp_path)) == []


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "dump"])
@pytest.mark.parametrize(("setting", "code", "sentence"), [
    ("mappedFileSizeCommitLog=32768", 2, "fixed at creation"),
    ("mappedFileSizeConsumeQueue=2000", 2, "fixed at creation"),
    ("maxHashSlotNum=65", 2, "fixed at creation"),
    ("flushDiskTyp=SYNC_FLUSH", 2, "did you mean flush_disk_type?"),
    ("put_timeout_ms=0", 2, "1 to 86,400,000 ms"),
    ("nonsense", 2, "key=value"),
])
def test_a_wrong_setting_is_a_usage_error(golden, command, setting, code, sentence):
    store = golden("basic")
    before = picture(store.root)
    ran = call(command, store.root, "--set", setting)
    assert ran.code == code and ran.stdout == "" and sentence in ran.stderr
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize("command", ["inspect", "get", "status", "query", "message", "offset-at"])
def test_a_segment_of_wrong_length_is_corruption(golden, command):
    """RocketMQ refuses such a store as well (load fails outright)."""
    store = golden("roll")
    segment = sorted((store.root / "commitlog").iterdir())[1]
    segment.write_bytes(segment.read_bytes()[:-100])
    before = picture(store.root)
    ran = call(command, store.root)
    assert ran.code == 3 and ran.stderr.startswith("error: ") and segment.name in ran.stderr
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize("command", ["inspect", "get", "status"])
def test_a_foreign_file_among_the_segments_is_corruption(golden, command):
    store = golden("basic")
    (store.root / "commitlog" / "notes.txt").write_text("mine")
    before = picture(store.root)
    ran = call(command, store.root)
    assert ran.code == 3 and "notes.txt" in ran.stderr
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize(("command", "closed"), usual(
    product(["inspect", "get", "status", "check"], ["", "commitlog", "commitlog/00000000000000000000"]),
    [("inspect", ""), ("get", "commitlog"), ("status", "commitlog"), ("check", "commitlog/00000000000000000000")], pytest.mark.ci))
def test_missing_permission_is_one_sentence(golden, command, closed):
    store = golden("basic")
    path = store.root / closed
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        ran = spawn(command, store.root, *COMMANDS[command], env=environment(), preexec_fn=without_override)
    finally:
        path.chmod(mode & 0o777)
    assert ran.code != 0 and ran.stdout == "", ran
    assert "ermission" in ran.stderr and str(store.root) in ran.stderr and "Traceback" not in ran.stderr


def test_a_read_only_directory_is_enough_to_read(golden):
    store = golden("basic")
    paths = [store.root, *store.root.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & 0o555)
    try:
        ran = spawn("inspect", store.root, "--json", env=environment(), preexec_fn=without_override)
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | 0o200)
    assert ran.code == 0 and len(ran.document["records"]) == len(store.verify["records"]), ran.stderr
    assert os.access(store.root, os.W_OK)


@pytest.mark.parametrize("arguments", [
    ["get", "STORE", "--topic", "T", "--queue-id", "-1", "--offset", "0"],
    ["get", "STORE", "--topic", "T", "--queue-id", "0", "--offset", "-1"],
    ["get", "STORE", "--topic", "T", "--queue-id", "0", "--offset", "0", "--max-messages", "0"],
    ["get", "STORE", "--topic", "T", "--queue-id", "0", "--offset", "0", "--level", "hopefully"],
    ["get", "STORE", "--topic", "T", "--queue-id", "0"],
    ["get", "--topic", "T"],
    ["query", "STORE", "--topic", "T", "--key", "k", "--begin", "yesterday"],
    ["offset-at", "STORE", "--topic", "T", "--queue-id", "0", "--timestamp", "soon"],
    ["message", "STORE"],
    ["tail", "STORE"],
    ["stop", "STORE", "--timeout", "nan"],
    ["start", "STORE", "--timeout", "inf"],
    ["top", "STORE", "--interval", "1e7"],
    ["clean", "STORE", "--older-than", "nan"],
    ["why", "STORE", "--since", "9" * 400 + "d"],
    ["metrics", "STORE", "--listen", "a..b:0"],
    ["plan", "--rate", "nan", "--size", "1"],
    ["plan", "--rate", "1", "--size", "1", "--lag", "9" * 400 + "d"],
    ["plan", "--rate", "1", "--size", "8GiB"],
])
def test_wrong_arguments_are_usage_errors(golden, arguments):
    store = golden("empty")
    before = picture(store.root)
    ran = run(*[store.root if one == "STORE" else one for one in arguments])
    assert ran.code == 2 and ran.stdout == "" and ran.stderr
    assert changes(before, picture(store.root)) == []


def test_a_level_that_files_cannot_tell_is_refused(golden):
    ran = run("get", golden("basic").root, *READING["get"], "--level", "replicated")
    assert ran.code == 2 and "nothing is replicated here" in ran.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_path_does_not_mean_this_directory(golden, command, monkeypatch):
    store = golden("basic")
    monkeypatch.chdir(store.root)
    before = picture(store.root)
    ran = call(command, "")
    assert ran.code == 2 and ran.stdout == ""
    assert ran.stderr == "error: STORE is empty: give a directory (. for this one)\n"
    assert changes(before, picture(store.root)) == []


@pytest.mark.parametrize("command", [*READING, "check", "recover", "salvage"])
@pytest.mark.parametrize("form", ["absolute", "relative", "dot", "slash", "upwards", "link"])
def test_a_store_is_found_by_any_path_to_it(golden, tmp_path, monkeypatch, command, form):
    folder = tmp_path / "my störe dir — '$(x)'"
    folder.mkdir()
    root = golden("basic").root.rename(folder / "a b\tc")
    (tmp_path / "link to it").symlink_to(root)
    monkeypatch.chdir(root if form == "dot" else tmp_path)
    relative = f"{folder.name}/{root.name}"
    given = {"absolute": str(root), "relative": relative, "dot": ".", "slash": f"{relative}//", "link": "link to it/",
             "upwards": f"{folder.name}/../{relative}"}[form]
    arguments = [tmp_path / "made ü" if one == "DEST" else one for one in COMMANDS[command]]
    arguments = ["TopicA1" if one == "T" else one for one in arguments]
    ran = run(command, given, *arguments)
    assert ran.code == 0 and ran.stderr == "", ran
    assert (tmp_path / "made ü" / "commitlog").is_dir() == (command == "salvage")


@pytest.mark.parametrize(("command", "closed", "code"), [
    ("start", "config", 2), ("recover", "lock", 1), ("put", "config/engine.toml", 2), ("salvage", "commitlog", 1),
    *usual([("start", "lock", 1), ("start", "commitlog", 1), ("recover", "config/engine.toml", 2), ("rebuild", "config", 2),
            ("stop", "lock", 1)], [], pytest.mark.ci),
])
def test_missing_permission_stops_what_would_write(golden, tmp_path, command, closed, code):
    store = golden("basic")
    assert run("recover", store.root).code == 0
    (store.root / "config" / "engine.toml").touch()
    (store.root / "lock").touch()
    path = store.root / closed
    before = picture(store.root)
    mode = path.stat().st_mode
    path.chmod(0)
    arguments = [tmp_path / "made" if one == "DEST" else one for one in COMMANDS.get(command, [])]
    try:
        ran = spawn(command, store.root, *arguments, env=environment(), preexec_fn=without_override)
    finally:
        path.chmod(mode & 0o777)
    assert ran.code == code and ran.stdout == "", ran
    assert "ermission denied" in ran.stderr and str(path) in ran.stderr and "Traceback" not in ran.stderr
    assert ran.stderr.startswith("error: ") and ran.stderr.count("\n") == 1
    assert set(changes(before, picture(store.root))) <= {".", "engine.log"}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("command", "name"), usual(
    product(["start", "recover", "check"], ["commitlog", "consumequeue", "index", "config"]),
    [("start", "commitlog"), ("recover", "consumequeue"), ("check", "index"), ("start", "config")], pytest.mark.ci))
def test_a_file_where_a_folder_should_be_is_named(golden, command, name):
    store = golden("basic")
    shutil.rmtree(store.root / name, ignore_errors=True)
    (store.root / name).write_text("hello")
    before = picture(store.root / name)
    ran = spawn(command, store.root, env=environment())
    assert ran.code in (1, 3) and "Traceback" not in ran.stderr, ran
    assert str(store.root / name) in ran.stderr or name in ran.stdout, ran
    assert picture(store.root / name) == before


@pytest.mark.parametrize("command", usual(["start", "recover", "clean", "promote"], ["start", "clean"], pytest.mark.ci))
def test_a_store_that_another_host_may_have_mounted_is_read_but_not_written(golden, tmp_path, command):
    store = golden("basic")
    before = picture(store.root)
    nfs = environment(**preload(build_shim(tmp_path)), PYENGINE_FAILING_FOLDERS=str(store.root), PYENGINE_FAKED_FILE_SYSTEM="0x6969")
    ran = spawn(command, store.root, env=nfs)
    assert ran.code == 2 and "NFS" in ran.stderr and "local disk" in ran.stderr, ran
    assert changes(before, picture(store.root)) == []
    assert spawn("inspect", store.root, "--json", env=nfs).document["facts"] == run("inspect", store.root, "--json").document["facts"]


@pytest.mark.parametrize(("command", "more"), [
    ("status", []), ("put", ["--topic", "t", "--timeout", "0.1", "x"]), ("quarantine", ["show"]),
])
def test_a_command_that_a_sentence_suggests_can_be_pasted_whatever_the_path_holds(tmp_path, golden, command, more):
    root = tmp_path / "it's a store"
    shutil.copytree(golden("basic").root, root)
    ran = run(command, root, *more)
    (pasted,) = re.findall("`(pyengine [^`]*)`", ran.stdout + ran.stderr)
    assert str(root) in shlex.split(pasted)
    assert run(*shlex.split(pasted)[1:], "--help").code == 0


def test_no_sentence_has_a_path_in_a_command_as_it_is():
    """pyengine.errors.command quotes it."""
    raw = re.compile(r"pyengine [a-z-]+(?: [A-Z]+)* *(?:\"\s+f\")?{(?!action})[^}]*}")
    folder = SOURCES / "pyengine"
    found = {path.name: raw.findall(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    assert {name: ones for name, ones in found.items() if ones} == {}
