"""Whatever is damaged: it is told or does no harm; no crash, no hang, no other message, no cut in silence."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pytest

from faults import corruption
from faults.corruption import Damage, Judge, Outcome, sweep
from faults.memory_folder import memory_folder
from fix_store_builder import StoreBuilder
from pyengine.engine_config import Geometry
from pyengine.formats.record import decode_record
from pyengine.native import scan
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.config import load_config, record_sizes
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.engine_id import ensure_engine_id, raise_epoch
from pyengine.storage.message_store import MessageStore
from pyengine.storage.recovery.recover import recover
from record_bytes import encode_record

TINY = Geometry(mapped_file_size_commit_log_bytes=1024, mapped_file_size_consume_queue_bytes=100, max_hash_slot_num=8,
                max_index_num=16, mapped_file_size_consume_queue_ext_bytes=512)
SIZES = {name: str(getattr(TINY, name)) for name in ("mapped_file_size_commit_log_bytes", "mapped_file_size_consume_queue_bytes",
                                                     "max_hash_slot_num", "max_index_num")}
MESSAGES = 12
SORTS: dict[str, Callable[[Judge, random.Random], Iterator[Damage]]] = {
    "every bit": lambda judge, rng: corruption.every_flip(judge.files, rng),
    "scribbles": lambda judge, rng: corruption.random_scribbles(judge.files, 5000, rng),
    "pages": lambda judge, rng: corruption.pages(judge.files),
    "truncation": lambda judge, rng: corruption.truncations(judge.files),
    "foreign files": lambda judge, rng: corruption.foreign_files(judge.files, judge.root),
    "hostile numbers": lambda judge, rng: corruption.hostile_numbers(judge.files, judge.truth, TINY.mapped_file_size_commit_log_bytes),
    "hostile config": lambda judge, rng: corruption.hostile_config(judge.files),
}
SHORT_CASES = 5
SWEEP_S = 7200.0
LARGE_LOG_BYTES = 16 << 20
# Of one record alone; topic, queue, queue offset, tags and keys are held against queue and index by the check.
COVERED = ("physical_offset", "body", "body_crc", "size_bytes")


@pytest.fixture(name="memory_folder")
def folder_in_memory(tmp_path) -> Iterator[Path]:
    with memory_folder(tmp_path) as folder:
        yield folder


def make_judge(folder: Path, *, is_ours: bool) -> Judge:
    """A store that was stopped in order: RocketMQ's, or ours with its watermark at the end."""
    root = folder / "store"
    builder = StoreBuilder(root, TINY)
    for number in range(MESSAGES):
        builder.put("TU"[number % 2], b"body %d " % number * 8, queue_id=number // 2 % 2, tags=f"t{number % 3}", keys=f"k{number}")
    if is_ours:
        record_sizes(root, load_config(root, SIZES, environ={}))
        identity = ensure_engine_id(root)
        ConsumerOffsets(root).commit("T", "billing", {0: 2, 1: 1})
        WATERMARK.write(root, DurableWatermark(str(identity.uuid), raise_epoch(root), builder.end))
    recover(MessageStore(root, TINY))
    judge = Judge(root, folder)
    assert len(judge.truth) == MESSAGES
    return judge


class Sampled(Iterable[Damage]):
    """The same damages whenever it is gone through: those of the `total` whose numbers `choose` returns."""

    def __init__(self, judge: Judge, sort: str, seed: str, choose: Callable[[range], Collection[int]]) -> None:
        self.make = lambda: SORTS[sort](judge, random.Random(seed))
        self.total = sum(1 for _ in self.make())
        self.chosen = frozenset(choose(range(self.total)))

    def __iter__(self) -> Iterator[Damage]:
        return (damage for number, damage in enumerate(self.make()) if number in self.chosen)


def none_bad(outcome: Outcome) -> None:
    assert not outcome.bad, f"{len(outcome.bad)} of {outcome.cases}:\n" + "\n".join(outcome.bad[:10])


def test_damage_is_reported_or_does_no_harm(memory_folder, seed):
    """A few of each sort; the long form takes all."""
    print(f"seed {seed}")
    judge = make_judge(memory_folder, is_ours=True)
    some = random.Random(seed)
    few = [damage for sort in SORTS for damage in Sampled(judge, sort, seed, lambda all_: some.sample(all_, min(SHORT_CASES, len(all_))))]
    outcome = sweep(few, judge)
    none_bad(outcome)
    assert outcome.cases == len(few) > SHORT_CASES * (len(SORTS) - 1)


def test_a_judge_that_dies_or_hangs_is_a_finding_and_the_next_case_has_its_turn(memory_folder):
    def judge(damage: Damage) -> str | None:
        if damage.name == "dies":
            os.kill(os.getpid(), 9)
        while damage.name == "hangs":
            time.sleep(1)
        return "told" if damage.name == "bad" else None

    outcome = sweep([Damage(name) for name in ("good", "dies", "hangs", "bad", "good")], judge, timeout_s=1.0)
    assert outcome.cases == 5
    assert outcome.bad == ["case 1: ended by signal 9", "case 2: no answer within 1 s", "case 3: bad: told"]


def test_a_reader_that_serves_another_body_is_found(memory_folder):
    """The judge itself: damage that nothing reports is a finding."""
    judge = make_judge(memory_folder, is_ours=True)
    key = next(iter(judge.truth))
    judge.truth = dict(judge.truth)
    del judge.truth[key]
    assert "was never put" in str(judge(Damage("nothing")))


@pytest.mark.long
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "rocketmq"])
@pytest.mark.parametrize("sort", SORTS)
def test_all_damage_is_reported_or_does_no_harm(memory_folder, seed, proof, share, sort, is_ours):
    judge = make_judge(memory_folder, is_ours=is_ours)
    damages = Sampled(judge, sort, seed, share)
    outcome = sweep(damages, judge, until_s=SWEEP_S)
    proof("corruption", f"{sort}, {'our store' if is_ours else 'a store as RocketMQ leaves it'}", cases=outcome.cases,
          **{"left out": damages.total - outcome.cases}, bad=len(outcome.bad))
    none_bad(outcome)


