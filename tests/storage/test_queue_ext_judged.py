"""The real RocketMQ store reads tags codes and store times through the extensions that we write."""

from __future__ import annotations

import shutil

import pytest

from fix_golden import GOLDEN, compare_inspect, load_manifest, size_settings, unpack
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.rebuild import rebuild
from replay import engine_for, replay_puts, settings_of
from replay import load_manifest as load_puts
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]


@pytest.fixture(scope="module", params=["rebuilt", pytest.param("replayed", marks=pytest.mark.ci)])
def judged(request, judge, tmp_path_factory):
    """(root, what the real store reads from it): the recipe's own store rebuilt, or its puts through our engine."""
    folder, config = tmp_path_factory.mktemp("ext"), load_manifest("cqext")["config"]
    root = unpack("cqext", folder)
    if request.param == "rebuilt":
        shutil.rmtree(root / "consumequeue")
        rebuild(MessageStore(root, discover(root, size_settings(config))))
    else:
        puts = load_puts(GOLDEN / "cqext.json.gz")
        theirs, root = root, folder / "ours"
        with engine_for(root, settings_of(puts, "async")) as producer:
            assert replay_puts(puts, producer).differences == []
        assert (root / "commitlog" / ("0" * 20)).read_bytes() == (theirs / "commitlog" / ("0" * 20)).read_bytes()
    return root, judge.verify(root, config).result(timeout=scaled_timeout_s(240))


def test_the_real_store_opens_it_and_finds_what_the_broker_wrote(judged):
    root, theirs = judged
    config = load_manifest("cqext")["config"]
    assert (theirs["loadOk"], theirs["path"]) == (True, "normal")
    assert compare_inspect(inspect(root, config), theirs) == []
    before = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in load_manifest("cqext")["facts"]["queues"]}
    found = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in theirs["facts"]["queues"]}
    assert found.keys() == before.keys()
    for queue, entries in before.items():
        names = ("phy", "size", "tagsCode", "storeTs")
        assert [[entry[name] for name in names] for entry in found[queue]] == [
            [entry[name] for name in names] for entry in entries]
        assert all(entry["raw"] < -(1 << 32) and not entry["bitMap"] for entry in found[queue])
