"""Wrong paths, wrong stores, wrong sizes, no permission: one sentence, the right exit code, the store unharmed."""

from __future__ import annotations

import os

import pytest
from fix_cli import changes, environment, picture, run, spawn, without_override

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
COMMANDS = READING | {"check": [], "recover": [], "salvage": ["DEST"], "stop": [], "put": ["--topic", "t", "x"],
                      "ingest": ["--topic", "t", __file__], "export": ["DEST"], "metrics": ["--once"]}


def call(command: str, store: object, *more: object):
    return run(command, store, *COMMANDS[command], *more)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("what", "sentence"), [
    ("missing", "does not exist"), ("file", "is a file"), ("empty", "holds no store"), ("inside", "did you mean"),
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
    ("mappedFileSizeCommitLog=1048576", 2, "fixed at creation"),
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


@pytest.mark.parametrize("command", ["inspect", "get", "status", "check"])
@pytest.mark.parametrize("closed", ["", "commitlog", "commitlog/00000000000000000000"])
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
])
def test_wrong_arguments_are_usage_errors(golden, arguments):
    store = golden("empty")
    before = picture(store.root)
    ran = run(*[store.root if one == "STORE" else one for one in arguments])
    assert ran.code == 2 and ran.stdout == "" and ran.stderr
    assert changes(before, picture(store.root)) == []


def test_a_level_that_files_cannot_tell_is_refused(golden):
    ran = run("get", golden("basic").root, *READING["get"], "--level", "replicated")
    assert ran.code == 2 and "needs a running engine" in ran.stderr
