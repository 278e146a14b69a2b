"""Random documents in every small file: an error or a damaged file, never a traceback or an endless wait."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from fix_cli import HOSTILE_JSON, run
from pyengine.engine.log_file import open_log
from pyengine.errors import DiskError, EngineError
from pyengine.formats.small_file import Checkpoint, read_small_file
from pyengine.ipc.shared_objects import find_folder
from pyengine.ipc.store_lock import StoreLock, living_kinds, read_holder
from pyengine.storage.checkpoint import (
    REBUILD,
    create_abort_file,
    read_checkpoint,
    read_cut,
    read_marker,
    read_watermark,
    write_checkpoint,
)
from pyengine.storage.config import load_config
from pyengine.storage.config_table import TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets, DelayOffsets
from pyengine.storage.engine_id import read_engine_id, read_epoch
from pyengine.storage.inspect import raw_checkpoint
from pyengine.storage.read_level import store_use
from pyengine.storage.replication_state import ReplicationStateFile

TEXTS = (
    b"[" * 100_000, b'{"a":' * 50_000, b"1e999", b'{"offsetTable":{1:1e999}}', b'{"topicConfigTable":{"T":{"writeQueueNums":1e400}}}',
    b'{"uuid":1e999,"device":1e999,"inode":1e999}', b'{"flushed":1e999,"epoch":1e999,"uuid":"x"}', b'{"path":"normal","scan_from":1e999}',
    b'{"at":1e999,"end":1e999,"reason":"","kept":1}', b'{"shm_directory":1e999}', b"a=" + b"[" * 50_000,
)
READERS = {
    "consumerOffset.json": lambda root: ConsumerOffsets(root).groups(),
    "delayOffset.json": lambda root: DelayOffsets(root).read(),
    "topics.json": lambda root: TopicConfigs(root).read(),
    "watermark": read_watermark,
    "recovery": read_marker,
    "rebuild": lambda root: REBUILD.read(root).record,
    "cut": read_cut,
    "engine-id": read_engine_id,
    "engine-run": find_folder,
    "engine.toml": lambda root: load_config(root, environ={}),
}


@pytest.mark.parametrize("name", READERS)
def test_a_random_document_is_reported_or_counts_as_damaged(tmp_path, name):
    (tmp_path / "config").mkdir()
    (tmp_path / "commitlog").mkdir()
    for text in TEXTS:
        (tmp_path / "config" / name).write_bytes(text)
        try:
            READERS[name](tmp_path)
        except EngineError as error:
            assert str(error), text[:40]


def open_log_told(root):
    try:
        open_log(root).close()
    except OSError as error:  # as the command tells it
        assert error.filename == str(root / "engine.log")


# In the store's folder, or in config/ below it.
PIPES = {f"config/{name}": reader for name, reader in READERS.items()} | {
    "config/epoch": read_epoch,
    "config/replication.json": lambda root: ReplicationStateFile(root).read(),
    "checkpoint": lambda root: (raw_checkpoint(root), read_checkpoint(root)),
    "abort": create_abort_file,
    "engine.log": open_log_told,
    "lock": lambda root: (store_use(root), read_holder(root), living_kinds(root), StoreLock(root)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", PIPES)
@pytest.mark.parametrize("suffix", ["", ".bak"])
def test_a_named_pipe_in_place_of_a_file_blocks_no_reader(tmp_path, name, suffix):
    (tmp_path / "config").mkdir()
    (tmp_path / "commitlog").mkdir()
    os.mkfifo(tmp_path / f"{name}{suffix}")
    try:
        PIPES[name](tmp_path)
    except EngineError as error:
        assert str(error)


@pytest.mark.timeout(20)
def test_the_next_commit_renames_a_pipe_in_place_of_the_offsets(tmp_path):
    (tmp_path / "config").mkdir()
    os.mkfifo(tmp_path / "config" / "consumerOffset.json")
    ConsumerOffsets(tmp_path).commit("T", "g", {0: 5})
    assert ConsumerOffsets(tmp_path).read("T", "g") == {0: 5}


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_checkpoint_is_reported(tmp_path):
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(DiskError, match="checkpoint: it is not a regular file"):
        read_checkpoint(tmp_path)
    with pytest.raises(DiskError, match="checkpoint"):
        write_checkpoint(tmp_path, Checkpoint())


def test_a_small_file_of_endless_length_is_not_read(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 20)
    with pytest.raises(OSError, match="longer than 1,000 bytes"):
        read_small_file(tmp_path / "large", 1000)
    assert len(read_small_file(tmp_path / "large")) == 1 << 20


def test_a_small_file_takes_no_more_memory_than_it_is_long(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 100)
    tracemalloc.start()
    try:
        assert read_small_file(tmp_path / "small") == b"x" * 100
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", HOSTILE_JSON.values(), ids=HOSTILE_JSON)
def test_a_random_list_of_acknowledged_messages_is_refused_in_a_sentence(builder, tmp_path, content):
    builder.put("T", b"x")
    (tmp_path / "file").write_bytes(content)
    done = run("check", builder.root, "--acked", tmp_path / "file")
    assert done.code in (1, 2) and "error: " in done.stderr and "Traceback" not in done.stderr