def flip_in_large_log(count: int, rng: random.Random) -> tuple[int, int, list[str]]:
    """(flips, told, what was not told although it changed more than an uncovered field) in a log of many records."""
    log, starts = bytearray(), []
    while len(log) < LARGE_LOG_BYTES:
        starts.append(len(log))
        log += encode_record(topic="orders", body=rng.randbytes(rng.randrange(2000)), queue_id=1, queue_offset=len(starts) - 1,
                             properties=f"TAGS\1t{len(starts)}\2", store_timestamp_ms=1_700_000_000_000, physical_offset=len(log))
    ends = [*starts[1:], len(log)]
    told, silent = 0, []
    for _ in range(count):
        at = rng.randrange(len(starts))
        start, end = starts[at], ends[at]
        place, bit = rng.randrange(start, end), 1 << rng.randrange(8)
        log[place] ^= bit
        found = scan.walk(log, 0, start, end, check_crc=True, strict=True, limit=len(log))
        if (found.end_offset, found.reason) != (end, "range_end"):
            told += 1
        else:
            changed = decode_record(log, start)
            log[place] ^= bit
            sound = decode_record(log, start)
            if any(getattr(changed, name) != getattr(sound, name) for name in COVERED if sound.body or name != "body_crc"):
                silent.append(f"bit {bit:#x} of byte {place - start} of the record at {start}")
            log[place] ^= bit
        log[place] ^= bit
    return count, told, silent


def test_flipped_bits_in_a_large_log_are_told(rng):
    count, told, silent = flip_in_large_log(3000, rng)
    assert silent == [] and told > count * 0.8


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_million_flipped_bits_in_a_large_log_are_told(rng, proof, share):
    count, told, silent = flip_in_large_log(len(share(range(1_000_000))), rng)
    proof("corruption", "random bits of a large log", flips=count, told=told, bad=len(silent))
    assert silent == []
