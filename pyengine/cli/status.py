"""`pyengine status` shows positions, workers and sessions of a store, running or not; `pyengine top` watches a running engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.engine_status import Verdict, engine_status, live_status
from pyengine.cli.output import NumberRange, Reply, set_option, store_argument, store_command
from pyengine.errors import ExitCode
from pyengine.ipc.statistics import Statistics
from pyengine.native import store_stats
from pyengine.storage.config import existing_store

if TYPE_CHECKING:
    from rich.console import RenderableType

LINK_COLUMNS = ("link", "state", "since", "sent", "acked", "lag", "detail")
DrawSample = Callable[["Sample"], None]
RATES = ("put_messages", "put_bytes", "wrote", "committed", "flushed", "reput_from", "confirm", "syncs", "refused_puts")
SHARES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


@click.command()
@store_command
def status(store: Path, settings: dict[str, str]) -> Reply:
    """Show a verdict, state, positions and processes. The store may be stopped.

    The verdict is a word and a sentence (docs/operations.md). Exit code 6: stuck, read-only or degraded.

    \b
    Example:
      pyengine status STORE
    """
    document = engine_status(existing_store(store), settings)
    return Reply(document, lambda: _print_status(document),
                 ExitCode.DEGRADED if Verdict(document["verdict"]).is_trouble else ExitCode.OK)


def _print_status(document: dict[str, Any]) -> None:
    click.echo(output.printable(f"{document['verdict']}: {document['summary']}"))
    for finding in document["findings"][1:]:
        click.echo(output.printable(f"also {finding['verdict']}: {finding['sentence']}"))
    click.echo()
    facts = [("store", document["store"]), ("state", document["state"] + (", stopping" if document["stopping"] else ""))]
    facts += [("mode", f"{document['mode']}, {document['role']}{', read-only' if document['read_only'] else ''}")]
    verified = document.get("verified")
    if verified is not None and not verified["whole"]:
        facts += [("read and whole", f"{verified['from']:,} to {verified['to']:,}; what is below was there before this engine")]
    space = document["space"]
    facts += [("log and index", f"{output.size_text(space['disk_bytes'])} on the disk, {output.size_text(space['length_bytes'])} when "
                                "their files are full")]
    if "epoch" in document:
        facts += [("sessions", document["sessions"]),
                  ("last message", output.time_text(document["last_store_timestamp_ms"])),
                  ("not yet flushed", output.size_text(document["unflushed_bytes"])),
                  ("not yet in queues", output.size_text(document["dispatch_lag_bytes"]))]
        if document["disk"].get("used_percent", -1) >= 0:
            facts += [("disk used", f"{document['disk']['used_percent']} %, "
                                    f"{output.size_text(document['disk']['usable_bytes'])} left")]
        if document["undrained_bytes"]:
            facts += [("not yet drained", output.size_text(document["undrained_bytes"]))]
        if document["clock_back_ms"] > 3000:
            facts += [("clock stepped back", f"{document['clock_back_ms']} ms")]
        facts += replication_facts(document["replication"])
        if document["statistics"]:
            facts += _figures(document["statistics"])
    output.write_facts(facts)
    print()
    output.write_table(("position", "offset"), list(document["positions"].items()))
    output.write_lists(document, workers="kind pid state restarts heartbeat_age_ms", log_holds="name owner offset expires_ms active damage")
    output.write_tables((LINK_COLUMNS, [link_row(one) for one in (document["replication"] or {}).get("links", ())]))
    output.write_lists(document, name_servers="address registered since_ms problem",
                       pops="group topic in_flight attempts invisible_until_ms", session_list="slot pid state ring_bytes: sessions")


def _figures(figures: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the main statistics; the JSON has all of them (docs/statistics.md)."""
    facts: list[tuple[str, object]] = [
        ("puts/s", " ".join(f"{window} {output.number_text(value)}" for window, value in figures["put_tps"].items())),
        ("put time", _times(figures, "put_latency_50_ms", "put_latency_99_ms", "put_latency_999_ms")),
        ("sync time", _times(figures, "sync_latency_50_ms", "sync_latency_99_ms", "sync_latency_999_ms")),
        ("dispatch lag", _times(figures, "dispatch_lag_50_ms", "dispatch_lag_99_ms", "dispatch_lag_max_ms"))]
    if figures["put_message_failed_times"]:
        by_status = ", ".join(f"{status} {count:,}" for status, count in figures["put_message_failed_by_status"].items())
        facts += [("refused puts", by_status)]
    if figures["out_of_order"]:
        facts += [("entries out of order", f"{figures['out_of_order']:,}: `pyengine check` tells where")]
    return facts


def _times(figures: dict[str, Any], *names: str) -> str:
    """Return percentiles as text: p50 0.007 p99 0.086 p999 3.8 ms."""
    if figures[names[0]] is None:
        return "-"
    labels = ("p50", "p99", "max" if "max" in names[2] else "p99.9")
    return " ".join(f"{label} {output.number_text(figures[name])}" for label, name in zip(labels, names, strict=True)) + " ms"


