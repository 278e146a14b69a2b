"""The real RocketMQ store opens what was rebuilt here, by its normal path, and reads from it what it read before."""

from __future__ import annotations

import shutil

import pytest

from fix_golden import compare_inspect, load_manifest, load_verify, size_settings, unpack
from pyengine.engine_config import EngineConfig
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.rebuild import Selection, rebuild
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

# recipe -> is a single queue lost, or everything?
ASKED = {"roll": True, "multi-index": False, "tx": True, "prefill": False, "lmq": True, "delay": False}


@pytest.fixture(scope="module")
def judged(judge, tmp_path_factory):
    """recipe -> (root after the rebuild, Future of what the real store reads from it)."""
    folder = tmp_path_factory.mktemp("rebuilt")
    asked = {}
    for name, is_one in ASKED.items():
        root, config = unpack(name, folder), load_manifest(name)["config"]
        geometry = discover(root, size_settings(config))
        selection = Selection()
        if is_one:
            queue = sorted((root / "consumequeue").glob("*/*"))[0]
            shutil.rmtree(queue)
            selection = Selection(topic=queue.parent.name, queue_id=int(queue.name), index=False)
        else:
            shutil.rmtree(root / "consumequeue")
            shutil.rmtree(root / "index")
        levels = config.get("messageDelayLevel")
        rebuild(MessageStore(root, geometry), selection, options=EngineConfig(message_delay_level=levels) if levels else None)
        asked[name] = root, judge.verify(root, config)
    return asked


@pytest.mark.parametrize("name", ASKED)
def test_the_real_store_reads_the_rebuilt_store_as_before(judged, name):
    root, future = judged[name]
    theirs = future.result(timeout=scaled_timeout_s(240))
    assert (theirs["loadOk"], theirs["path"]) == (True, "normal")
    assert compare_inspect(inspect(root, load_manifest(name)["config"]), theirs) == []
    # The times of lost files are those of their last messages: look-ups by time may find a nearer message than before.
    assert compare_inspect(theirs, load_verify(name), ignore=("byTime",)) == []
