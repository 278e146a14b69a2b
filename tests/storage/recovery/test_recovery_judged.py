"""The real RocketMQ store opens what was recovered here, by its normal path, and reads from it what we read."""

from __future__ import annotations

import pytest

from fix_golden import HALTED, compare_inspect, load_manifest, load_verify, size_settings, unpack
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.recover import recover
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

DAMAGED = sorted({*HALTED, "widetopic"} - {"abnormal-shortfile"})


@pytest.fixture(scope="module")
def judged(judge, tmp_path_factory):
    """name -> (root after our recovery, Future of what the real store reads from it). All are asked for at once."""
    folder = tmp_path_factory.mktemp("recovered")
    asked = {}
    for name in DAMAGED:
        root = unpack(name, folder)
        config = load_manifest(name)["config"]
        recover(MessageStore(root, discover(root, size_settings(config))))
        asked[name] = root, judge.verify(root, config)
    return asked


@pytest.mark.parametrize("name", DAMAGED)
def test_the_real_store_reads_the_recovered_store_as_we_do(judged, name):
    root, future = judged[name]
    theirs = future.result(timeout=scaled_timeout_s(240))
    assert (theirs["loadOk"], theirs["path"]) == (True, "normal")
    assert theirs["facts"]["maxPhy"] == load_verify(name)["facts"]["maxPhy"]
    assert compare_inspect(inspect(root, load_manifest(name)["config"]), theirs) == []