def link_row(link: dict[str, Any]) -> tuple[object, ...]:
    """Return one link as a row of the table."""
    return (link["address"], link["state"], output.time_text(link["since_ms"]), _position(link["sent"]), _position(link["acked"]),
            _lag_text(link["lag_bytes"], link["lag_s"]), link["detail"])


def _lag_text(size_bytes: int | None, seconds: float | None) -> str:
    """Return a lag as text: 1.2 MiB, 3 s."""
    if size_bytes is None:
        return "-"
    return output.size_text(size_bytes) + (f", {seconds:.0f} s" if seconds else "")


def _position(offset: int) -> str:
    return f"{offset:,}" if offset >= 0 else "-"


def replication_facts(replication: dict[str, Any] | None) -> list[tuple[str, object]]:
    """Return an engine's replication in a line; empty if it does not replicate."""
    if replication is None or "links" not in replication:
        return []
    if replication["linked"] is not None:
        return [("master", _master_line(replication))]
    bound = ", and queues end there" if replication["dispatch_at"] == "replicated" else ""
    return [("slaves", f"{replication['slaves_connected']} connected, {output.size_text(replication['unconfirmed_bytes'])} not "
                       f"confirmed{bound}")]


def _master_line(replication: dict[str, Any]) -> str:
    address = replication["links"][0]["address"] if replication["links"] else ""
    heard = "end of its log unknown" if replication["master_end"] is None else (
        f"its log ends at {replication['master_end']:,}, "
        f"lag {_lag_text(replication['master_lag_bytes'], replication['master_lag_s'])}")
    begins = f"; here it begins at {replication['begins_at']:,}" if replication["begins_at"] else ""
    return f"{address} {'linked' if replication['linked'] else 'not linked'}, {heard}{begins}".strip()


# ---- top ------------------------------------------------------------------------------------


@click.command()
@store_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line and refresh, with rates per second.")
@click.option("--interval", "interval_s", type=NumberRange(min=0.05), default=1.0, show_default=True,
              help="Seconds between two refreshes.")
@click.option("--count", type=click.IntRange(min=1), default=None, help="Stop after this many refreshes.")
def top(store: Path, settings: dict[str, str], as_json: bool, interval_s: float, count: int | None) -> None:
    """Watch rates, latencies, positions and topics. Ctrl-C ends it.

    \b
    Example:
      pyengine top STORE --interval 0.5 --count 10 --json
    """
    with _drawing(as_json) as draw:
        for number, sample in enumerate(samples(existing_store(store), settings), 1):
            draw(sample)
            if number == count:
                return
            output.pause(interval_s)


