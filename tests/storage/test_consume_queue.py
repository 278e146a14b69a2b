"""Consume queue extensions, written: units as RocketMQ lays them out, no leftovers, found through the entries."""

from __future__ import annotations

import os
import shutil

import pytest

from dying import run_and_die_at
from logs import Log, files_below
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.errors import DiskFullError, StoreRefusedError
from pyengine.formats.consume_queue import ENTRY, decode_ext_address, is_ext_address, unpack_ext_unit
from pyengine.storage.check.check import check
from pyengine.storage.consume_queue import settle_ext_end
from pyengine.storage.dispatcher import Dispatcher
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.rebuild import rebuild
from pyengine.storage.recovery.recover import recover
from pyengine.storage.store_reader import StoreReader
from record_bytes import pack_ext_unit

EXT = EngineConfig(enable_consume_queue_ext=True)


def laid_out(units: list[bytes], file_bytes: int) -> dict[int, bytes]:
    """start -> file, as ConsumeQueueExt.put lays units out: four bytes stay free, size -1 closes a file."""
    files, start, content = {}, 0, b""
    for unit in units:
        if len(unit) > file_bytes - len(content) - 4:
            files[start] = (content + b"\xff\xff").ljust(file_bytes, b"\0")
            start, content = start + file_bytes, b""
        content += unit
    if content:
        files[start] = content.ljust(file_bytes, b"\0")
    return files


