"""RocketMQ's own logs, dispatched anew, give RocketMQ's own queues and index byte for byte."""

from __future__ import annotations

import pytest

from fix_golden import CLEAN
from logs import Log, files_below, index_contents, queue_ends
from pyengine.engine_config import EngineConfig, Geometry
from pyengine.formats.consume_queue import ENTRY
from pyengine.storage.dispatcher import Dispatcher

# Stores whose queues do not follow from the log alone; tests below compare a part of them.
NOT_FROM_THE_LOG = {
    "cleaned",  # its first segments are gone
    "prefill",  # the same; its queues were rebuilt by RocketMQ from the segments that are left
    "cqext",  # its tags codes are addresses in the extension
    "widetopic",  # RocketMQ's dispatcher jumped over records that it could not read
}


def dispatched(store, root, **settings):
    """Dispatch the store's whole log into `root`; return (why it stopped, ends of the queues, entries out of order)."""
    config = store.manifest["config"]
    geometry = Geometry(**store.sizes)
    if "messageDelayLevel" in config:
        settings["message_delay_level"] = config["messageDelayLevel"]
    settings["enable_multi_dispatch"] = config.get("enableMultiDispatch") == "true"
    log = Log(store.root, geometry.mapped_file_size_commit_log_bytes)
    with Dispatcher(root, geometry, EngineConfig(**settings)) as dispatcher:
        log.dispatch(dispatcher)
        return dispatcher.stopped_by, queue_ends(dispatcher), dispatcher.loop.struct.queues.out_of_order


@pytest.mark.parametrize("name", sorted(set(CLEAN) - NOT_FROM_THE_LOG))
def test_queues_and_index_come_out_as_rocketmq_wrote_them(name, golden, tmp_path):
    store = golden(name)
    stopped_by, ends, out_of_order = dispatched(store, tmp_path / "new")
    assert files_below(tmp_path / "new" / "consumequeue") == files_below(store.root / "consumequeue")
    assert index_contents(tmp_path / "new") == index_contents(store.root)
    assert stopped_by in ("zeroes", "range_end")
    assert out_of_order == 0
    assert ends == {
        (queue["topic"], queue["queueId"]): queue["max"]
        for queue in store.verify["facts"]["queues"]
        if queue["max"]
    }


def test_queues_of_a_log_whose_beginning_is_gone_start_with_filler(golden, tmp_path):
    store = golden("prefill")
    dispatched(store, tmp_path / "new")
    assert files_below(tmp_path / "new" / "consumequeue") == files_below(store.root / "consumequeue")


def test_a_cleaned_log_gives_the_entries_that_still_have_messages(golden, tmp_path):
    store = golden("cleaned")
    dispatched(store, tmp_path / "new")
    min_physical = store.verify["facts"]["minPhy"]
    ours = files_below(tmp_path / "new" / "consumequeue")
    for name, theirs in files_below(store.root / "consumequeue").items():
        for at in range(0, len(theirs), 20):
            entry = ENTRY.unpack_from(theirs, at)
            if entry[0] >= min_physical:
                assert ENTRY.unpack_from(ours[name], at) == entry
    assert ours.keys() <= files_below(store.root / "consumequeue").keys()


def test_with_the_extension_all_but_the_tags_code_agrees(golden, tmp_path):
    store = golden("cqext")
    dispatched(store, tmp_path / "new")
    ours, theirs = files_below(tmp_path / "new" / "consumequeue"), files_below(store.root / "consumequeue")
    assert ours.keys() == theirs.keys()
    for name in ours:
        for at in range(0, len(ours[name]), 20):
            assert ENTRY.unpack_from(ours[name], at)[:2] == ENTRY.unpack_from(theirs[name], at)[:2]
    assert index_contents(tmp_path / "new") == index_contents(store.root)


def test_dispatching_over_the_extension_keeps_its_addresses(golden):
    store = golden("cqext")
    before = files_below(store.root / "consumequeue"), index_contents(store.root)
    dispatched(store, store.root)
    assert (files_below(store.root / "consumequeue"), index_contents(store.root)) == before


def test_a_record_that_rocketmq_cannot_read_ends_the_dispatch(golden, tmp_path):
    store = golden("widetopic")
    stopped_by, ends, _ = dispatched(store, tmp_path / "new")
    assert stopped_by == "torn"
    assert ends == {("W1", 0): 3}


@pytest.mark.parametrize("name", sorted(set(CLEAN) - {"widetopic", "cqext"}))
def test_dispatching_again_into_rocketmq_s_own_files_changes_nothing(name, golden):
    store = golden(name)
    before = files_below(store.root / "consumequeue"), index_contents(store.root)
    times = {path: path.stat().st_mtime_ns for path in store.root.glob("consumequeue/*/*/*")}
    dispatched(store, store.root)
    assert (files_below(store.root / "consumequeue"), index_contents(store.root)) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times
