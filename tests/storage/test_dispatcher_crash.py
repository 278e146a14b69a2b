"""A dispatcher killed anywhere, and its successor with the same progress area: nothing lost, nothing doubled."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from datetime import datetime
from pathlib import Path

import pytest

from logs import Log, LogBuilder, files_below, index_contents
from pyengine.engine_config import Geometry
from pyengine.storage import consume_queue, index_file
from pyengine.storage import dispatcher as dispatcher_module
from pyengine.storage.dispatcher import Dispatcher
from waiting import scaled_timeout_s

SEGMENT = 1 << 20
GEOMETRY = Geometry(
    mapped_file_size_commit_log_bytes=SEGMENT,
    mapped_file_size_consume_queue_bytes=2000,
    max_hash_slot_num=64,
    max_index_num=300,
)
DEADLINE_S = 60
AHEAD_BYTES_MAX = 40_000


class SharedArea:
    """What outlives a dispatcher: its published position, and the progress area of the index."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 4096)
        self.progress = memoryview(self.memory)[256:512]

    @property
    def reput_from(self) -> int:
        return struct.unpack_from("q", self.memory, 0)[0]

    @reput_from.setter
    def reput_from(self, position: int) -> None:
        struct.pack_into("q", self.memory, 0, position)

    @property
    def seen(self) -> int:
        """Position of the last call that returned, published or not."""
        return struct.unpack_from("q", self.memory, 8)[0]

    @seen.setter
    def seen(self, position: int) -> None:
        struct.pack_into("q", self.memory, 8, position)


def outcome(root: Path) -> tuple[dict[str, bytes], list[bytes]]:
    return files_below(root / "consumequeue"), index_contents(root)


def undisturbed(tmp_path: Path, builder: LogBuilder, log: Log) -> tuple[dict[str, bytes], list[bytes]]:
    with Dispatcher(tmp_path / "undisturbed", GEOMETRY) as dispatcher:
        assert log.dispatch(dispatcher) == builder.end
    return outcome(tmp_path / "undisturbed")


def in_child(act) -> int:
    """Run `act` in a forked child; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return pid


def test_kills_at_random_moments(tmp_path, rng):
    builder = LogBuilder(SEGMENT)
    builder.append_varied(rng, 4000)
    root = builder.write(tmp_path / "store")
    log = Log(root, SEGMENT)
    expected = undisturbed(tmp_path, builder, log)
    area, parent = SharedArea(), os.getpid()

    def life(batch: int, publish_every: int, threshold: int) -> None:
        """Dispatch up to the log's end, but do not run away from a parent that a loaded machine keeps from killing it."""
        with Dispatcher(root, GEOMETRY, index_progress=area.progress) as dispatcher:
            position, calls = area.reput_from, 0
            while position < builder.end:
                position = log.dispatch(dispatcher, position, min(builder.end, position + batch))
                area.seen = position
                while area.seen > threshold + AHEAD_BYTES_MAX and os.getppid() == parent:
                    time.sleep(0.001)
                calls += 1
                if calls % publish_every == 0:
                    area.reput_from = position
            area.reput_from = position

    kills = mid_put = 0
    deadline = time.monotonic() + scaled_timeout_s(DEADLINE_S)
    while area.reput_from < builder.end:
        assert time.monotonic() < deadline, f"stuck at {area.reput_from}"
        batch, publish_every = rng.choice([700, 3000, 20_000]), rng.choice([1, 5])
        threshold = area.reput_from + rng.randrange(1, 30_000)
        area.seen = area.reput_from
        pid = in_child(lambda: life(batch, publish_every, threshold))
        ended = 0
        while area.seen < threshold and not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.waitstatus_to_exitcode(status) == 0
        kills += killed
        mid_put += area.progress[0]
    print(f"kills {kills}, in the middle of a put {mid_put}")
    assert kills, "the child is too fast for this machine: make the log longer"
    assert outcome(root) == expected


STEPS = [
    "queue file made",
    "queue file filled",
    "index file made",
    "index file inherited",
    "queue added",
]


@pytest.mark.parametrize("step", STEPS)
def test_kills_between_the_steps_of_making_files(step, tmp_path, rng):
    """Every time the step is reached the child dies right behind it, and the next one goes on."""
    builder = LogBuilder(SEGMENT, first_offset=SEGMENT)
    for topic in ("A", "主题"):
        builder.queue_offsets[topic, 0] = 130  # so that filler comes first
    builder.append_varied(rng, 700, topics=("A", "主题"))
    root = builder.write(tmp_path / "store")
    log = Log(root, SEGMENT)
    expected = undisturbed(tmp_path, builder, log)
    area = SharedArea()
    area.reput_from = builder.first_offset

    def die_after(module, name: str, times: list[int]) -> None:
        original = getattr(module, name)

        def dying(*arguments, **settings):
            result = original(*arguments, **settings)
            times[0] -= 1
            if times[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, name, dying)

    def life() -> None:
        target = {
            "queue file made": (consume_queue, "create_file"),
            "queue file filled": (consume_queue, "pwrite_all"),
            "index file made": (index_file, "create_file"),
            "index file inherited": (index_file.IndexFile, "inherit"),
            "queue added": (dispatcher_module, "find_queue_end"),
        }[step]
        die_after(*target, [1])
        with Dispatcher(root, GEOMETRY, index_progress=area.progress) as dispatcher:
            area.reput_from = log.dispatch(dispatcher, area.reput_from)

    deaths = 0
    deadline = time.monotonic() + scaled_timeout_s(DEADLINE_S)
    while area.reput_from < builder.end and deaths < 2:
        assert time.monotonic() < deadline
        _, status = os.waitpid(in_child(life), 0)
        deaths += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    assert deaths >= 1
    with Dispatcher(root, GEOMETRY, index_progress=area.progress) as dispatcher:
        assert log.dispatch(dispatcher, area.reput_from) == builder.end
    assert outcome(root) == expected


def test_an_undo_of_a_file_that_is_gone_is_dropped(tmp_path):
    builder = LogBuilder(SEGMENT)
    builder.append(properties="KEYS\x01k")
    root = builder.write(tmp_path / "store")
    log = Log(root, SEGMENT)
    area = SharedArea()
    struct.pack_into("QqqiiiI", area.progress, 0, 1, 20200101000000000, 0, 3, 7, 1, 0)
    with Dispatcher(root, GEOMETRY, index_progress=area.progress) as dispatcher:
        assert area.progress[0] == 0
        log.dispatch(dispatcher)
        assert dispatcher.loop.struct.keys == 1


@pytest.mark.parametrize(
    ("previous", "expected"),
    [
        (None, 20240229235959999),
        (20240229235959998, 20240229235959999),
        (20240229235959999, 20240229235960000),  # the same millisecond
        (20301231235959999, 20301231235960000),  # the clock was set back
    ],
)
def test_index_names_grow(tmp_path, monkeypatch, previous, expected):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 2, 29, 23, 59, 59, 999_500)

    monkeypatch.setattr(index_file, "datetime", Clock)
    if previous is not None:
        (tmp_path / str(previous)).touch()
    files = index_file.IndexFiles(tmp_path, GEOMETRY.index_layout)
    files.make_next()
    files.close()
    assert max(int(name) for name in os.listdir(tmp_path)) == expected
