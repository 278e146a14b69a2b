"""`pyengine why`: what made puts wait, from the flight recorder in shared memory (csrc/recorder.cdef.h).

It reads a copy, also when every process of the engine is dead, and does not disturb the workers. A wait is an entry for which
producers had to wait: a slow put, or a sync or slave that puts waited for. All other entries explain the waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.output import Reply, moment, parsed, span_s, store_command
from pyengine.errors import EngineUnavailableError
from pyengine.ipc.shared_objects import KIND_NAMES, RECORDER, find_folder
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import control as native
from pyengine.native import recorder
from pyengine.native.flush import monotonic_ns
from pyengine.native.recorder import Minute, Ring, Stall
from pyengine.storage.config import existing_store, load_config
from pyengine.storage.engine_id import read_boot_id

SHOWN = 20
TIMELINE_ROWS = 30
TIMELINE_MARKS = 60
SECOND_NS = 1_000_000_000

# Each cause in one clause, and the remedy. {kind} is the worker that recorded it.
CAUSES = {
    "sync": ("the device took long to sync", "a slow or a busy disk: `iostat -x 1`; sync_flush needs one with a fast cache"),
    "write": ("a write to the log took long", "a slow or a busy disk, or no memory for its pages: `iostat -x 1`, `vmstat 1`"),
    "segment": ("the next segment, or its space, was not ready", "the allocator was too slow: the disk is slow, or segments are small"),
    "pool": ("no buffer of the pool was free", "the committer was too slow: a faster disk, or more buffers (transient_store_pool_size)"),
    "fault": ("pages had to be brought in or made writable", "a disk that hangs, or is frozen: `iostat -x 1`, `dmesg`; too little "
              "memory for the page cache; the memlock limit, in pool mode"),
    "slave": ("slaves took long to confirm", "`pyengine status`: the link and the slave's disk; slave_timeout_ms bounds the wait"),
    "lock": ("a larger queue table was not there yet", "many new queues at once"),
    "stopped": ("the {kind} was stopped by a signal", "something sends SIGSTOP, or a cgroup was frozen"),
    "no_room": ("the disk was full", "free space, or shorter retention (docs/cleaning.md)"),
    "cpu": ("the {kind} was ready to run and had no processor", "too few processors for what runs here, or a CPU quota"),
    "restart": ("the {kind} had died and was started again", "its last words are in engine.log"),
    "backlog": ("more was submitted than one pass takes", "more producers than the store can serve: larger batches"),
    "large": ("a large pass", "large messages or batches; nothing is wrong"),
    "blocked": ("the {kind} could not do its work", "`pyengine status` says why it is blocked"),
    "roll": ("a full segment was left for the next", "larger segments (mapped_file_size_commit_log_bytes) do it less often"),
    "woken_late": ("the {kind} slept longer than it meant to", "a busy host or hypervisor; nothing more is known"),
    "round": ("the {kind} was at work", "nothing is wrong"),
    "start": ("the engine was started", "nothing is wrong"),
    "failed": ("the disk failed, and the store is read-only", "`pyengine status` says what to do"),
    "unknown": ("nothing is known of the cause", "please report it"),
}
# The workers that can have delayed the writer, by the cause that it recorded.
WAITED_FOR = {"segment": native.ALLOCATOR, "pool": native.COMMITTER, "lock": native.SUPERVISOR}


@dataclass(frozen=True, slots=True)
class Entry:
    """One stall for the output; times in ms, `ended_ms` since 1970."""

    ended_ms: float
    took_ms: float
    worker: str
    what: str
    cause: str
    puts: int
    sentence: str
    phases_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Cause:
    """The waits with one cause, in sum."""

    cause: str
    waits: int
    total_ms: float
    longest_ms: float
    means: str
    advice: str


@dataclass(frozen=True, slots=True)
class Why:
    """What made puts wait since `since_ms`. `forgotten`: the number of slow puts whose entries were overwritten."""

    since_ms: float
    waits: list[Entry]
    causes: list[Cause]
    others: list[Entry]
    now: list[str]
    forgotten: int
    total_ms: float

    @property
    def longest_ms(self) -> float:
        """The duration of the longest wait."""
        return max((entry.took_ms for entry in self.waits), default=0.0)

    @property
    def summary(self) -> dict[str, Any]:
        """Return number, durations and causes of the waits, as JSON."""
        return {"threshold_ms": recorder.THRESHOLD_NS / 1e6, "waits": len(self.waits) + self.forgotten, "total_ms": self.total_ms,
                "longest_ms": self.longest_ms, "forgotten": self.forgotten, "causes": [asdict(cause) for cause in self.causes]}

    @property
    def sentence(self) -> str:
        """Return one sentence about all waits."""
        began = output.time_text(round(self.since_ms))
        if not self.waits and not self.forgotten:
            return f"Since {began} no put waited {recorder.THRESHOLD_NS / 1e6:g} ms or more for the engine."
        most = self.causes[0].means if self.causes else "nothing is left of them"
        return (f"Since {began} puts waited {recorder.THRESHOLD_NS / 1e6:g} ms or more {len(self.waits) + self.forgotten:,} times, "
                f"{_span(self.total_ms)} in all, {_span(self.longest_ms)} at the longest; most of it because {most}.")


def read_recorder(root: Path) -> list[Ring]:
    """Return the records of the workers of the store at `root`, whose engine runs or died in this boot.

    EngineUnavailableError if there is no record.
    """
    gone = (f"nothing is recorded of {root}: its engine was stopped in order, which ends the record, or has not run since this host "
            "came up")
    try:
        folder = find_folder(root)
        with folder.attach(RECORDER, writable=False) as shared:
            whole = bytearray(shared.memory)
    except EngineUnavailableError as error:
        raise EngineUnavailableError(f"{error}" if living_kinds(root) else gone) from None
    found = recorder.view(whole)
    recorder.check(found, len(whole))
    if recorder.boot_of(found) != read_boot_id():
        raise EngineUnavailableError(gone)
    return recorder.read_rings(found)


def explain(rings: Sequence[Ring], living: Iterable[int], since_ns: int, now_ns: int, now_ms: float) -> Why:
    """Explain the waits from `since_ns` to `now_ns` (CLOCK_MONOTONIC); `now_ns` is `now_ms` since 1970."""
    def entry(stall: Stall) -> Entry:
        sentence = _sentence(stall)
        waited_for = WAITED_FOR.get(stall.cause)
        is_writers = stall.kind in (native.WRITER, recorder.PUTS_RING)
        cause = _underlying(rings[waited_for], stall) if waited_for is not None and is_writers else None
        if cause is not None:
            sentence += f": {_sentence(cause)}"
        return Entry(now_ms - (now_ns - stall.ended_ns) / 1e6, stall.took_ns / 1e6, KIND_NAMES[_worker(stall)], stall.what, stall.cause,
                     stall.entries, sentence, {name: ns / 1e6 for name, ns in stall.phase_ns.items()})

    recent = sorted((stall for ring in rings for stall in ring.stalls if stall.ended_ns >= since_ns), key=lambda stall: stall.ended_ns)
    waits = [stall for stall in recent if _is_wait(stall)]
    others = [entry(stall) for stall in recent if not _is_wait(stall)]
    by_cause: dict[str, list[Stall]] = {}
    for stall in waits:
        by_cause.setdefault(stall.cause, []).append(stall)
    causes = [Cause(cause, len(stalls), _union_ns(stalls) / 1e6, max(stall.took_ns for stall in stalls) / 1e6,
                    _means(cause, stalls), CAUSES[cause][1]) for cause, stalls in by_cause.items()]
    return Why(now_ms - (now_ns - since_ns) / 1e6, [entry(stall) for stall in waits],
               sorted(causes, key=lambda cause: -cause.total_ms), others, _now(rings, living, now_ns),
               _forgotten(rings[recorder.PUTS_RING], since_ns), _union_ns(waits) / 1e6)


class Waits:
    """Collects what makes puts of one store wait from now on, for a benchmark; call collect() once a minute or more often.

    It continues over kill -9 of every process and a new start. Call collect() before an orderly stop, which ends the record.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._began_ns = monotonic_ns()
        self._stalls: list[dict[tuple[int, int], Stall]] = [{} for _ in range(recorder.PUTS_RING + 1)]
        self._minutes: list[dict[int, int]] = [{} for _ in range(recorder.PUTS_RING + 1)]
        self.collect()
        self._counted_before = [dict(minutes) for minutes in self._minutes]

    def collect(self) -> None:
        """Add the new entries; if there is no record at this moment, keep the old ones."""
        with contextlib.suppress(EngineUnavailableError):
            for kind, ring in enumerate(read_recorder(self._root)):
                self._stalls[kind].update(((one.number, one.began_ns), one) for one in ring.stalls if one.ended_ns >= self._began_ns)
                for row in ring.minutes:
                    self._minutes[kind][row.minute] = max(row.stalls, self._minutes[kind].get(row.minute, 0))

    def why(self) -> Why:
        """Return all waits, after one more collect()."""
        self.collect()
        rings = []
        for stalls, minutes, before in zip(self._stalls, self._minutes, self._counted_before, strict=True):
            rows = [Minute(minute, count - before.get(minute, 0)) for minute, count in minutes.items()]
            rings.append(Ring(len(stalls), None, list(stalls.values()), rows))
        return explain(rings, (), self._began_ns, monotonic_ns(), time.time() * 1000)


