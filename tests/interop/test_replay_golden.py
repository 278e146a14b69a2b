"""The golden puts through the real writer give RocketMQ's own bytes, and RocketMQ reads them.

Every recipe in every mode, twice: stopped in order, and with every process killed at once (in pool mode
with bytes still in the buffers) and then recovered. The default run takes every recipe in async mode, stopped,
and one recipe in the other modes and after a kill; CI takes two more, and the long form all.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.watch import CrashWatch
from fix_cli import run
from fix_golden import GOLDEN, compare_inspect, load_verify, unpack
from interop.compare_stores import index_differences, log_differences, queue_differences
from pyengine.cli.torture import kill_all
from pyengine.engine_config import MODES
from replay import Manifest, ReplayReport, engine_for, load_manifest, replay_puts, settings_of
from waiting import scaled_timeout_s

RECIPES = (
    "basic", "roll", "tx", "batch", "ipv6", "bigmsg", "pool", "pool-roll", "syncflush", "multi-index", "keyclash",
    "empty", "emptybody", "lmq",
)  # fmt: skip
ENDS = ("stopped", "killed")
IN_EACH_FORM = {"roll": (), "basic": (pytest.mark.ci,), "multi-index": (pytest.mark.ci,)}
PUTS_INTO_THE_POOL = 3  # the committer is held before the last so many puts


@dataclass
class Replayed:
    """One recipe replayed into `root`, and how it went."""

    manifest: Manifest
    root: Path
    theirs: Path
    report: ReplayReport
    undrained_bytes: int = 0

    @property
    def segment_bytes(self) -> int:
        return int(self.manifest.config["mappedFileSizeCommitLog"])


class Replays(dict[tuple[str, str, str], Replayed]):
    """(mode, end, recipe) -> its replay, made when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, key: tuple[str, str, str]) -> Replayed:
        mode, end, recipe = key
        self[key] = replay_one(self.folder / "-".join(key), recipe, mode, end)
        return self[key]


@pytest.fixture(scope="module")
def replays(tmp_path_factory) -> Iterator[Replays]:
    folder = tmp_path_factory.mktemp("replays")
    yield Replays(folder)
    shutil.rmtree(folder)


@pytest.fixture
def replayed(replays, mode, end, recipe) -> Replayed:
    return replays[mode, end, recipe]


@pytest.fixture
def all_replayed(request, replays, mode, end) -> dict[str, Replayed]:
    """Those of this run."""
    runs = {"ci": request.config.run_ci, "long": request.config.run_long}
    return {recipe: replays[mode, end, recipe] for recipe in RECIPES
            if all(runs[mark.name] for mark in marks(mode, end, recipe))}


