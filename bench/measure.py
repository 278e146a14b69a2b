"""The common part of the benchmarks: rounds, quantiles, a row, the table."""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a figure, its spread, and what it is held against.

    `ratio` is median / limit of the same run; `floor` and `aim` come from the design and
    are ratios where there is a limit, figures of `unit` otherwise.
    """

    question: str
    unit: str
    rounds: list[float]
    limit: float | None = None
    limit_is: str = ""
    floor: float | None = None
    aim: float | None = None
    higher_is_better: bool = True
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def ratio(self) -> float | None:
        return None if self.limit is None else self.median / self.limit

    @property
    def verdict(self) -> str:
        held = self.ratio if self.ratio is not None else self.median
        for name, bound in (("aim", self.aim), ("floor", self.floor)):
            if bound is not None and (held >= bound if self.higher_is_better else held <= bound):
                return f"{name} reached"
        return "below floor" if self.floor is not None else ""


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def earlier_medians(path: Path) -> dict[str, float]:
    """Read the results of a run with --json: for each question the ratio to its limit, or the median if it has none."""
    return {row["question"]: row["median"] if row["ratio"] is None else row["ratio"] for row in json.loads(path.read_text())}


def show(rows: list[Row], earlier: dict[str, float] | None = None) -> None:
    """The table on stdout, with what an earlier run found in a last column."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{os.cpu_count()} CPUs, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")
    for name in ("question", "median", "lowest .. highest", "limit", "ratio", "floor", "aim", ""):
        table.add_column(name)
    if earlier is not None:
        table.add_column("earlier ratio or median")
    for row in rows:
        notes = "".join(f"\n  {name} {figure(value)}" for name, value in row.notes.items())
        table.add_row(
            row.question + notes, f"{figure(row.median)} {row.unit}",
            f"{figure(min(row.rounds))} .. {figure(max(row.rounds))}",
            f"{figure(row.limit)} ({row.limit_is})" if row.limit is not None else "",
            f"{row.ratio:.2f}" if row.ratio is not None else "",
            figure(row.floor), figure(row.aim), row.verdict,
            *([] if earlier is None else [figure(earlier.get(row.question))]))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def figure(value: float | None) -> str:
    """For people: three digits, or whole with separators."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def page_with(page: str, name: str, maker: str, lines: str) -> str:
    """The page with these lines between the two markers of what `maker` makes there; ValueError where it has none."""
    begin, end = markers(name, maker)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"has no line {begin.strip()} or {end.strip()}")
    return before + begin + lines + end + after


def write_into(page: Path, name: str, maker: str, lines: str) -> None:
    """page_with() of a file; the program ends with a sentence where it has no markers."""
    try:
        page.write_text(page_with(page.read_text(), name, maker, lines))
    except ValueError as error:
        raise SystemExit(f"{page.name} {error}") from None


def markers(name: str, maker: str) -> tuple[str, str]:
    """The lines before and after what a program writes into a page."""
    return f"<!-- {name}: made by {maker} -->\n", f"<!-- end of {name} -->\n"


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """CPU of each process so far, to the nanosecond."""
    return {kind: int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9 for kind, pid in pids.items()}


def add_result_options(parser: ArgumentParser, kept: str, page: Path) -> None:
    """What give_results() looks at, and where the stores go."""
    parser.add_argument("--folder", type=Path, help="where the stores go (default: a temporary folder here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"keep {kept}")
    parser.add_argument("--page", action="store_true", help=f"write the table into docs/{page.name}")


def give_results(arguments: Namespace, document: dict, lines: str, page: Path, name: str, maker: str) -> None:
    """The table on stdout, and where it was asked for the document in a file and the table on the page."""
    print(lines, end="")
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.page:
        write_into(page, name, maker, lines)


def conditions() -> str:
    """For a caption: when and on what it was measured."""
    python = sys.version.split()[0]
    return f"{os.cpu_count()} CPUs, Python {python}, load {os.getloadavg()[0]:.1f} before the run, {date.today().isoformat()}"


def keep(rows: list[Row], path: Path) -> None:
    """All rows as JSON."""
    document = [asdict(row) | {"median": row.median, "ratio": row.ratio, "verdict": row.verdict} for row in rows]
    path.write_text(json.dumps(document, indent=1) + "\n")
