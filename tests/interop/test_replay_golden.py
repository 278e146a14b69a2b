"""The golden puts through the real writer give RocketMQ's own bytes, and RocketMQ reads them.

Every recipe in every mode, twice: stopped in order, and with every process killed at once (in pool mode
with bytes still in the buffers) and then recovered.
"""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from crash.watch import EngineWatch, kill_all
from fix_cli import run
from fix_golden import GOLDEN, compare_inspect, load_verify, unpack
from interop.compare_stores import index_differences, log_differences, queue_differences
from pyengine.cli.replay import MODES, ReplayReport, engine_for, replay_puts, settings_of
from pyengine.cli.replay_manifest import Manifest, load_manifest

RECIPES = (
    "basic", "roll", "tx", "batch", "ipv6", "bigmsg", "pool", "pool-roll", "syncflush", "multi-index", "keyclash",
    "empty", "emptybody", "lmq",
)  # fmt: skip
ENDS = ("stopped", "killed")
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


@pytest.fixture(scope="module", params=[(mode, end) for mode in MODES for end in ENDS], ids="-".join)
def replayed(request, tmp_path_factory) -> dict[str, Replayed]:
    """recipe -> its replay in one mode with one end."""
    mode, end = request.param
    folder = tmp_path_factory.mktemp(f"{mode}-{end}")
    yield {recipe: replay_one(folder / recipe, recipe, mode, end) for recipe in RECIPES}
    shutil.rmtree(folder)


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
        patch.setattr("pyengine.engine.Engine.stop", lambda engine, timeout_s=0: engine._process.wait())
        with engine_for(made.root, settings_of(manifest, mode)) as producer, EngineWatch(made.root) as watch:
            made.report = replay_puts(manifest, producer, hold_committer(watch, manifest))
            made.undrained_bytes = undrained_at_the_kill(watch)
    recovered = run("recover", made.root)
    assert recovered.code == 0, recovered.stderr
    return made


def hold_committer(watch: EngineWatch, manifest: Manifest):
    committer = watch.pids().get("committer")

    def advance(done: int) -> None:
        if committer and done == len(manifest.puts) - PUTS_INTO_THE_POOL:
            os.kill(committer, signal.SIGSTOP)

    return advance


def undrained_at_the_kill(watch: EngineWatch) -> int:
    """Kills all; the bytes that were in the pool only."""
    kill_all(watch)
    now = watch.positions()
    return now.wrote - now.committed


def ignored(made: Replayed) -> tuple[str, ...]:
    """File times are those of the run. A killed engine leaves the segment that stood ready, so an empty log begins at 0."""
    left_ready = not made.manifest.puts and any((made.root / "commitlog").iterdir())
    return ("byTime", "positions") if left_ready else ("byTime",)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_answer_is_rocketmqs(replayed, recipe):
    made = replayed[recipe]
    assert made.report.differences == []
    assert made.report.puts == len(made.manifest.puts)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_log_is_rocketmqs_byte_for_byte(replayed, recipe):
    made = replayed[recipe]
    assert log_differences(made.root, made.theirs, made.manifest.document["records"], made.segment_bytes) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_queues_and_index_are_rocketmqs_byte_for_byte(replayed, recipe):
    made = replayed[recipe]
    assert queue_differences(made.root, made.theirs) == []
    assert index_differences(made.root, made.theirs) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_our_own_reader_and_check_find_everything(replayed, recipe):
    made = replayed[recipe]
    inspected = run("inspect", made.root, "--json")
    assert inspected.code == 0, inspected.stderr
    assert compare_inspect(inspected.document, load_verify(recipe), ignore=ignored(made)) == []
    checked = run("check", made.root)
    assert checked.code == 0, checked.stdout + checked.stderr


@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_opens_it_and_reads_every_message(replayed, judge):
    asked = {recipe: judge.verify(made.root, made.manifest.config) for recipe, made in replayed.items()}
    differences = {}
    for recipe, answer in asked.items():
        found = answer.result(timeout=240)
        assert found["loadOk"], f"{recipe}: {found}"
        assert len(found["records"]) == len(replayed[recipe].manifest.document["records"])
        ours = run("inspect", replayed[recipe].root, "--json").document
        differences[recipe] = compare_inspect(found, load_verify(recipe), ignore=ignored(replayed[recipe]))
        differences[recipe] += compare_inspect(ours, found, ignore=("byTime",))
    assert differences == dict.fromkeys(RECIPES, [])


@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_goes_on_with_it(replayed, judge, tmp_path):
    """What RocketMQ appends to our store follows our last message, and stands in its queue."""
    from interop.judge import put_row

    made = replayed["basic"]
    shutil.copytree(made.root, tmp_path / "store")
    put = made.manifest.puts[0]
    wrote = judge.write(tmp_path / "store", made.manifest.config, [put_row(put, with_clock=False)] * 2).result(timeout=240)
    assert [row["status"] for row in wrote["puts"]] == ["PUT_OK", "PUT_OK"]
    assert wrote["puts"][0]["phy"] == made.manifest.document["facts"]["maxPhy"]
    entries = next(q["entries"] for q in made.manifest.document["facts"]["queues"] if (q["topic"], q["queueId"])
                   == (put.topic, put.queue_id))
    assert [row["queueOffset"] for row in wrote["puts"]] == [len(entries), len(entries) + 1]
    assert wrote["after"]["abort"] is False


def test_killing_in_pool_mode_left_bytes_in_the_pool(replayed, request):
    """Else the drain would not have been tried."""
    if request.node.callspec.params["replayed"] == ("pool", "killed"):
        assert all(made.undrained_bytes > 0 for recipe, made in replayed.items() if made.manifest.puts), {
            recipe: made.undrained_bytes for recipe, made in replayed.items()
        }
