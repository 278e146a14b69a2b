"""Random puts: whatever the real store writes for them, ours writes the same bytes in every mode."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fix_cli import run
from fix_golden import compare_inspect
from interop.compare_stores import index_differences, log_differences, queue_differences
from interop.judge import put_row
from interop.random_puts import expecting, random_puts, random_settings
from pyengine.engine_config import MODES
from replay import Manifest, engine_for, replay_puts, settings_of
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

PUTS = 400


@pytest.mark.ci
@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, 15))])
def test_equal_puts_make_equal_stores(judge, tmp_path, seed, turn):
    rng = random.Random(seed)
    settings = random_settings(rng)
    segment_bytes = int(settings["mappedFileSizeCommitLog"])
    puts = random_puts(rng, PUTS, segment_bytes)
    theirs = tmp_path / "theirs"
    print(f"seed {seed} settings {settings}")
    wrote = judge.write(theirs, settings, [put_row(put) for put in puts]).result(timeout=scaled_timeout_s(240))
    known = tuple(expecting(put, answer) for put, answer in zip(puts, wrote["puts"], strict=True))
    manifest = Manifest(Path("random"), settings, known, {})

    read = {}
    for mode in MODES:
        ours = tmp_path / mode
        with engine_for(ours, settings_of(manifest, mode)) as producer:
            assert replay_puts(manifest, producer).differences == []
        assert log_differences(ours, theirs, wrote["records"], segment_bytes) == []
        assert queue_differences(ours, theirs) == []
        assert index_differences(ours, theirs) == []
        read[mode] = judge.verify(ours, settings)
    for mode, answer in read.items():
        found = answer.result(timeout=scaled_timeout_s(240))
        assert found["records"] == wrote["records"]
        assert found["messages"] == wrote["messages"]
        assert compare_inspect(run("inspect", tmp_path / mode, "--json").document, found, ignore=("byTime",)) == []
