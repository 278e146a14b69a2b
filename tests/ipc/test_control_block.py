"""The engine's memory: made by one process, attached by others, refused while it is not whole."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fix_owner import identity_of
from pyengine._native import ffi, lib
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.control_block import LIMITS, EngineMemory, read_run_settings, reload_settings
from pyengine.ipc.sessions import Sessions
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.storage.config import SETTINGS, EngineConfig
from pyengine.storage.engine_id import read_boot_id
from waiting import eventually, scaled_timeout_s

FIELDS = {"epoch": 7, "segment_bytes": 65536, "mode": native.MODE_SYNC, "lock_modified_ns": 123456789, "sysv_semaphore_id": 5}


@pytest.fixture
def memory(folder, engine_id):
    with EngineMemory.create(folder, identity_of(engine_id, **FIELDS)) as made:
        yield made


def test_attached_memory_has_the_identity_and_counters_of_the_supervisor(memory, folder, engine_id):
    memory.publish()
    with EngineMemory.attach(folder) as other, EngineMemory.attach(folder, writable=False) as reader:
        for identity in (memory.identity, other.identity, reader.identity):
            assert {name: getattr(identity, name) for name in FIELDS} == FIELDS
        native.store_position(memory.control.flushed, 4096)
        assert native.load_position(reader.control.flushed) == 4096
        assert (reader.store_uuid, reader.boot_id) == (engine_id.uuid, read_boot_id())


def test_one_byte_that_was_written_over_is_noticed(memory):
    memory.publish()
    assert memory.identity.epoch == 7 and not memory.is_overwritten
    memory.control.identity.epoch = 8
    assert memory.is_overwritten
    memory.control.identity.epoch = 7
    assert not memory.is_overwritten
    memory.control.identity.magic = 0
    assert memory.is_overwritten


def test_the_latch_is_the_same_from_both_sides(memory, folder):
    memory.publish()
    with EngineMemory.attach(folder) as other:
        latch = memory.latch(native.WRITER)
        latch.arm()
        other.wake(native.WRITER)
        assert latch.wait(10)
        latch.arm()
        other.wake(native.FLUSHER)
        assert not latch.wait(0.01)


def test_an_unpublished_block_is_refused(memory, folder):
    with pytest.raises(EngineUnavailableError, match="not published yet"):
        EngineMemory.attach(folder)


def test_another_layout_is_named(memory, folder):
    memory.publish()
    memory.control.identity.layout_version += 1
    with pytest.raises(EngineUnavailableError, match="another version of pyengine"):
        EngineMemory.attach(folder)


@pytest.mark.parametrize(("part", "field", "value"), [
    ("identity", "mode", 77), ("identity", "role", 3), ("identity", "segment_bytes", 0), ("identity", "segment_bytes", -1),
    ("identity", "sessions_max", 1 << 31), ("identity", "pool_buffers", 0xFFFFFFFF), ("state", "state", 99)])
def test_control_values_that_no_engine_writes_are_refused(memory, folder, part, field, value):
    memory.publish()
    setattr(getattr(memory.control, part), field, value)
    with pytest.raises(EngineUnavailableError, match="it was written over"):
        EngineMemory.attach(folder)


def test_a_short_block_is_refused(memory, folder):
    memory.publish()
    with open(folder.path / "control", "r+b") as file:
        file.truncate(8192)
    with pytest.raises(EngineUnavailableError, match="short"):
        EngineMemory.attach(folder)


def test_without_engine_there_is_nothing_to_attach(folder):
    with pytest.raises(EngineUnavailableError, match="no engine"):
        EngineMemory.attach(folder)


def test_names_that_cannot_be_listed_now_are_not_missing(memory, folder, monkeypatch):
    memory.publish()
    assert "settings" in memory.missing_names()  # which nothing makes here

    def listdir(path):
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    monkeypatch.setattr(os, "listdir", listdir)
    assert memory.missing_names() == [] == Sessions(memory).sweep_objects()


def test_a_producer_cannot_write_the_control_block(memory, folder):
    memory.publish()
    script = ("import faulthandler, sys; from pathlib import Path\n"
              "faulthandler.disable()\n"
              "from pyengine.ipc.control_block import EngineMemory\n"
              "from pyengine.ipc.shared_objects import SharedFolder\n"
              "from pyengine.native import control\n"
              "memory = EngineMemory.attach(SharedFolder(sys.argv[1]), writable=False)\n"
              "print('attached', flush=True)\n"
              "control.store_position(memory.control.flushed, 1)\n")
    done = subprocess.run([sys.executable, "-c", script, str(folder.path)], capture_output=True, text=True, timeout=scaled_timeout_s(60))
    assert (done.stdout, done.returncode) == ("attached\n", -11)
    assert native.load_position(memory.control.flushed) == 0


def test_a_retired_block_wakes_its_sleepers(memory, folder):
    memory.publish()
    with EngineMemory.attach(folder, writable=False) as reader:
        assert not reader.retired
        seen = [waiting.load_sequence(number) for number in
                (reader.control.flush_seq, reader.control.arrival_seq, reader.control.session_seq)]
        memory.retire()
        assert reader.retired
        for before, number in zip(seen, (reader.control.flush_seq, reader.control.arrival_seq, reader.control.session_seq)):
            assert waiting.wait_for_sequence(number, before, 0)


def test_a_sleeper_is_woken_from_another_process(memory, folder):
    memory.publish()
    script = ("import sys\n"
              "from pyengine.ipc.control_block import EngineMemory\n"
              "from pyengine.ipc.shared_objects import SharedFolder\n"
              "from pyengine.native import waiting\n"
              "memory = EngineMemory.attach(SharedFolder(sys.argv[1]), writable=False)\n"
              "number = memory.control.arrival_seq\n"
              "seen = waiting.load_sequence(number)\n"
              "print('looking', flush=True)\n"
              "print(waiting.wait_for_sequence(number, seen, 60))\n")
    child = subprocess.Popen([sys.executable, "-c", script, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "looking\n"
    waiting.raise_sequence(memory.control.arrival_seq)
    assert child.communicate(timeout=scaled_timeout_s(60))[0] == "True\n"


@pytest.mark.parametrize(("was", "asked", "in_file", "live", "runs", "origin"), [
    ((500, "default"), (300, "engine.toml"), 300, None, 300, "engine.toml"),   # the file was edited
    ((300, "engine.toml"), (500, "default"), None, None, 500, "default"),      # ... or a line of it removed
    ((700, "--set"), (300, "engine.toml"), 300, None, 700, "--set"),           # a successor that is not given what the first one was
    ((700, "--set"), (700, "--set"), 300, None, 700, "--set"),
    ((700, "--set"), (700, "--set"), 300, 300, 300, "live"),                   # `config set`
    ((700, "environment"), (900, "--set"), None, None, 900, "--set"),
    ((300, "live"), (700, "--set"), 300, None, 300, "live"),                   # SIGHUP afterwards
    ((300, "live"), (700, "--set"), 200, None, 200, "live"),
    ((300, "live"), (700, "--set"), None, None, 700, "--set"),
    ((500, "default"), (500, "default"), 500, 500, 500, "live"),
])
def test_a_reload_gives_a_live_setting_its_value_and_origin(was, asked, in_file, live, runs, origin):
    name = "flush_interval_commit_log_ms"
    config, changed, later = reload_settings(
        EngineConfig(**{name: was[0]}, origins={name: was[1]}), EngineConfig(**{name: asked[0]}, origins={name: asked[1]}),
        {} if in_file is None else {name: in_file}, {} if live is None else {name: live})
    assert (getattr(config, name), config.origins[name]) == (runs, origin)
    assert len(changed) == (was[0] != runs) and later == []


def test_a_changed_setting_that_needs_a_restart_is_named_and_not_applied():
    asked = EngineConfig(flush_disk_type="SYNC_FLUSH", origins={"flush_disk_type": "engine.toml"})
    config, changed, later = reload_settings(EngineConfig(), asked, {"flush_disk_type": "SYNC_FLUSH"}, {})
    assert config == EngineConfig() and changed == []
    assert later == ["flush_disk_type = SYNC_FLUSH (engine.toml) needs a restart, ASYNC_FLUSH runs"]


def test_changed_settings_and_limits_are_there_before_the_number_rises(make_owner):
    owner = make_owner()
    owner.make_rest()
    owner.publish()
    owner.memory.open_latches()
    with EngineMemory.attach(owner.folder, writable=False) as worker:
        before = waiting.load_sequence(worker.control.settings_seq)
        config = replace(owner.config, put_timeout_ms=7, session_ring_bytes=65_536, file_reserved_time_hours=3)
        assert owner.memory.change_run_settings(config) == waiting.load_sequence(worker.control.settings_seq) == before + 1
        assert read_run_settings(worker.folder) == config
        assert (worker.identity.put_timeout_ms, worker.identity.session_ring_bytes_default) == (7, 65_536)
        assert native.has_identity(worker.control, owner.memory.identity) and worker.missing_names() == []


def test_a_setting_of_a_newer_version_is_left_out_beside_it(make_owner):
    owner = make_owner()
    owner.make_rest()
    document = json.loads((owner.folder.path / "settings").read_bytes()) | {"of_a_newer_version": ["1", "default"]}
    owner.folder.unlink("settings")
    text = json.dumps(document).encode()
    with owner.folder.create("settings", len(text)) as shared:
        shared.memory[:] = text
    assert read_run_settings(owner.folder) == owner.config


def test_the_limits_are_fields_of_the_identity_and_live_settings():
    assert LIMITS.keys() <= {name for name, _ in ffi.typeof("struct ms_identity").fields}
    assert all(SETTINGS[name].live for name in LIMITS.values())


@pytest.mark.parametrize("is_later, syncs", [(False, 1), (True, 2)], ids=["the sync under way", "the one after it"])
def test_a_wait_for_a_sync_ends_with_that_sync(is_later, syncs):
    control = ffi.new("struct ms_control *")
    waiter = threading.Thread(target=lib.ms_control_wait_synced, args=(control, 0, 100, is_later, 60 * 10**9), daemon=True)
    waiter.start()
    system_call = Path(f"/proc/self/task/{waiter.native_id}/syscall")
    sleeps_on = hex(int(ffi.cast("uintptr_t", ffi.addressof(control.flush_seq, "value"))))
    for sync in range(syncs):
        eventually(lambda: sleeps_on in system_call.read_text().split(), f"asleep before sync {sync + 1}")
        lib.ms_control_publish_flushed(control, 50 * (sync + 1), False)
    waiter.join(10)
    assert not waiter.is_alive()