def _is_wait(stall: Stall) -> bool:
    return stall.what in ("puts", "confirm") or stall.what == "sync" and stall.detail == 1


def _worker(stall: Stall) -> int:
    return native.WRITER if stall.kind == recorder.PUTS_RING else stall.kind


def _means(cause: str, stalls: Sequence[Stall]) -> str:
    kinds = list(dict.fromkeys(KIND_NAMES[_worker(stall)] for stall in stalls))
    return CAUSES[cause][0].format(kind=" or the ".join(kinds))


def _sentence(stall: Stall) -> str:
    """Return one clause about one stall."""
    if stall.what == "died":
        return f"the {KIND_NAMES[stall.detail] if stall.detail < len(KIND_NAMES) else 'worker'} died, and was started again"
    sentence = CAUSES[stall.cause][0].format(kind=KIND_NAMES[_worker(stall)])
    if stall.what == "start":
        return f"{sentence}, which took {_span(stall.took_ns / 1e6)}"
    if stall.what == "blocked" and not stall.took_ns:
        return f"{sentence}, from here on"
    if stall.what == "stopped":
        return f"{sentence}, for no longer than {_span(stall.took_ns / 1e6)}"
    if stall.cause in ("sync", "write") and stall.bytes > 0:
        spent_ns = stall.phase_ns.get(stall.cause, stall.took_ns)
        sentence += f": {_span(spent_ns / 1e6)} for {output.size_text(stall.bytes)}"
    elif stall.cause == "fault" and stall.major_faults + stall.minor_faults:
        sentence += f" ({stall.major_faults:,} from the disk, {stall.minor_faults:,} others)"
    elif stall.cause == "cpu" and stall.queued_ns:
        sentence += f" for {_span(stall.queued_ns / 1e6)} of {_span(max(stall.window_ns, stall.queued_ns) / 1e6)}"
    elif stall.cause == "large":
        sentence += f" of {output.size_text(stall.bytes)}"
    return sentence


