"""Write docs/proof.md: what was tried, how often and on which commit, with a row for each class.

    python -m crash.proof add RECORDS CLASS COMMAND < OUTPUT  adds the JSON summaries that a crash script printed
    python -m crash.proof page RECORDS PAGE                   updates PAGE

Only the page is kept. RECORDS is a temporary file of one run of scripts/prove_all.sh, which tries whole classes: `page`
replaces the row of each class that RECORDS has lines of, and its lines about what did not hold; it keeps the other rows and
counts their age again. Tests add their own lines (tests/fix_proof.py) to the file that PYENGINE_PROOF names.
A line is one Trial as a JSON document; it replaces the earlier one of the same class and `what`.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
HARM = ("lost", "bad", "not caught")
GIVEN = ("seed", "seconds", "depth")  # of a run, and no count of what it did
NO_SUMMARY = "ended without a summary: "
ENGINE = ("csrc", "pyengine", "workers", ":!pyengine/cli", ":!pyengine/spark")
PARTS = {"kills": "kills", "members": "members", "restarts": "restarts", "failpoints": "failpoints", "power cut": "powercut",
         "power cut, blocks": "powercut", "failing disk, engine": "disk", "failing disk, recovery": "disk",
         "failing disk, commits": "disk", "corruption": "corruption", "fuzz": "fuzz", "broken builds": "mutants",
         "mutants": "mutants"}  # class -> the part of scripts/prove_all.sh that tries it
HEAD = """# What was proved

Each row is a class of faults, which [faults.md](faults.md) describes. `scripts/crash/proof.py` makes the table from the last
run of each test in the class; nothing here is written by hand.

* *Held*: how many of the tests did no harm. No acknowledged message was lost, doubled or torn, and no damage went unnoticed.
* *Since*: the number of commits to the engine (without commands and Spark) after the oldest run of the row.

`scripts/prove_all.sh PART` runs the classes of a part again and replaces their rows.

"""
COLUMNS = ("class", "held", "counts", "hours", "commit", "since", "date", "part")
HEADER = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|---:|---|---:|---|---|"]
FAILED = "What did not hold, and has not been run since:"


def _git(checkout: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def commit_of(checkout: Path = CHECKOUT) -> str:
    """Return the commit, with a + if files differ from it; `unknown` outside a repository."""
    try:
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/proof.md")
        return _git(checkout, "rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def engine_commits_since(commit: str, checkout: Path = CHECKOUT) -> int | None:
    """Return the number of later commits that changed the engine; None if the repository does not have that commit."""
    try:
        return int(_git(checkout, "rev-list", "--count", f"{commit.rstrip('+')}..HEAD", "--", *ENGINE))
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of one test of a class.

    `rig`, `what`: the class, and what of it was tried: "power cut", "sync". `counts`: name -> number. `seed`, `command`: what
    repeats it. `commit`: of the sources, with a + if files differed from it.
    """

    rig: str
    what: str
    counts: dict[str, int]
    held: bool
    seed: str
    command: str
    seconds: float
    commit: str = field(default_factory=commit_of)
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d", time.gmtime()))

    def answers(self, earlier: Trial) -> bool:
        """Whether this run is of the command of `earlier`, which had ended without a summary."""
        return (self.rig == earlier.rig and earlier.what.startswith(NO_SUMMARY) and self.command.startswith(earlier.command))


def add(records: Path, trial: Trial) -> None:
    """Add one line, which does not hold if a count of HARM is not 0; several processes may add at the same time."""
    held = trial.held and not any(trial.counts.get(name) for name in HARM)
    with open(records, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(asdict(replace(trial, held=held, seconds=round(trial.seconds, 1)))) + "\n")


