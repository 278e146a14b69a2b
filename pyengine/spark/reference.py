"""The tables of docs/spark.md, made from the code's own.

`python -m pyengine.spark.reference docs/spark.md` writes them between their marks; a test
compares them with the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from pyengine.spark.message_stats import FIGURES
from pyengine.spark.options import OPTIONS
from pyengine.spark.queue_view import ENTRY_COLUMNS, OWN_OPTIONS, QUEUE_COLUMNS, SHARED_OPTIONS
from pyengine.spark.schema import COLUMNS, PROPERTY_PREFIX
from pyengine.spark.sink import SINK_COLUMNS, SINK_OPTIONS


def column_table() -> str:
    lines = ["| column | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.type} | {'yes' if one.in_default else ''} | {one.meaning} |" for one in COLUMNS]
    return "\n".join([*lines, f"| `{PROPERTY_PREFIX}<NAME>` | STRING | | The property of that name, null without it. |"])


def option_table() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{one.name}` | {one.default} | {one.meaning} |" for one in OPTIONS])


def queue_table(view: str, columns: Iterable[tuple[str, str, str]]) -> str:
    """The columns of one view of `pyengine-queue`."""
    lines = [f"| `view={view}` | type | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in columns])


def queue_section() -> str:
    """What the page says of `pyengine-queue`."""
    shared = ", ".join(f"`{name}`" for name in SHARED_OPTIONS)
    own = "\n".join(f"- `{name}`: {meaning}" for name, meaning in OWN_OPTIONS.items())
    tables = "\n\n".join((queue_table("queues", QUEUE_COLUMNS), queue_table("entries", ENTRY_COLUMNS)))
    return f"Options are {shared}, as above, the sizes, and\n\n{own}\n\n{tables}"


def stats_table() -> str:
    lines = ["| column | type | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{one.name}` | {one.type} | {one.meaning} |" for one in FIGURES])


def sink_section() -> str:
    """The columns and options of the sink."""
    lines = ["| column | type | what becomes of it |", "|---|---|---|"]
    lines += [f"| `{one.name}` | {' or '.join(one.types)} | {one.meaning} |" for one in SINK_COLUMNS]
    options = [f"- `{name}`: {meaning}" for name, meaning in SINK_OPTIONS.items()]
    return "\n".join([*lines, "", "Options:", "", *options])


def with_tables(page: str) -> str:
    """The page with the tables as they are now."""
    tables = {"columns": column_table(), "options": option_table(), "queues": queue_section(), "stats": stats_table(),
              "sink": sink_section()}
    for name, table in tables.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = before + begin + table + "\n" + end + after
    return page


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(with_tables(place.read_text(encoding="utf-8")), encoding="utf-8")