def marks(mode: str, end: str, recipe: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if (mode, end) == ("async", "stopped") else IN_EACH_FORM.get(recipe, (pytest.mark.long,))


each_recipe = pytest.mark.parametrize("mode, end, recipe", [
    pytest.param(mode, end, recipe, marks=marks(mode, end, recipe))
    for mode in MODES for end in ENDS for recipe in RECIPES])
each_end = pytest.mark.parametrize("mode, end", [(mode, end) for mode in MODES for end in ENDS])


def replay_one(folder: Path, recipe: str, mode: str, end: str) -> Replayed:
    manifest = load_manifest(GOLDEN / f"{recipe}.json.gz")
    theirs = unpack(recipe, folder / "theirs")
    made = Replayed(manifest, folder / "ours", theirs, ReplayReport())
    if end == "stopped":
        with engine_for(made.root, settings_of(manifest, mode)) as producer:
            made.report = replay_puts(manifest, producer)
        return made
    with pytest.MonkeyPatch.context() as patch:
        # An engine that was killed cannot be stopped in order: that error is expected and not looked at.
        patch.setattr("pyengine.engine.embedded.Engine.stop", lambda engine, timeout_s=0: engine._process.wait())
        with engine_for(made.root, settings_of(manifest, mode)) as producer, CrashWatch(made.root) as watch:
            made.report = replay_puts(manifest, producer, hold_committer(watch, manifest))
            made.undrained_bytes = undrained_at_the_kill(watch)
    recovered = run("recover", made.root)
    assert recovered.code == 0, recovered.stderr
    return made


def hold_committer(watch: CrashWatch, manifest: Manifest):
    committer = watch.pids().get("committer")

    def advance(done: int) -> None:
        if committer and done == len(manifest.puts) - PUTS_INTO_THE_POOL:
            os.kill(committer, signal.SIGSTOP)

    return advance


def undrained_at_the_kill(watch: CrashWatch) -> int:
    """Kills all; the bytes that were in the pool only."""
    kill_all(watch)
    now = watch.positions()
    return now.wrote - now.committed


def ignored(made: Replayed) -> tuple[str, ...]:
    """File times are those of the run. A killed engine leaves the segment that was allocated ahead, so an empty log begins at 0."""
    left_ready = not made.manifest.puts and any((made.root / "commitlog").iterdir())
    return ("byTime", "positions") if left_ready else ("byTime",)


@each_recipe
def test_every_answer_is_rocketmqs(replayed):
    assert replayed.report.differences == []
    assert replayed.report.puts == len(replayed.manifest.puts)


@each_recipe
def test_the_log_is_rocketmqs_byte_for_byte(replayed):
    assert log_differences(replayed.root, replayed.theirs, replayed.manifest.document["records"], replayed.segment_bytes) == []


@each_recipe
def test_queues_and_index_are_rocketmqs_byte_for_byte(replayed):
    assert queue_differences(replayed.root, replayed.theirs) == []
    assert index_differences(replayed.root, replayed.theirs) == []


@each_recipe
def test_our_own_reader_and_check_find_everything(replayed, recipe):
    inspected = run("inspect", replayed.root, "--json")
    assert inspected.code == 0, inspected.stderr
    assert compare_inspect(inspected.document, load_verify(recipe), ignore=ignored(replayed)) == []
    checked = run("check", replayed.root)
    assert checked.code == 0, checked.stdout + checked.stderr


@pytest.mark.ci
@each_end
@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_opens_it_and_reads_every_message(all_replayed, judge):
    asked = {recipe: judge.verify(made.root, made.manifest.config) for recipe, made in all_replayed.items()}
    differences = {}
    for recipe, answer in asked.items():
        found, made = answer.result(timeout=scaled_timeout_s(240)), all_replayed[recipe]
        assert found["loadOk"], f"{recipe}: {found}"
        assert len(found["records"]) == len(made.manifest.document["records"])
        ours = run("inspect", made.root, "--json").document
        differences[recipe] = compare_inspect(found, load_verify(recipe), ignore=ignored(made))
        differences[recipe] += compare_inspect(ours, found, ignore=("byTime",))
    assert differences == {key: [] for key in all_replayed}


@pytest.mark.ci
@each_end
@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_appends_to_a_replayed_store(replays, mode, end, judge, tmp_path):
    """What RocketMQ appends to our store follows our last message, and has an entry in its queue."""
    from interop.judge import put_row

    made = replays[mode, end, "basic"]
    shutil.copytree(made.root, tmp_path / "store")
    put = made.manifest.puts[0]
    wrote = judge.write(tmp_path / "store", made.manifest.config, [put_row(put, with_clock=False)] * 2).result(
        timeout=scaled_timeout_s(240))
    assert [row["status"] for row in wrote["puts"]] == ["PUT_OK", "PUT_OK"]
    assert wrote["puts"][0]["phy"] == made.manifest.document["facts"]["maxPhy"]
    entries = next(q["entries"] for q in made.manifest.document["facts"]["queues"] if (q["topic"], q["queueId"])
                   == (put.topic, put.queue_id))
    assert [row["queueOffset"] for row in wrote["puts"]] == [len(entries), len(entries) + 1]
    assert wrote["after"]["abort"] is False


@pytest.mark.parametrize("mode, end", [("pool", "killed")])
def test_killing_in_pool_mode_left_bytes_in_the_pool(all_replayed):
    """Otherwise the drain would not have been tried."""
    undrained = {recipe: made.undrained_bytes for recipe, made in all_replayed.items() if made.manifest.puts}
    assert all(undrained.values()), undrained
