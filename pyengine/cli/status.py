"""`pyengine status`: shows positions, workers and sessions of a store, running or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pyengine.cli import output
from pyengine.cli.output import store_command
from pyengine.errors import ExitCode
from pyengine.storage.config import existing_store

LINK_COLUMNS = ("link", "state", "since", "sent", "acked", "lag", "detail")


@click.command()
@store_command
def status(store: Path, settings: dict[str, str], as_json: bool) -> int:
    """Show a verdict, state, positions and processes. The store may be stopped.

    The verdict is one sentence and one word: ok, warning, stopping, stopped, recovering (exit code 0), or stuck,
    read-only, degraded (exit code 6).

    \b
    Examples:
      pyengine status STORE
    """
    from pyengine.cli.engine_status import engine_status
    from pyengine.cli.verdict import Verdict

    document = engine_status(existing_store(store), settings)
    output.print_answer(document, as_json, lambda: _print(document))
    return ExitCode.DEGRADED if Verdict(document["verdict"]).is_trouble else ExitCode.OK


def _print(document: dict[str, Any]) -> None:
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
    if document["workers"]:
        print()
        output.write_table(("worker", "pid", "state", "restarts", "heartbeat ms ago"), [
            (one["kind"], str(one["pid"]), one["state"], one["restarts"], one["heartbeat_age_ms"])
            for one in document["workers"]])
    if document["log_holds"]:
        print()
        output.write_table(("log hold", "owner", "from offset", "until"), [
            (one["name"], one["owner"] or one["damage"], one["offset"],
             output.time_text(one["expires_ms"]) + ("" if one["active"] else " (holds nothing)")) for one in document["log_holds"]])
    links = (document["replication"] or {}).get("links")
    if links:
        print()
        output.write_table(LINK_COLUMNS, [link_row(one) for one in links])
    if document["name_servers"]:
        print()
        output.write_table(("name server", "registered", "since", "problem"), [
            (one["address"], "yes" if one["registered"] else "no", output.time_text(one["since_ms"]), one["problem"])
            for one in document["name_servers"]])
    if document["session_list"]:
        print()
        output.write_table(("session", "pid", "state", "ring"), [
            (one["slot"], str(one["pid"]), one["state"], output.size_text(one["ring_bytes"]))
            for one in document["session_list"]])


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
    return f"{address} {'linked' if replication['linked'] else 'not linked'}, {heard}".strip()
