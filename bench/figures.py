"""Write the tables of README.md and docs/performance.md from what is kept in bench/figures.json.

usage: python bench/figures.py [--check] [FILE ...]

FILE is what `--json FILE` of bench_rivals.py, run.py or jitter.py kept: its rounds replace those in bench/figures.json first. --check
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


# Rows of run.py that the page shows: what each one asks there, what the page calls it, how its figure is written.
SINGLE: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    *((f"put to visible in its queue, idle, {mode}", f"a put answered until a consumer sees it, idle store, {mode}", "{:.3g}".format)
      for mode in ("async", "sync", "pool")),
    *((f"Consumer.pull(32), {size} B", f"one `Consumer` pulls, 32 at a time, {size:,} B", rate) for size in (128, 1024)),
    *((f"Arrow, {columns} columns, 1024 B", f"log into Arrow, 1 KiB, {columns} columns", "{:.3g}".format) for columns in ("all", "5")),
    *((f"recovery after kill -9 of all, shared memory {memory}", f"recovery after kill -9 of everything, shared memory {memory}",
       "{:.3g}".format) for memory in ("kept", "deleted")),
    ("kill -9 of the writer until the next ack", "kill -9 of the writer until the next acknowledgement", "{:.3g}".format),
    ("engine ready", "engine ready", "{:.2f}".format),
    ("private memory of all processes of an engine", "private memory of all processes", "{:.0f}".format),
    ("idle cost of all workers together", "CPU of an idle engine", "{:.2f}".format),
    ("10,000 new topics, put to readable", "10,000 new topics until all can be read", rate),
)
UNITS = {"msg/s": "messages/s", "% of a core": "% of a CPU"}


def single(document: dict[str, Any]) -> str:
    kept = {row["question"]: row for row in document["run"]}
    text = line(["question", "figure", "measured by"]) + "|---|---|---|\n"
    for asked, called, form in SINGLE:
        if asked in kept:
            rounds, unit = kept[asked]["rounds"], kept[asked]["unit"]
            figure = with_spread(rounds, form) if len(rounds) > 1 else form(rounds[0])
            text += line([called, f"{figure} {UNITS.get(unit, unit)}", "`bench/run.py`"])
    run = document["jitter"]
    beside = f"{run['rolls']} rolls, {run['deletions']} deletions, {run['checkpoints']} checkpoints{' and Spark' if run['spark'] else ''}"
    spread = ", ".join(f"{run[f'p{part}_us']:g}" for part in ("50", "99", "99.9"))
    asked = f"single puts of {run['body_bytes']:,} B at {run['rate']:,} a second beside {beside}: p50, p99, p99.9"
    return text + line([asked, f"{spread} us", "`bench/jitter.py`"])


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


def measured(document: dict[str, Any], kept: Any) -> dict[str, Any]:
    """What the file of a benchmark replaces: of bench_rivals.py, the works that it has."""
    if isinstance(kept, list):
        return {"run": kept}
    if "outcomes" not in kept:
        return {"jitter": kept}
    outcomes = {outcome["work"]["name"]: outcome for outcome in document["outcomes"] + kept["outcomes"]}
    return kept | {"outcomes": list(outcomes.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check and arguments.files:
        parser.error("--check takes no file: it looks at bench/figures.json")
    document = json.loads(KEPT.read_text())
    for file in arguments.files:
        document |= measured(document, json.loads(file.read_text()))
    if arguments.files:
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
