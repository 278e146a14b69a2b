"""The tables of docs/spark.md, made from the code's own.

`python -m pyengine.spark.reference docs/spark.md` writes them between their marks; a test
compares, so the page cannot fall behind.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyengine.spark.options import OPTIONS
from pyengine.spark.schema import COLUMNS, PROPERTY_PREFIX


def column_table() -> str:
    lines = ["| column | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.type} | {'yes' if one.in_default else ''} | {one.meaning} |" for one in COLUMNS]
    return "\n".join([*lines, f"| `{PROPERTY_PREFIX}<NAME>` | STRING | | The property of that name, null without it. |"])


def option_table() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{one.name}` | {one.default} | {one.meaning} |" for one in OPTIONS])


def with_tables(page: str) -> str:
    """The page with both tables as they are now."""
    for name, table in (("columns", column_table()), ("options", option_table())):
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        page = before + begin + table + "\n" + end + after
    return page


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(with_tables(place.read_text(encoding="utf-8")), encoding="utf-8")
