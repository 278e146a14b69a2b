"""Write the tables of README.md and docs/performance.md from what is kept in bench/figures.json.

usage: python bench/figures.py [--check] [FILE]

FILE is what `bench_rivals.py --json FILE` kept: its machine and its rounds replace those in bench/figures.json first. --check
changes nothing and fails where a page does not say what bench/figures.json holds. A comparison is computed in one way
everywhere: the rate of pyengine divided by the rival's in each round, then the median of these, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measure import page_with  # noqa: E402

KEPT = HERE / "figures.json"
README, PAGE = HERE.parent / "README.md", HERE.parent / "docs" / "performance.md"
MAKER = "bench/figures.py"
RIVALS = {"rocketmq": "RocketMQ", "chronicle": "Chronicle", "aeron": "Aeron", "sqlite": "SQLite", "lmdb": "LMDB"}
SHORT = ("put, 128 B", "put, 1 KiB", "put_many(256), 1 KiB", "put, sync, 1 KiB")  # the rows of the README
WITH = ("rocketmq", "chronicle", "aeron", "sqlite")  # and its columns


def rate(per_second: float) -> str:
    """Three digits: 1.23M, 456k, 789."""
    for divisor, unit in ((1e6, "M"), (1e3, "k")):
        if per_second >= divisor:
            return f"{per_second / divisor:.3g}{unit}"
    return f"{per_second:.3g}"


def with_spread(values: list[float], form: Callable[[float], str]) -> str:
    return f"{form(statistics.median(values))} ({form(min(values))}-{form(max(values))})"


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def comparison(document: dict[str, Any], works: tuple[str, ...] = (), rivals: tuple[str, ...] = tuple(RIVALS)) -> str:
    """Messages a second by work, and pyengine's rate divided by each rival's, round by round."""
    outcomes = [outcome for outcome in document["outcomes"] if not works or outcome["work"]["name"] in works]
    logs = [log for log in rivals if any(log in outcome["turns"] for outcome in outcomes)]
    text = line(["work", "messages a second", *(RIVALS[log] for log in logs)]) + "|---" * (len(logs) + 2) + "|\n"
    for outcome in outcomes:
        ours = [turn["rate"] for turn in outcome["turns"]["pyengine"]]
        cells = [outcome["work"]["name"], with_spread(ours, rate)]
        for log in logs:
            theirs = [turn["rate"] for turn in outcome["turns"].get(log, [])]
            ratios = [ours_rate / their_rate for ours_rate, their_rate in zip(ours, theirs, strict=bool(theirs))]
            cells.append(with_spread(ratios, "{:.2f}".format) if ratios else "-")
        text += line(cells)
    return text


def single(document: dict[str, Any]) -> str:
    rows = [line([row["question"], row["figure"], f"`bench/{row['by']}`"]) for row in document["single"]]
    return line(["question", "figure", "measured by"]) + "|---|---|---|\n" + "".join(rows)


def spark(document: dict[str, Any]) -> str:
    works = [work for work in document["spark"][0] if work != "body_bytes"]
    text = line(["bodies", *works]) + "|---" * (len(works) + 1) + "|\n"
    return text + "".join(line([f"{row['body_bytes']:,} B", *(f"{row[work]:.2f}" for work in works)]) for row in document["spark"])


def gateway(document: dict[str, Any]) -> str:
    text = line(["work", "messages a second", "rate, of RocketMQ's", "CPU a message, of RocketMQ's"]) + "|---|---|---|---|\n"
    return text + "".join(line([row["work"], f"{row['rate']:,}", f"{row['rate_ratio']:.2f}", f"{row['cpu_ratio']:.2f}"])
                          for row in document["gateway"])


def tables(document: dict[str, Any]) -> dict[Path, dict[str, str]]:
    """The lines of each marked place of each page."""
    return {README: {"figures": comparison(document, SHORT, WITH)},
            PAGE: {"comparison": comparison(document), "single": single(document), "spark": spark(document), "gateway": gateway(document)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.check and arguments.file:
        parser.error("--check takes no file: it looks at bench/figures.json")
    document = json.loads(KEPT.read_text())
    if arguments.file:
        document |= json.loads(arguments.file.read_text())
        KEPT.write_text(json.dumps(document, indent=1) + "\n")
    for path, places in tables(document).items():
        page = wanted = path.read_text()
        for name, lines in places.items():
            try:
                wanted = page_with(wanted, name, MAKER, lines)
            except ValueError as error:
                raise SystemExit(f"{path.name} {error}") from None
        if arguments.check and page != wanted:
            sys.exit(f"{path.name} is not what bench/figures.json holds: run bench/figures.py")
        if page != wanted:
            path.write_text(wanted)


if __name__ == "__main__":
    main()