@contextmanager
def _drawing(as_json: bool) -> Iterator[DrawSample]:
    """Yield a function that shows a sample: as a JSON line, as the whole screen of a terminal, or after the previous one."""
    if as_json:
        def print_json(sample: Sample) -> None:
            output.write_json({**sample.document, "rates_per_s": sample.rates_per_s, "between_samples": sample.latencies_ms,
                               "topic_rates_per_s": sample.topic_rates_per_s})
            sys.stdout.flush()

        yield print_json
        return
    console = output.console()
    if not sys.stdout.isatty():
        def draw(sample: Sample) -> None:
            console.print(screen(sample))
            sys.stdout.flush()

        yield draw
        return
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda sample: live.update(screen(sample), refresh=True)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a store; rates are empty in the first one, after a restart, and for a stopped store."""

    at_s: float
    document: dict[str, Any]
    figures: Statistics | None
    rates_per_s: dict[str, float] = field(default_factory=dict)
    topic_rates_per_s: dict[str, dict[str, float]] = field(default_factory=dict)
    latencies_ms: dict[str, dict[str, float | None]] = field(default_factory=dict)


def samples(root: Path, settings: dict[str, str], clock_s: Callable[[], float] = time.monotonic) -> Iterator[Sample]:
    """Yield a sample of the store at each step, with the rates since the one before."""
    before: Sample | None = None
    while True:
        live = live_status(root)
        if live is not None:
            now = between(before, Sample(clock_s(), *live))
        elif before is not None and before.figures is None and before.document["state"] == "stopped":
            now = Sample(clock_s(), before.document, None)  # the files of a stopped store are read once
        else:
            now = Sample(clock_s(), engine_status(root, settings), None)
        yield now
        before = now


def between(before: Sample | None, now: Sample) -> Sample:
    """Return `now` with the rates since `before`."""
    if before is None or before.document.get("epoch") != now.document.get("epoch") or now.at_s <= before.at_s:
        return now
    seconds = now.at_s - before.at_s
    rates = {name: round((_counter(now.document, name) - _counter(before.document, name)) / seconds, 1) for name in RATES}
    if before.figures is None or now.figures is None:
        return Sample(now.at_s, now.document, now.figures, rates)
    rates["dispatched"] = round((now.figures.dispatched - before.figures.dispatched) / seconds, 1)
    return Sample(now.at_s, now.document, now.figures, rates, _topic_rates(before.figures, now.figures, seconds),
                _latencies(before.figures, now.figures))


def _counter(document: dict[str, Any], name: str) -> int:
    return int(document["positions"].get(name, document.get(name, 0)))


def _topic_rates(before: Statistics, now: Statistics, seconds: float) -> dict[str, dict[str, float]]:
    """Return the rates of the topics with new messages, the busiest first."""
    grown = {}
    for topic, count in now.topics.items():
        was = before.topics.get(topic)
        messages = count.messages - (was.messages if was else 0)
        size_bytes = count.size_bytes - (was.size_bytes if was else 0)
        if messages > 0:
            grown[topic] = {"messages": round(messages / seconds, 1), "bytes": round(size_bytes / seconds, 1)}
    return dict(sorted(grown.items(), key=lambda pair: (-pair[1]["messages"], pair[0])))


def _latencies(before: Statistics, now: Statistics) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for what, latency in now.histograms.items():
        was = before.histograms[what]
        grown = [max(0, count - old) for count, old in zip(latency.buckets, was.buckets, strict=True)]
        ns = {name: store_stats.percentile_ns(grown, share) for name, share in SHARES.items()}
        found[what] = {name: None if value is None else value / 1e6 for name, value in ns.items()}
    return found


TOPICS_SHOWN = 10


def screen(sample: Sample) -> RenderableType:
    """Render a sample; topics come last, because they may not all fit."""
    from rich.console import Group
    from rich.text import Text

    document = sample.document
    parts: list[RenderableType] = [_facts(sample), Text(), output.table_of(("position", "offset", "per second"), [
        (name, value, _size(sample.rates_per_s.get(name))) for name, value in document["positions"].items()], right=("per second",))]
    if document["workers"]:
        parts += [Text(), output.table_of(("worker", "pid", "state", "restarts", "errors", "heartbeat ms ago"), [
            (one["kind"], str(one["pid"]), Text(one["state"], "" if one["state"] == "ready" else "red"), one["restarts"], one["errors"],
             output.number_text(one["heartbeat_age_ms"])) for one in document["workers"]], right=("pid", "heartbeat ms ago"))]
    links = (document["replication"] or {}).get("links")
    if links:
        parts += [Text(), output.table_of(LINK_COLUMNS, [link_row(one) for one in links])]
    if sample.figures is not None and sample.figures.topics:
        parts += [Text(), _topics(sample)]
    return Group(*parts)


def _facts(sample: Sample) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    document, rates = sample.document, sample.rates_per_s
    table = Table.grid(padding=(0, 2))
    state = Text(document["state"], style="green" if document["state"] == "running" and not document["read_only"] else "red")
    if document["reason"]:
        state.append(f": {output.printable(document['reason'])}")
    table.add_row("store", Text(output.printable(document["store"])))
    table.add_row("state", state)
    table.add_row("mode", f"{document['mode']}, {document['role']}, {document['sessions']} producers")
    if sample.figures is not None:
        windows = "  ".join(f"{window_s} s {output.number_text(value)}" for window_s, value in sample.figures.put_tps.items())
        table.add_row("puts/s", f"{output.number_text(rates.get('put_messages'))}   {_size(rates.get('put_bytes'))}/s   "
                                f"({windows})   refused/s {output.number_text(rates.get('refused_puts'))}")
        table.add_row("put time", _latency(sample, "put"))
        table.add_row("sync time", f"{_latency(sample, 'sync')}   {output.number_text(rates.get('syncs'))}/s")
        table.add_row("dispatched/s", f"{output.number_text(rates.get('dispatched'))}   lag {_latency(sample, 'lag')}"
                                      f"   out of order {sample.figures.dispatch_out_of_order:,}")
    for name, text in replication_facts(document["replication"]):
        table.add_row(name, Text(output.printable(str(text))))
    if "epoch" in document:
        table.add_row("waiting", f"to be durable {output.size_text(document['unflushed_bytes'])}, for queues "
                                 f"{output.size_text(document['dispatch_lag_bytes'])}, in the pool "
                                 f"{output.size_text(document['undrained_bytes'])}")
    return table


def _latency(sample: Sample, what: str) -> str:
    found = sample.latencies_ms.get(what)
    if not found or found["p50"] is None:
        return "-"
    return "  ".join(f"{name} {output.number_text(value)}" for name, value in found.items()) + " ms"


def _topics(sample: Sample) -> RenderableType:
    """Render the busiest topics now, or the largest so far if there are no new messages."""
    counts = sample.figures.topics if sample.figures is not None else {}
    busy = list(sample.topic_rates_per_s)
    rest = sorted((topic for topic in counts if topic not in sample.topic_rates_per_s),
                  key=lambda topic: (-counts[topic].messages, topic))
    shown = [*busy, *rest][:TOPICS_SHOWN]
    rows = []
    for topic in shown:
        rate = sample.topic_rates_per_s.get(topic, {})
        rows.append((topic, output.number_text(rate.get("messages", 0)), _size(rate.get("bytes", 0)), counts[topic].messages,
                     output.size_text(counts[topic].size_bytes)))
    title = f"topic ({len(counts)})" if len(counts) > len(shown) else "topic"
    return output.table_of((title, "messages/s", "bytes/s", "messages", "bytes"), rows, right=("messages/s", "bytes/s", "bytes"))


def _size(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else output.size_text(size_bytes)