def _underlying(ring: Ring, stall: Stall) -> Stall | None:
    """Return the stall of another worker that explains most of the writer's stall."""
    def shared_ns(one: Stall) -> int:
        return _shared_ns(one, stall.began_ns, stall.ended_ns)

    found = [one for one in ring.stalls if one.cause != "round" and shared_ns(one) * 4 >= stall.took_ns]
    return max(found, key=shared_ns, default=None)


def _shared_ns(stall: Stall, began_ns: int, ended_ns: int) -> int:
    """Return how long the stall overlaps with that time; 0 or less if it does not."""
    return min(stall.ended_ns, ended_ns) - max(stall.began_ns, began_ns)


def _union_ns(stalls: Iterable[Stall]) -> int:
    """Return the length of the union of the stalls."""
    total_ns = end_ns = 0
    for stall in sorted(stalls, key=lambda stall: stall.began_ns):
        total_ns += max(0, stall.ended_ns - max(end_ns, stall.began_ns))
        end_ns = max(end_ns, stall.ended_ns)
    return total_ns


def _forgotten(ring: Ring, since_ns: int) -> int:
    """Return from the counts by minute how many entries of slow puts since then were overwritten."""
    kept: dict[int, int] = {}
    for stall in ring.stalls:
        kept[stall.ended_ns // (60 * SECOND_NS)] = kept.get(stall.ended_ns // (60 * SECOND_NS), 0) + 1
    return sum(max(0, row.stalls - kept.get(row.minute, 0)) for row in ring.minutes if (row.minute + 1) * 60 * SECOND_NS > since_ns)


def _now(rings: Sequence[Ring], living: Iterable[int], now_ns: int) -> list[str]:
    names = {"sync": "syncs", "write": "writes", "segment": "waits for the next segment", "lock": "waits for a larger queue table",
             "blocked": "cannot do its work (`pyengine status`)"}
    found = []
    for kind in living:
        at = rings[kind].current
        if at is not None and at.phase in names and now_ns - at.since_ns >= recorder.THRESHOLD_NS:
            found.append(f"just now the {KIND_NAMES[kind]} {names[at.phase]}, for {_span((now_ns - at.since_ns) / 1e6)}")
    return found


def _span(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s" if ms < 100_000 else f"{ms / 60_000:,.0f} min"


def since_of(text: str) -> Callable[[float], float]:
    """Parse a span or a time into a function from now to the begin, in ms since 1970; ValueError for anything else."""
    with contextlib.suppress(ValueError):
        back_ms = span_s(text) * 1000
        return lambda now_ms: now_ms - back_ms
    began_ms = moment(text).timestamp() * 1000
    return lambda now_ms: began_ms


@click.command()
@store_command
@click.option("--since", default="1h", show_default=True, metavar="SPAN|TIME", help="How far back: 90s, 10m, 2h, 1d, or a time.",
              callback=parsed(since_of, "a span (90s, 10m, 2h, 1d), a time in ISO 8601, or @ and ms since 1970"))
@click.option("--all", "shows_all", is_flag=True, help="Show also those for which no put waited.")
def why(store: Path, settings: dict[str, str], since: Callable[[float], float], shows_all: bool) -> Reply:
    """Explain why puts were slow. It shows each wait of 5 ms or more for the engine, with its cause.

    The record survives kill -9 (docs/statistics.md).

    \b
    Examples:
      pyengine why STORE --since 10m --all
    """
    load_config(existing_store(store), settings)  # a wrong setting is an error, as in every command
    rings = read_recorder(store)
    now_ns, now_ms = monotonic_ns(), time.time() * 1000
    since_ns = now_ns - round((now_ms - since(now_ms)) * 1e6)
    found = explain(rings, living_kinds(store), since_ns, now_ns, now_ms)
    return Reply(_document(store, found), lambda: _show(found, shows_all=shows_all))


def _document(store: Path, found: Why) -> dict[str, Any]:
    return {"store": str(store), "since_ms": round(found.since_ms), "threshold_ms": recorder.THRESHOLD_NS / 1e6,
            "sentence": found.sentence, "total_ms": found.total_ms, "forgotten": found.forgotten, "now": found.now,
            "causes": [asdict(cause) for cause in found.causes], "waits": [asdict(one) for one in found.waits],
            "others": [asdict(one) for one in found.others]}


def _show(found: Why, *, shows_all: bool) -> None:
    print(found.sentence)
    for line in found.now:
        print(line)
    shown = sorted(found.waits + found.others, key=lambda one: one.ended_ms) if shows_all else found.waits[-SHOWN:]
    output.write_tables(
        (("cause", "waits", "in all", "longest", "what helps"), [
            (cause.cause, cause.waits, _span(cause.total_ms), _span(cause.longest_ms), cause.advice) for cause in found.causes]),
        (("until (UTC)", "took", "what", "why"), [
            (output.time_text(round(one.ended_ms)), _span(one.took_ms), _puts(one.puts) if one.puts else one.what, one.sentence)
            for one in shown]))
    left = len(found.waits) - SHOWN
    if left > 0 and not shows_all:
        print(f"{left:,} earlier ones: --all")
    if found.forgotten:
        print(f"{found.forgotten:,} more were only counted, because newer ones took their places")
    if found.waits:
        print()
        for line in timeline(found):
            print(line)
    notable = [one for one in found.others if one.what in ("died", "start", "blocked")]
    if notable and not shows_all:
        print()
        for one in notable[-SHOWN:]:
            print(f"{output.time_text(round(one.ended_ms))}  {one.sentence}")


def write_stalls(column: str, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of what made puts wait, by measurement (`column`) and cause."""
    threshold = f"{recorder.THRESHOLD_NS / 1e6:g} ms or more"
    rows = [(name, cause["waits"], _span(cause["total_ms"]), _span(cause["longest_ms"]), cause["means"])
            for name, summary in summaries.items() for cause in summary["causes"]]
    if rows:
        output.write_table((column, f"waits of {threshold}", "in all", "longest", "because"), rows)
    else:
        print(f"no put waited {threshold} for the engine")
    for name, summary in summaries.items():
        if summary["forgotten"]:
            print(f"{name}: {summary['forgotten']:,} more were only counted, because newer ones took their places")


def _puts(number: int) -> str:
    return f"{number:,} put" + ("s" if number > 1 else "")


def timeline(found: Why) -> list[str]:
    """Return rows of marks, each for an interval of which puts waited up to 1 % (`.`), 10 % (`o`) or more (`#`)."""
    first_ms = min(one.ended_ms - one.took_ms for one in found.waits)
    last_ms = max(one.ended_ms for one in found.waits)
    step_ms = next((step_s * 1000 for step_s in (1, 10, 60, 600, 3600) if (last_ms - first_ms) / (step_s * 1000) <= TIMELINE_MARKS * 5),
                   86_400_000)
    spent: dict[int, float] = {}
    for one in found.waits:
        at_ms = one.ended_ms - one.took_ms
        while at_ms < one.ended_ms:
            mark = int(at_ms // step_ms)
            until_ms = min(one.ended_ms, (mark + 1) * step_ms)
            spent[mark] = spent.get(mark, 0.0) + until_ms - at_ms
            at_ms = until_ms
    rows = sorted({mark // TIMELINE_MARKS for mark in spent})
    lines = [f"each mark is {_span(step_ms)}: . up to 1 % of it waited, o up to 10 %, # more"]
    for row in rows[-TIMELINE_ROWS:]:
        marks = "".join(_mark(spent.get(row * TIMELINE_MARKS + at, 0.0) / step_ms) for at in range(TIMELINE_MARKS)).rstrip()
        lines.append(f"{output.time_text(row * TIMELINE_MARKS * step_ms)}  |{marks}")
    return lines


def _mark(share: float) -> str:
    return " " if share <= 0 else "." if share <= 0.01 else "o" if share <= 0.1 else "#"
