"""pyengine.open_store beside an engine: levels, mode and arrivals from shared memory, files when it is gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import pytest

import pyengine
from few_files import call_with_few_files
from fix_owner import identity_of
from fix_store_builder import StoreBuilder
from in_child import InChild
from interrupting import Interrupt, interrupt, interrupted_at_each_place
from pyengine.errors import EngineError, StoreBusyError, UsageError
from pyengine.formats.paths import StorePaths
from pyengine.ipc import live_reader
from pyengine.ipc.cleaning import SegmentHolds, create_cleaning
from pyengine.ipc.control_block import EngineMemory
from pyengine.ipc.crashed_engine_memory import open_crashed_memory
from pyengine.ipc.live_reader import LiveStoreReader, LiveWatermark, flushed_end
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.results import ReadLevel
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.config import EngineConfig, load_config, record_sizes
from pyengine.storage.message_store import MessageStore
from pyengine.storage.read_level import FilesWatermark
from pyengine.storage.recovery.recover import recover
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from pyengine.storage.store_reader import StoreReader
from record_bytes import encode_record
from waiting import scaled_timeout_s

SEGMENT_BYTES = 65536


@pytest.fixture
def live(make_owner, golden):
    """(owner, store): an owner in this process whose store holds the golden store `basic`, counters at its end."""
    def make(**identity):
        owner = make_owner(**identity)
        store = golden("basic")
        for name in ("commitlog", "consumequeue", "index"):
            shutil.copytree(store.root / name, owner.root / name)
        (owner.root / "config" / "engine.toml").unlink()
        record_sizes(owner.root, load_config(owner.root, {}, {}))
        owner.position(store.verify["facts"]["maxPhy"])
        owner.publish()
        return owner, store
    return make


def test_a_live_reader_reads_no_entries_beyond_the_counters(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    second_end = queue["entries"][1][0] + queue["entries"][1][1]
    with pyengine.open_store(owner.root) as reader:
        assert reader.queue_range(queue["topic"], queue["queueId"])[1] == queue["max"]
        native.store_position(owner.control.reput_from, second_end)
        assert reader.queue_range(queue["topic"], queue["queueId"]) == (0, 2)
        native.store_position(owner.control.flushed, second_end - 1)
        assert reader.queue_range(queue["topic"], queue["queueId"], "flushed") == (0, 1)
        assert len(reader.get_message(queue["topic"], queue["queueId"], 0, level="flushed").messages) == 1


def test_a_live_reader_reports_the_dispatched_offset(live):
    owner, store = live()
    end = store.verify["facts"]["maxPhy"]
    native.store_position(owner.control.reput_from, end - 10)
    with pyengine.open_store(owner.root) as reader:
        assert reader.is_live
        assert reader.dispatched_offset("flushed") == end - 10
        native.store_position(owner.control.flushed, end - 20)
        assert reader.dispatched_offset("flushed") == end - 20
    with pyengine.open_store(store.root) as reader:
        assert not reader.is_live


@pytest.mark.parametrize(("mode", "level"), [(native.MODE_MAPPED, ReadLevel.COMMITTED), (native.MODE_SYNC, ReadLevel.FLUSHED)])
def test_the_default_level_is_that_of_the_running_mode(live, mode, level):
    owner, _ = live(mode=mode)
    with pyengine.open_store(owner.root) as reader:
        assert reader.default_level is level


def test_a_waiter_is_woken_by_the_arrival(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    entry = queue["entries"][1]
    native.store_position(owner.control.reput_from, entry[0])
    woken = []
    with pyengine.open_store(owner.root) as reader:
        thread = threading.Thread(
            target=lambda: woken.append(reader.wait_for_message(queue["topic"], queue["queueId"], 1, timeout_s=60)))
        thread.start()
        native.store_position(owner.control.reput_from, entry[0] + entry[1])
        waiting.raise_sequence(owner.control.arrival_seq)
        thread.join(timeout=scaled_timeout_s(60))
        assert woken == [True]
        assert not reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"], timeout_s=0.05)


@pytest.mark.parametrize("look", ["interrupted", "early"])
def test_a_wait_for_dispatch_does_not_go_by_a_look_that_found_no_engine(live, monkeypatch, look):
    owner, store = live()
    position, size, *_ = store.verify["facts"]["queues"][0]["entries"][1]
    native.store_position(owner.control.reput_from, position)
    with pyengine.open_store(owner.root) as reader:
        with monkeypatch.context() as during, contextlib.suppress(Interrupt):
            during.setattr(reader._live_watermark, "memory", interrupt if look == "interrupted" else lambda: None)
            reader._engine_memory()
        assert look == "early" or reader._engine_memory() is not None
        monkeypatch.setattr(reader, "_wait_for_arrival", lambda *_: native.store_position(owner.control.reput_from, position + size))
        assert reader._wait_for_dispatch(position + size, scaled_timeout_s(60))


CLOSED = {  # the point in a call at which another thread closes what it uses: the call, and what its error names
    "wait_for_message": (waiting.Sleeper, "wait", "reader", lambda reader, topic: reader.wait_for_message(topic, 0, 1 << 40, 60)),
    "dispatch": (waiting, "wait_for_sequence", "reader", lambda reader, topic: reader._wait_for_dispatch(1 << 50, 60)),
    "seek": (LiveStoreReader, "_last_memory", "consumer", lambda consumer, topic: consumer.seek(None, "first")),
    "lag": (LiveStoreReader, "queue_ids", "consumer", lambda consumer, topic: consumer.lag()),
}


@pytest.mark.parametrize("call", CLOSED)
def test_a_call_beside_close_ends_with_an_error_and_not_the_process(live, call):
    owner, store = live()
    topic = store.verify["facts"]["queues"][0]["topic"]
    where, name, what, call_it = CLOSED[call]

    def closed_inside() -> str | None:
        used = pyengine.open_store(owner.root) if what == "reader" else pyengine.consume(owner.root, topic, group="g")
        inside = getattr(where, name)

        def closes(*given):
            found = inside(*given) if name == "_last_memory" else None
            used.close()
            return inside(*given) if found is None else found

        setattr(where, name, closes)
        try:
            call_it(used, topic)
        except UsageError as error:
            return None if f"this {what} of " in str(error) and "/proc/" not in str(error) else str(error)
        return "it returned"

    assert InChild(closed_inside)() is None


def test_a_forked_child_reads_though_a_thread_of_its_parent_was_reading(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    with pyengine.open_store(owner.root) as reader, pyengine.open_store(store.root) as of_files:
        each = [(one, one._live_watermark, one._live_watermark._files, one._cache, one._gets) for one in (reader, of_files)]
        locks = [vars(part).get("_memory_lock") or part._lock for parts in each for part in parts]
        locked, may_end = threading.Event(), threading.Event()

        def read() -> None:
            with contextlib.ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                locked.set()
                may_end.wait(scaled_timeout_s(120))

        thread = threading.Thread(target=read)
        thread.start()
        assert locked.wait(scaled_timeout_s(30))

        def in_child() -> str | None:
            for one in (reader, of_files):
                if not one.get_message(queue["topic"], queue["queueId"], 0).messages or one.max_physical_offset() <= 0:
                    return "it reads nothing"
            return None

        found = InChild(in_child)()
        may_end.set()
        thread.join()
        assert found is None


def test_a_thread_that_forks_keeps_its_own_locks_in_the_child(live):
    owner, _ = live()
    with pyengine.open_store(owner.root) as reader, reader._memory_lock:
        assert InChild(lambda: None if reader._memory_lock._is_owned() and reader.is_live else "it lost the lock")() is None


def test_the_reader_outlives_the_engine_and_meets_its_successor(live):
    owner, store = live()
    queue = store.verify["facts"]["queues"][0]
    with pyengine.open_store(owner.root) as reader:
        native.store_position(owner.control.reput_from, 0)
        assert reader.queue_range(queue["topic"], queue["queueId"]) == (0, 0)
        owner.memory.retire()
        owner.lock.close()
        assert reader.queue_range(queue["topic"], queue["queueId"])[1] == queue["max"], "from the files"
        assert reader.wait_for_message(queue["topic"], queue["queueId"], 0, timeout_s=5)


def test_without_an_engine_the_files_are_followed(golden):
    store = golden("basic")
    queue = store.verify["facts"]["queues"][0]
    with pyengine.open_store(store.root) as reader:
        assert reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"] - 1, timeout_s=5)
        assert not reader.wait_for_message(queue["topic"], queue["queueId"], queue["max"], timeout_s=0.05)
        assert reader._arrivals() == 0


# ---- the watermark ---------------------------------------------------------------


@pytest.fixture
def store(make_owner):
    """make(mode) -> (owner, end of the one record that the log holds)."""

    def make(mode: int = native.MODE_MAPPED, **identity):
        owner = make_owner(mode=mode, **identity)
        record = encode_record(topic="T", body=b"x" * 500)
        log = StorePaths(owner.root).commit_log
        log.mkdir()
        (log / f"{0:020d}").write_bytes(record.ljust(SEGMENT_BYTES, b"\0"))
        owner.position(len(record), ready_end=SEGMENT_BYTES)
        return owner, len(record)

    return make


def watermark_of(owner) -> LiveWatermark:
    with StoreReader(owner.root) as reader:
        return LiveWatermark(owner.root, reader.commit_log)


@pytest.mark.parametrize(("mode", "written"), [(native.MODE_MAPPED, 400), (native.MODE_POOL, 300), (native.MODE_SYNC, 400)])
def test_each_level_is_its_counter(store, mode, written):
    owner, _ = store(mode)
    for name, value in (("wrote", 400), ("committed", 300), ("flushed", 200), ("reput_from", 250)):
        native.store_position(getattr(owner.control, name), value)
    owner.publish()
    live = watermark_of(owner)
    assert live.is_live
    assert [live.limit(level) for level in (ReadLevel.WRITTEN, ReadLevel.COMMITTED, ReadLevel.FLUSHED)] == [written, 300, 200]
    assert [live.queue_limit(level) for level in (ReadLevel.WRITTEN, ReadLevel.FLUSHED)] == [250, 200]
    with pytest.raises(UsageError, match="nothing is replicated"):
        live.limit(ReadLevel.REPLICATED)
    native.store_position(owner.control.flushed, 300)
    assert live.limit(ReadLevel.FLUSHED) == 300
    live.close()
    assert live.limit(ReadLevel.FLUSHED) == 300


def test_replicated_is_what_slaves_have_confirmed(store):
    owner, _ = store(replicates=1)
    owner.publish()
    live = watermark_of(owner)
    assert live.limit(ReadLevel.REPLICATED) == 0
    native.store_position(owner.control.confirm, 120)
    assert live.limit(ReadLevel.REPLICATED) == live.queue_limit(ReadLevel.REPLICATED) == 120
    assert live.queue_limit(ReadLevel.COMMITTED) > 120, "queues are not bounded unless dispatch_at says so"
    live.close()


def test_queues_end_at_the_confirmed_offset_with_dispatch_at_replicated(store):
    owner, end = store(replicates=1, dispatch_at=1)
    native.store_position(owner.control.confirm, end - 1)
    owner.publish()
    live = watermark_of(owner)
    assert live.queue_limit(ReadLevel.COMMITTED) == end - 1
    assert live.limit(ReadLevel.COMMITTED) == end
    live.close()


def test_without_an_engine_queues_end_at_the_noted_offset(store):
    owner, end = store()
    with StoreReader(owner.root) as reader:
        files = FilesWatermark(owner.root, reader.commit_log)
    assert files.queue_limit(ReadLevel.COMMITTED) == end
    with pytest.raises(UsageError, match="nothing is replicated"):
        files.limit(ReadLevel.REPLICATED)
    noted = ReplicationStateFile(owner.root)
    noted.write(ReplicationState("SYNC_MASTER", end - 7))
    assert (files.queue_limit(ReadLevel.COMMITTED), files.limit(ReadLevel.REPLICATED)) == (end, end - 7)
    noted.write(ReplicationState("SYNC_MASTER", end - 5, "replicated"))
    assert (files.queue_limit(ReadLevel.COMMITTED), files.limit(ReadLevel.COMMITTED)) == (end - 5, end)
    noted.write(ReplicationState("SYNC_MASTER", end + 5, "replicated"))
    assert files.queue_limit(ReadLevel.COMMITTED) == files.limit(ReadLevel.REPLICATED) == end


def test_the_files_decide_once_the_engine_is_gone(store):
    owner, end = store()
    native.store_position(owner.control.flushed, 7)
    owner.publish()
    live = watermark_of(owner)
    assert live.limit(ReadLevel.FLUSHED) == 7
    owner.lock.close()  # as the kernel does when every process of the engine is killed; its memory stays
    assert not live.is_live
    assert live.limit(ReadLevel.FLUSHED) == live.queue_limit(ReadLevel.WRITTEN) == end


@pytest.mark.parametrize("retired", [False, True], ids=["", "recovery was killed too"])
def test_records_that_a_killed_engine_never_published_are_not_flushed(store, retired):
    owner, end = store()
    owner.position(end - 1)
    owner.publish()
    owner.lock.close()
    if retired:  # open_crashed_memory.require_dead() does so before anything is recovered
        owner.memory.retire()
    live = watermark_of(owner)
    assert (live.limit(ReadLevel.FLUSHED), live.limit(ReadLevel.COMMITTED)) == (end - 1, end)


def test_a_killed_engines_memory_does_not_bound_a_log_that_a_broker_opened_afterwards(store):
    owner, end = store()
    owner.position(end - 1)
    lock = owner.root / "lock"
    owner.control.identity.lock_modified_ns = lock.stat().st_mtime_ns
    owner.publish()
    owner.lock.close()
    assert watermark_of(owner).limit(ReadLevel.FLUSHED) == end - 1
    os.utime(lock, ns=(0, 0))
    assert watermark_of(owner).limit(ReadLevel.FLUSHED) == end


@pytest.mark.parametrize(("change", "limit"), [(None, 0), ("lock", 0), ("boot_id", None), ("epoch", None), ("store_uuid", None)])
def test_after_a_failed_sync_of_a_killed_engine_only_the_watermark_counts(store, change, limit):
    """Also after a broker has opened the store, to which the kernel reports no page that was lost earlier."""
    owner, end = store()
    WATERMARK.write(owner.root, DurableWatermark(str(owner.engine_id.uuid), 1, 0))
    native.freeze(owner.control, native.FLUSHER, 5, "Input/output error")
    identity, lock = owner.control.identity, owner.root / "lock"
    identity.lock_modified_ns = lock.stat().st_mtime_ns
    if change == "epoch":
        identity.epoch += 1
    elif change in ("boot_id", "store_uuid"):
        getattr(identity, change)[0] ^= 1
    owner.publish()
    owner.lock.close()
    if change == "lock":
        os.utime(lock, ns=(0, 0))
    assert watermark_of(owner).limit(ReadLevel.FLUSHED) == (end if limit is None else limit)
    with open_crashed_memory(owner.root) as crashed:
        assert crashed.shared.sync_failed == (limit == 0)


def test_a_new_engines_memory_is_found_though_the_old_was_not_retired(store):
    owner, _ = store()
    owner.publish()
    live = watermark_of(owner)
    assert live.is_live
    owner.folder.sweep()
    fields = {name: getattr(owner.memory.identity, name) for name in ("epoch", "segment_bytes", "mode")}
    with EngineMemory.create(owner.folder, identity_of(owner.engine_id, **fields)) as successor:
        native.store_position(successor.control.flushed, 42)
        native.store(successor.control.state, "state", native.STATE_RUNNING)
        successor.publish()
        assert live.limit(ReadLevel.FLUSHED) == 42


@pytest.mark.parametrize("read", [
    lambda live: live.limit(ReadLevel.FLUSHED), lambda live: live.queue_limit(ReadLevel.FLUSHED), LiveWatermark.newest_ms,
], ids=["limit", "queue_limit", "newest_ms"])
def test_the_memory_that_is_being_read_stays_when_a_signal_handler_meets_another_engine(store, monkeypatch, read):
    owner, _ = store()
    owner.publish()
    live = watermark_of(owner)
    was_read = weakref.ref(live.memory())

    def interrupted(pointer):
        owner.memory.retire()
        live.memory()  # as a signal handler that reads
        assert was_read() is not None, "or the read that goes on kills the process"
        return 0, 0

    for name in ("load_position", "committed_slot"):
        monkeypatch.setattr(native, name, interrupted)
    read(live)


def test_a_reader_keeps_nothing_open_of_an_engine_that_was_replaced(live, monkeypatch):
    def of_swept() -> int:
        places = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return sum(str(owner.folder.path) in os.readlink(one) and not os.stat(one).st_nlink for one in places if os.path.exists(one))

    owner, _ = live()
    create_cleaning(owner.folder)
    could_hold, close = [], SegmentHolds.close
    monkeypatch.setattr(SegmentHolds, "close", lambda holds: (could_hold.append(not holds._lock._is_owned()), close(holds)))
    with pyengine.open_store(owner.root) as reader:
        with reader.hold(0) as is_held:
            assert is_held
        owner.folder.sweep()
        owner.memory.retire()
        before = of_swept()
        fields = {name: getattr(owner.memory.identity, name) for name in ("epoch", "segment_bytes", "mode")}
        with EngineMemory.create(owner.folder, identity_of(owner.engine_id, **fields)) as successor:
            create_cleaning(owner.folder)
            native.store(successor.control.state, "state", native.STATE_RUNNING)
            successor.publish()
            with reader.hold(0) as is_held:
                assert is_held and of_swept() == before - 4, "the control block and the holds, each with its mapping's"
            assert could_hold == [False], "no other thread has begun to hold since the look whether one does"


def test_holds_that_another_thread_is_taking_stay_open_and_are_not_waited_for(live):
    """That thread's signal handler may wait for the one that would close them."""
    owner, _ = live()
    create_cleaning(owner.folder)
    holds, closed = SegmentHolds(owner.folder), []
    closing = threading.Thread(target=lambda: closed.append(holds.close_if_unused()))
    with holds._lock:
        closing.start()
        closing.join(scaled_timeout_s(10))
        assert closed == [False]
    assert holds.close_if_unused()