def ext_files(root, topic, queue_id):
    folder = root / "consumequeue_ext" / topic / str(queue_id)
    return {int(path.name): path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def cqext(golden):
    return golden("cqext")


def dispatched(store, root, **settings):
    geometry = Geometry(**store.sizes)
    with Dispatcher(root, geometry, EngineConfig(enable_consume_queue_ext=True), **settings) as dispatcher:
        Log(store.root, geometry.mapped_file_size_commit_log_bytes).dispatch(dispatcher)
    return geometry.mapped_file_size_consume_queue_ext_bytes


def queues_of(store):
    return [(queue["topic"], queue["queueId"], queue["entries"]) for queue in store.manifest["facts"]["queues"]]


def test_the_layout_is_rocketmq_s(cqext):
    """The model that the next test measures us by, measured by RocketMQ's own files (with bit maps)."""
    for topic, queue_id, entries in queues_of(cqext):
        units = [pack_ext_unit(entry["tagsCode"], entry["storeTs"], bytes.fromhex(entry["bitMap"])) for entry in entries]
        assert ext_files(cqext.root, topic, queue_id) == laid_out(units, cqext.sizes["mapped_file_size_consume_queue_ext_bytes"])


def test_units_and_entries_come_out_as_a_broker_without_filters_writes_them(cqext, tmp_path):
    file_bytes = dispatched(cqext, tmp_path / "new")
    for topic, queue_id, entries in queues_of(cqext):
        units = [pack_ext_unit(entry["tagsCode"], entry["storeTs"]) for entry in entries]
        made = ext_files(tmp_path / "new", topic, queue_id)
        assert made == laid_out(units, file_bytes)
        ours = b"".join(path.read_bytes() for path in sorted((tmp_path / "new/consumequeue" / topic / str(queue_id)).iterdir()))
        for number, entry in enumerate(entries):
            offset, size_bytes, address = ENTRY.unpack_from(ours, 20 * number)
            assert (offset, size_bytes) == (entry["phy"], entry["size"]) and is_ext_address(address)
            at = decode_ext_address(address)
            unit = unpack_ext_unit(made[at - at % file_bytes], at % file_bytes)
            assert (unit.tags_code, unit.store_timestamp_ms, unit.filter_bit_map) == (entry["tagsCode"], entry["storeTs"], b"")


def test_dispatching_again_changes_nothing(cqext, tmp_path):
    dispatched(cqext, tmp_path / "new")
    before = files_below(tmp_path / "new" / "consumequeue"), files_below(tmp_path / "new" / "consumequeue_ext")
    dispatched(cqext, tmp_path / "new")
    assert (files_below(tmp_path / "new" / "consumequeue"), files_below(tmp_path / "new" / "consumequeue_ext")) == before


def test_few_descriptors_are_enough(cqext, tmp_path):
    dispatched(cqext, tmp_path / "many")
    dispatched(cqext, tmp_path / "few", open_files_max=1)
    assert files_below(tmp_path / "few" / "consumequeue_ext") == files_below(tmp_path / "many" / "consumequeue_ext")


def test_a_reader_finds_tags_through_what_was_written(cqext, tmp_path):
    shutil.rmtree(cqext.root / "consumequeue_ext")
    shutil.rmtree(cqext.root / "consumequeue")
    recover(MessageStore(cqext.root, Geometry(**cqext.sizes)), options=EXT)
    assert (cqext.root / "consumequeue_ext").is_dir()
    with StoreReader(cqext.root, **cqext.sizes) as reader:
        found = reader.get_message("Ext1", 1, 0, tags="TagB").messages
    assert found and {message.tags for message in found} == {"TagB"}
    assert check(MessageStore(cqext.root, Geometry(**cqext.sizes))).findings == []


@pytest.mark.parametrize("cut", ["units", "entries"])
def test_ext_units_that_no_entry_names_are_cleared_and_written_again(cqext, tmp_path, cut):
    """A dispatcher killed between unit and entry, and a queue that recovery has cut."""
    root = tmp_path / "new"
    file_bytes = dispatched(cqext, root)
    whole = files_below(root / "consumequeue_ext"), files_below(root / "consumequeue")
    topic, queue_id, entries = queues_of(cqext)[0]
    queue, ext = root / "consumequeue" / topic / str(queue_id), root / "consumequeue_ext" / topic / str(queue_id)
    if cut == "units":
        last = sorted(ext.iterdir())[-1]
        used = len(last.read_bytes().rstrip(b"\0")) + 1
        with open(last, "r+b") as file:
            file.seek(used)
            file.write(b"\0\x1c" + b"orphan" * 5)
        expected = whole
    else:
        newest = sorted(queue.iterdir())[-1]
        newest.unlink()
        expected = None
    end = settle_ext_end(queue, ext, 400, file_bytes)
    assert end == settle_ext_end(queue, ext, 400, file_bytes)
    assert not any(ext_files(root, topic, queue_id)[end - end % file_bytes][end % file_bytes :]) if end % file_bytes else True
    if expected:
        assert (files_below(root / "consumequeue_ext"), files_below(root / "consumequeue")) == expected
    dispatched(cqext, root)
    assert (files_below(root / "consumequeue_ext"), files_below(root / "consumequeue")) == whole


def test_a_disk_that_is_full_for_a_while_leaves_no_hole_between_units(cqext, tmp_path):
    from pyengine.storage import dispatcher as module

    root, failures = tmp_path / "new", [0]
    real = module.open_ext_file

    def full(*arguments):
        failures[0] += 1
        if failures[0] in (2, 4):
            raise DiskFullError("no room")
        return real(*arguments)

    geometry = Geometry(**cqext.sizes)
    log = Log(cqext.root, geometry.mapped_file_size_commit_log_bytes)
    with pytest.MonkeyPatch.context() as patch, Dispatcher(root, geometry, EngineConfig(enable_consume_queue_ext=True)) as dispatcher:
        patch.setattr(module, "open_ext_file", full)
        for _ in range(2):
            with pytest.raises(DiskFullError):
                log.dispatch(dispatcher)
        log.dispatch(dispatcher)
    dispatched(cqext, tmp_path / "other")
    assert files_below(root / "consumequeue_ext") == files_below(tmp_path / "other" / "consumequeue_ext")
    assert files_below(root / "consumequeue") == files_below(tmp_path / "other" / "consumequeue")


def test_killed_at_any_system_call_the_next_dispatcher_comes_to_the_same(cqext, tmp_path, rng, request):
    dispatched(cqext, tmp_path / "whole")
    whole = files_below(tmp_path / "whole" / "consumequeue_ext"), files_below(tmp_path / "whole" / "consumequeue")
    stride = 1 if request.config.run_long else 12
    step, done = rng.randrange(stride), False
    while not done:
        root = tmp_path / f"killed-{step}"
        done = run_and_die_at(step, lambda: dispatched(cqext, root), ("open", "close", "ftruncate", "fsync"))
        dispatched(cqext, root)
        assert (files_below(root / "consumequeue_ext"), files_below(root / "consumequeue")) == whole, step
        step += stride
    assert step > 20


def test_a_rebuild_makes_the_extension_again(cqext):
    geometry = Geometry(**cqext.sizes)
    shutil.rmtree(cqext.root / "consumequeue")
    rebuild(MessageStore(cqext.root, geometry), options=EXT)
    assert (cqext.root / "quarantine/rebuild-1/consumequeue_ext").is_dir()
    for topic, queue_id, entries in queues_of(cqext):
        units = [pack_ext_unit(entry["tagsCode"], entry["storeTs"]) for entry in entries]
        assert ext_files(cqext.root, topic, queue_id) == laid_out(units, geometry.mapped_file_size_consume_queue_ext_bytes)
    assert check(MessageStore(cqext.root, geometry)).findings == []


def test_a_file_of_another_length_is_refused(cqext, tmp_path):
    dispatched(cqext, tmp_path / "new")
    newest = sorted((tmp_path / "new/consumequeue_ext/Ext1/0").iterdir())[-1]
    os.truncate(newest, 100)
    with pytest.raises(StoreRefusedError):
        settle_ext_end(tmp_path / "new/consumequeue/Ext1/0", newest.parent, 400, 512)


@pytest.mark.parametrize("damage", ["another length", "a pipe", "a file for the folder"])
def test_an_extension_that_cannot_be_used_is_refused_before_anything_is_changed(cqext, damage):
    folder = cqext.root / "consumequeue_ext"
    newest = sorted((folder / "Ext1/0").iterdir())[-1]
    if damage == "another length":
        os.truncate(newest, 100)
    elif damage == "a pipe":
        newest.unlink()
        os.mkfifo(newest)
    else:
        shutil.rmtree(folder)
        folder.write_bytes(b"x")
    (cqext.root / "abort").write_bytes(b"")
    before = files_below(cqext.root)
    with pytest.raises(StoreRefusedError):
        recover(MessageStore(cqext.root, Geometry(**cqext.sizes)), options=EXT)
    assert files_below(cqext.root) == before


def test_a_unit_that_is_not_its_message_s_is_found_and_made_again(cqext):
    file = cqext.root / "consumequeue_ext" / "Ext1" / "0" / ("0" * 20)
    content = bytearray(file.read_bytes())
    content[17] ^= 1
    content[28:30] = b"\0\0"
    file.write_bytes(content)
    geometry = Geometry(**cqext.sizes)
    report = check(MessageStore(cqext.root, geometry))
    assert [finding.kind for finding in report.findings] == ["extension"] * 2 and report.grade.label == "repairable"
    rebuild(MessageStore(cqext.root, geometry))
    assert check(MessageStore(cqext.root, geometry)).findings == []


def test_an_entry_that_leads_to_a_segments_last_bytes_is_found(builder):
    """Nothing begins there whose store time could be looked at."""
    for _ in range(40):
        builder.put("T", b"x" * 100, tags="a", dispatch=False)
    recover(MessageStore(builder.root, builder.geometry), options=EngineConfig(enable_consume_queue_ext=True))
    assert check(MessageStore(builder.root, builder.geometry)).findings == []
    with open(builder.queue_file("T", 0), "r+b") as file:
        file.seek(5 * 20)
        file.write((builder.geometry.mapped_file_size_commit_log_bytes - 8).to_bytes(8, "big"))
    assert {finding.kind for finding in check(MessageStore(builder.root, builder.geometry)).findings} == {"wrong entry", "missing entries"}