def read(records: Path) -> list[Trial]:
    """Return the last line of each trial; ValueError names the first wrong line."""
    last: dict[tuple[str, str], Trial] = {}
    for number, text in enumerate(records.read_text().splitlines(), start=1):
        try:
            trial = Trial(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{records}, line {number}: {error!r}") from None
        for key, earlier in tuple(last.items()):
            if key == (trial.rig, trial.what) or trial.answers(earlier):
                del last[key]
        last[trial.rig, trial.what] = trial
    return list(last.values())


def add_summaries(records: Path, rig: str, command: str, output: str) -> None:
    """Add the summaries in the output of a crash script; without one the run did not hold, since it ended before its judgement."""
    texts = [text for text in output.splitlines() if text.startswith("{")]
    for text in texts:
        one = json.loads(text)
        counts = {name: value for name, value in one.items() if isinstance(value, int) and name not in GIVEN}
        counts |= {name: sum(one[name].values()) for name in ("struck",) if name in one}
        counts |= {name: len(one[name]) for name in ("unreached",) if name in one}
        counts |= {"opened by RocketMQ": 1} if one.get("peer") == "opens it" else {}
        what = [one["kind"], one["mode"], *(one[name] for name in ("scene", "part") if one.get(name))]
        add(records, Trial(rig, ", ".join(what), counts | {"bad": len(one["failures"])}, held=not one["failures"],
                           seed=str(one["seed"]), command=f"{command} --seed {one['seed']}", seconds=one["seconds"]))
    if not texts:
        add(records, Trial(rig, NO_SUMMARY + command, {}, held=False, seed="", command=command, seconds=0))


@dataclass(frozen=True, slots=True)
class Row:
    """One class as the page shows it; `failed` are its lines about what did not hold."""

    held: str
    counts: str
    hours: str
    commit: str
    date: str
    failed: tuple[str, ...] = ()


def page(trials: Sequence[Trial], before: str = "", since: Callable[[str], int | None] = engine_commits_since) -> str:
    """Return the page `before` with new rows for the classes of `trials`; `since` counts the engine commits after one."""
    rows = read_page(before)
    classes: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        classes[trial.rig].append(trial)
    rows |= {rig: _row(rig, runs, since) for rig, runs in classes.items()}
    parts = list(HEADER)
    for rig, row in sorted(rows.items()):
        age = since(row.commit)
        parts.append(f"| {rig} | {row.held} | {row.counts} | {row.hours} | {row.commit} | {'?' if age is None else age} | {row.date} | "
                     f"{PARTS.get(rig, '')} |")
    failed = [line for _, row in sorted(rows.items()) for line in row.failed]
    if failed:
        parts += ["", FAILED, "", *failed]
    return HEAD + "\n".join(parts) + "\n"


def read_page(text: str) -> dict[str, Row]:
    """Return the rows of a page by class; ValueError for a page of another form."""
    lines = text.splitlines()
    if not lines:
        return {}
    if HEADER[0] not in lines:
        raise ValueError(f"the page has no table with the columns {', '.join(COLUMNS)}")
    rows = {}
    for line in lines[lines.index(HEADER[0]) + len(HEADER):]:
        if not line.startswith("| "):
            break
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        if len(cells) != len(COLUMNS):
            raise ValueError(f"the page has a row of {len(cells)} cells: {line}")
        rig, held, counts, hours, commit, _, date, _ = cells
        rows[rig] = Row(held, counts, hours, commit, date, tuple(one for one in lines if one.startswith(f"- {rig}: ")))
    return rows


def _row(rig: str, runs: Sequence[Trial], since: Callable[[str], int | None]) -> Row:
    ages = {run.commit: since(run.commit) for run in runs}
    oldest = max(ages, key=lambda commit: (ages[commit] is None, ages[commit] or 0))
    held = sum(run.held for run in runs)
    failed = [f"- {rig}: {run.what}: {_counts(run.counts) or 'nothing counted'}, on {run.commit}; again: `{run.command}`"
              for run in runs if not run.held]
    return Row(f"{'yes' if held == len(runs) else '**no**'}, {held} of {len(runs)}", _counts(_sum(runs)),
               f"{sum(run.seconds for run in runs) / 3600:.1f}", oldest, min(run.date for run in runs), tuple(failed))


def _sum(runs: Sequence[Trial]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for run in runs:
        for name, count in run.counts.items():
            total[name] += count
    return total


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count or name in HARM)


def _make_page(records: Path, target: Path) -> None:
    trials = sorted(read(records), key=lambda trial: (trial.rig, trial.what)) if records.exists() else []
    text = page(trials, target.read_text(encoding="utf-8") if target.exists() else "")
    temporary = target.with_name(f"{target.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, target)


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["add", records, rig, command]:
            add_summaries(Path(records), rig, command, sys.stdin.read())
        case ["page", records, target]:
            _make_page(Path(records), Path(target))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