def test_a_signal_handler_that_interrupts_the_close_of_unused_holds_keeps_no_thread_from_them(live):
    owner, _ = live()
    create_cleaning(owner.folder)
    holds, held = SegmentHolds(owner.folder), []

    def hold() -> None:
        held.append(holds.hold(0))
        holds.release(0)

    for _ in interrupted_at_each_place(holds.close_if_unused):
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        thread.join(scaled_timeout_s(30))
        assert held.pop()


def test_a_recovering_store_is_busy(store):
    owner, _ = store()
    owner.publish(native.STATE_RECOVERING)
    with pytest.raises(StoreBusyError, match="is being recovered"):
        watermark_of(owner).limit(ReadLevel.FLUSHED)


class Unflushed:
    """A store whose engine has committed up to 100; each call for the flushed end returns the next value of `flushed`."""

    def __init__(self, *flushed: int, is_live: bool = True, interval_ms: int = 1) -> None:
        self.root, self.is_live = "store", is_live
        self.config = EngineConfig(flush_interval_commit_log_ms=interval_ms)
        self.flushed = list(flushed)

    def max_physical_offset(self, level: ReadLevel) -> int:
        if level is ReadLevel.COMMITTED:
            return 100
        return self.flushed.pop(0) if len(self.flushed) > 1 else self.flushed[0]


