"""The generator of puts: the real store accepts what it makes, where it says, and the edges are hit."""

from __future__ import annotations

import random

import pytest

from interop.judge import put_row
from interop.random_puts import EDGES, expecting, random_puts, random_settings
from waiting import scaled_timeout_s


def test_equal_seeds_make_equal_puts():
    made = [random_puts(random.Random(7), 100, 16384) for _ in range(2)]
    assert made[0] == made[1] != random_puts(random.Random(8), 100, 16384)


@pytest.mark.java
@pytest.mark.maven
def test_the_real_store_takes_them_all(judge, tmp_path, rng):
    settings = random_settings(rng)
    segment_bytes = int(settings["mappedFileSizeCommitLog"])
    puts = random_puts(rng, 300, segment_bytes)
    wrote = judge.write(tmp_path / "store", settings, [put_row(put) for put in puts]).result(timeout=scaled_timeout_s(240))
    assert {(put["status"], put["append"]) for put in wrote["puts"]} == {("PUT_OK", "PUT_OK")}
    left_free = {segment_bytes - (r["phy"] + r["size"]) % segment_bytes for r in wrote["records"] if not r.get("blank")}
    assert {edge for edge in EDGES if edge >= 8} & left_free, "no record was placed at the edge"
    expected = [expecting(put, row).expected.msg_id for put, row in zip(puts, wrote["puts"])]
    assert expected == [row["msgId"] for row in wrote["puts"]]
