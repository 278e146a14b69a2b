"""The table of worker kinds has everything that CONTRIBUTING's recipe for a worker asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyengine.engine.kinds import KINDS, kinds_for, restart_pause_s
from pyengine.engine.unit_files import worker_unit
from pyengine.ipc.shared_objects import KIND_NAMES
from pyengine.native import control as native

ROOT = Path(__file__).parents[2]


def test_each_number_has_a_name_a_row_and_room_in_every_array():
    assert len(KIND_NAMES) == len(set(KIND_NAMES)) == native.WORKER_KINDS
    assert sorted(kind.number for kind in KINDS) == list(range(1, native.WORKER_KINDS))
    assert [getattr(native, name.upper()) for name in KIND_NAMES] == list(range(native.WORKER_KINDS))
    lines = native.private_blocked_reasons()
    for number, name in enumerate(KIND_NAMES):
        native.write_blocked_reason(lines, number, name)
    assert [native.read_blocked_reason(lines, number) for number in range(native.WORKER_KINDS)] == list(KIND_NAMES)
    with pytest.raises(IndexError):
        native.load(lines.worker[native.WORKER_KINDS], "text")


def test_each_stops_at_a_rank_of_its_own():
    assert len({kind.stop_rank for kind in KINDS}) == len(KINDS)
    assert [kind.name for kind in sorted(KINDS, key=lambda kind: kind.stop_rank)] == [
        "grpc", "gateway", "cleaner", "writer", "committer", "flusher", "scheduler", "replicator", "reputter", "allocator",
        "checkpointer"]


def test_some_run_only_where_they_have_work():
    assert "committer" in {kind.name for kind in kinds_for(native.MODE_POOL, False)}
    assert "committer" not in {kind.name for kind in kinds_for(native.MODE_SYNC, False)} | {
        kind.name for kind in kinds_for(native.MODE_MAPPED, False)}
    assert "replicator" in {kind.name for kind in kinds_for(native.MODE_POOL, True)}
    assert "replicator" not in {kind.name for kind in kinds_for(native.MODE_POOL, False)}
    assert "gateway" in {kind.name for kind in kinds_for(native.MODE_SYNC, False, True)}
    assert "gateway" not in {kind.name for kind in kinds_for(native.MODE_SYNC, True)}
    assert "grpc" in {kind.name for kind in kinds_for(native.MODE_SYNC, False, True, True)}
    assert "grpc" not in {kind.name for kind in kinds_for(native.MODE_SYNC, False, True)}


def test_the_pause_before_a_restart_grows_to_ten_seconds():
    assert [restart_pause_s(crashes) for crashes in (1, 2, 3, 4, 9, 10**6)] == [0, 0.1, 0.2, 0.4, 10, 10]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_has_a_main_and_a_unit(kind):
    assert (ROOT / "workers" / f"{kind.name}.py").is_file()
    unit = (ROOT / "systemd" / worker_unit(kind)).read_text()
    assert f"ExecStart=@PYTHON@ -P -m {kind.module} /var/lib/pyengine/%i\n" in unit
    assert f"WatchdogSec={kind.heartbeat_timeout_s:g}\n" in unit