def test_the_flushed_end_covers_what_was_committed_or_is_an_error(monkeypatch):
    assert flushed_end(Unflushed(40, 70, 120)) == 120
    assert flushed_end(Unflushed(40, is_live=False)) == 40, "nothing will flush it any more"
    monkeypatch.setattr(live_reader, "FLUSH_WAIT_S", -19.9)
    with pytest.raises(EngineError, match="durable up to 40, but messages up to 100 were committed 0 s ago.*why it is not flushed"):
        flushed_end(Unflushed(40, interval_ms=10_000))  # FLUSH_WAIT_S + two intervals of 10 s: 0.1 s


READS = [lambda reader: reader.topics(), lambda reader: reader.queue_ids("T"), lambda reader: reader.queue_range("T", 1),
         lambda reader: reader.get_message("T", 1, 0), lambda reader: reader.query_message("T", "k"),
         lambda reader: reader.offset_by_time("T", 1, 0), lambda reader: reader.message_at(0), lambda reader: reader.min_physical_offset]


@pytest.mark.root
@pytest.mark.parametrize("place", [
    "../..", "..", ".", "config", "config/engine.toml", "config/watermark", "commitlog", "commitlog/" + "0" * 20, "consumequeue",
    "consumequeue/T", "consumequeue/T/1", "consumequeue/T/1/" + "0" * 20, "index", "index/file"])
