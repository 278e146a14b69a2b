"""One look of `pyengine top` as it is drawn: facts, positions, workers, topics."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pyengine.cli import output
from pyengine.cli.status import LINK_COLUMNS, link_row, replication_facts
from pyengine.cli.top import Look

TOPICS_SHOWN = 10


def screen(look: Look) -> RenderableType:
    """The whole picture; topics come last, because there may be more than fit."""
    document = look.document
    parts: list[RenderableType] = [_facts(look), Text()]
    parts.append(_table(("position", "offset", "per second"), [
        (name, f"{value:,}", _size(look.rates_per_s.get(name))) for name, value in document["positions"].items()]))
    if document["workers"]:
        parts += [Text(), _table(("worker", "pid", "state", "restarts", "errors", "heartbeat ms ago"), [
            (one["kind"], str(one["pid"]), _state(one["state"]), f"{one['restarts']:,}", f"{one['errors']:,}",
             output.number_text(one["heartbeat_age_ms"])) for one in document["workers"]])]
    links = (document["replication"] or {}).get("links")
    if links:
        parts += [Text(), _table(LINK_COLUMNS, [[output.printable(str(cell)) for cell in link_row(one)] for one in links])]
    if look.figures is not None and look.figures.topics:
        parts += [Text(), _topics(look)]
    return Group(*parts)


def _facts(look: Look) -> RenderableType:
    document, rates = look.document, look.rates_per_s
    table = Table.grid(padding=(0, 2))
    state = Text(document["state"], style="green" if document["state"] == "running" and not document["read_only"] else "red")
    if document["reason"]:
        state.append(f": {output.printable(document['reason'])}")
    table.add_row("store", Text(output.printable(document["store"])))
    table.add_row("state", state)
    table.add_row("mode", f"{document['mode']}, {document['role']}, {document['sessions']} producers")
    if look.figures is not None:
        windows = "  ".join(f"{window_s} s {output.number_text(value)}" for window_s, value in look.figures.put_tps.items())
        table.add_row("puts/s", f"{output.number_text(rates.get('put_messages'))}   {_size(rates.get('put_bytes'))}/s   "
                                f"({windows})   refused/s {output.number_text(rates.get('refused_puts'))}")
        table.add_row("put time", _latency(look, "put"))
        table.add_row("sync time", f"{_latency(look, 'sync')}   {output.number_text(rates.get('syncs'))}/s")
        table.add_row("dispatched/s", f"{output.number_text(rates.get('dispatched'))}   lag {_latency(look, 'lag')}"
                                      f"   out of order {look.figures.dispatch_out_of_order:,}")
    for name, text in replication_facts(document["replication"]):
        table.add_row(name, Text(output.printable(str(text))))
    if "epoch" in document:
        table.add_row("waiting", f"to be durable {output.size_text(document['unflushed_bytes'])}, for queues "
                                 f"{output.size_text(document['behind_bytes'])}, in the pool "
                                 f"{output.size_text(document['undrained_bytes'])}")
    return table


def _latency(look: Look, what: str) -> str:
    found = look.latencies_ms.get(what)
    if not found or found["p50"] is None:
        return "-"
    return "  ".join(f"{name} {output.number_text(value)}" for name, value in found.items()) + " ms"


def _topics(look: Look) -> RenderableType:
    """The busiest now; where nothing comes, the largest so far."""
    counts = look.figures.topics if look.figures is not None else {}
    busy = list(look.topic_rates_per_s)
    rest = sorted((topic for topic in counts if topic not in look.topic_rates_per_s),
                  key=lambda topic: (-counts[topic].messages, topic))
    shown = [*busy, *rest][:TOPICS_SHOWN]
    rows = []
    for topic in shown:
        rate = look.topic_rates_per_s.get(topic, {})
        rows.append((output.printable(topic), output.number_text(rate.get("messages", 0)), f"{_size(rate.get('bytes', 0))}",
                     f"{counts[topic].messages:,}", output.size_text(counts[topic].size_bytes)))
    title = f"topic ({len(counts)})" if len(counts) > len(shown) else "topic"
    return _table((title, "messages/s", "bytes/s", "messages", "bytes"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at == 0 or name == "state" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _state(state: str) -> Text:
    return Text(state, style="" if state == "ready" else "red")


def _size(size_bytes: float | None) -> str:
    return "-" if size_bytes is None else output.size_text(size_bytes)
