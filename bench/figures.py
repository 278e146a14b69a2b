"""Write the small table of README.md from a full run of bench_rivals.py, which is kept in bench/figures.json.

usage: python bench/figures.py [--check] [FILE]

FILE is what `bench_rivals.py --json FILE` kept: it replaces bench/figures.json first. --check changes nothing and fails
where README.md does not say what bench/figures.json holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from measure import page_with  # noqa: E402

KEPT = HERE / "figures.json"
PAGE = HERE.parent / "README.md"
NAME, MAKER = "figures", "bench/figures.py"
NAMES = {"pyengine": "pyengine", "rocketmq": "RocketMQ 4.9.8", "chronicle": "Chronicle Queue", "aeron": "Aeron Archive",
         "sqlite": "SQLite WAL", "lmdb": "LMDB"}


def rate(per_second: float) -> str:
    """Three digits: 1.23 M, 456 k, 789."""
    for divisor, unit in ((1e6, " M"), (1e3, " k")):
        if per_second >= divisor:
            return f"{per_second / divisor:.3g}{unit}"
    return f"{per_second:.3g}"


def table(document: dict[str, Any]) -> str:
    """The lines between the markers: messages a second by work and log, medians of the rounds."""
    machine, outcomes = document["machine"], document["outcomes"]
    logs = [log for log in NAMES if any(log in outcome["turns"] for outcome in outcomes)]
    lines = [f"Messages a second, medians of {len(outcomes[0]['turns']['pyengine'])} rounds in turns, {machine['cpus']} CPUs, "
             f"{machine['file_system']}, {machine['date']}, load {machine['load']:.1f} before the run:", "",
             "| work | " + " | ".join(NAMES[log] for log in logs) + " |", "|---" * (len(logs) + 1) + "|"]
    for outcome in outcomes:
        cells = [rate(statistics.median(turn["rate"] for turn in outcome["turns"][log])) if log in outcome["turns"] else "-"
                 for log in logs]
        lines.append(f"| {outcome['work']['name']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("file", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.check and arguments.file:
        parser.error("--check takes no file: it looks at bench/figures.json")
    if arguments.file:
        KEPT.write_text(json.dumps(json.loads(arguments.file.read_text()), indent=1) + "\n")
    page = PAGE.read_text()
    try:
        wanted = page_with(page, NAME, MAKER, table(json.loads(KEPT.read_text())))
    except ValueError as error:
        raise SystemExit(f"{PAGE.name} {error}") from None
    if arguments.check and page != wanted:
        sys.exit("README.md is not what bench/figures.json holds: run bench/figures.py")
    if page != wanted:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