def test_what_this_user_may_not_read_is_an_error_with_the_stores_own_path(golden, place):
    """Whichever call meets it, and while the reader holds the folder as /proc/self/fd/N."""
    with tempfile.TemporaryDirectory() as open_folder:
        root = Path(open_folder) / "inner" / "store"
        builder = StoreBuilder(root)
        for number in range(3):
            builder.put("T", b"body", queue_id=1, keys="k")
        recover(MessageStore(root, builder.geometry))
        WATERMARK.write(root, DurableWatermark("", 1, builder.end))
        record_sizes(root, load_config(root, {}, {}))
        next((root / "index").iterdir()).rename(root / "index" / ("2" * 17))
        for folder in (open_folder, root.parent, root):
            os.chmod(folder, 0o755)

        def look() -> str | None:
            os.setuid(65534)
            try:
                with pyengine.open_store(root) as reader:
                    for read in READS:
                        try:
                            read(reader)
                        except EngineError as error:
                            assert str(root) in str(error) and "/proc/" not in str(error), error
            except EngineError as error:
                assert str(root) in str(error) and "/proc/" not in str(error), error
            return None

        path = root / ("index/" + "2" * 17 if place == "index/file" else place)
        for mode in (0o000, 0o111, 0o444) if path.is_dir() else (0o000,):
            os.chmod(path, mode)
            assert InChild(look)() is None, oct(mode)
        os.chmod(path, 0o755)


def test_a_reader_that_lacks_descriptors_for_the_engines_memory_says_so_and_leaves_none_open(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer:
        assert producer.put("T", b"x").ok
    get = 'with pyengine.open_store(root) as reader: reader.get_message("T", 0, 0)'
    call_with_few_files(engine.root, get, get)
