"""docs/proof.md: what was tried, how often, with which seed and on which commit. Written by this, never by hand.

    python -m crash.proof add RECORDS RIG COMMAND < OUTPUT    takes the JSON summaries that a crash script printed
    python -m crash.proof page RECORDS PAGE                   makes the page

Tests add their own lines (tests/fix_proof.py) where PYENGINE_PROOF names RECORDS; scripts/prove_all.sh runs all of it.
A line is one JSON document:

    rig, what     which rig, and what it tried: "power cut", "sync"
    counts        name -> number; those called in HARM must be 0 for the line to hold
    held          whether everything held
    seed, command what repeats it
    commit        the sources it ran on, with a + behind it if they had been changed
    date, seconds
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
FIELDS = {"rig": str, "what": str, "counts": dict, "held": bool, "seed": str, "command": str, "commit": str, "date": str,
          "seconds": (int, float)}
HARM = ("lost", "bad", "not caught")
GIVEN = ("depth", "left_out")  # of a run, and no count of what it did: it is not summed
HEAD = """# What was proved

Made from `proof.jsonl` by `scripts/crash/proof.py`: each row is a run, with the counts that it printed. None is written
by hand; a run in which something did not hold, or that ended before it could judge, stands here as such, beside the
later one that shows it mended. *Left out* is what a time limit kept from being tried. [faults.md](faults.md) tells what
the rigs do; `scripts/prove_all.sh` runs them and makes this page anew.
"""


def commit_of(checkout: Path = CHECKOUT) -> str:
    """The commit, with a + where files differ from it; `unknown` outside a repository."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/proof.md", ":!docs/proof.jsonl")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def note(records: Path, rig: str, what: str, counts: Mapping[str, int], *, held: bool, seed: str, command: str,
         seconds: float) -> None:
    """Adds one line, whole, whoever else adds."""
    held = held and not any(counts.get(name) for name in HARM)
    line = {"rig": rig, "what": what, "counts": dict(counts), "held": held, "seed": seed, "command": command,
            "commit": commit_of(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "seconds": round(seconds, 1)}
    with open(records, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


def read(records: Path) -> list[dict]:
    """All lines; ValueError names the first that is none."""
    lines = []
    for number, text in enumerate(records.read_text().splitlines(), start=1):
        try:
            line = json.loads(text)
            if any(not isinstance(line[name], kind) for name, kind in FIELDS.items()):
                raise TypeError("a field is of the wrong kind")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{records}, line {number}: {error!r}") from None
        lines.append(line)
    return lines


def add_summaries(records: Path, rig: str, command: str, output: str) -> None:
    """The summaries of crash.rounds: one JSON document in a line. Without any the run ended before it could judge: not held."""
    texts = [text for text in output.splitlines() if text.startswith("{")]
    for text in texts:
        one = json.loads(text)
        counts = {name: value for name, value in one.items() if isinstance(value, int) and name not in ("seed", "seconds", *GIVEN)}
        counts |= {name: sum(one[name].values()) for name in ("struck",) if name in one}
        counts |= {name: len(one[name]) for name in ("unreached",) if name in one}
        what = [one["kind"], one["mode"], *([one["scene"]] if "scene" in one else []),
                *(f"{name.replace('_', ' ')} {one[name]}" for name in GIVEN if one.get(name)),
                *([f"RocketMQ {one['peer']}"] if one.get("peer") else [])]
        note(records, rig, ", ".join(what), counts | {"bad": len(one["failures"])}, held=not one["failures"],
             seed=str(one["seed"]), command=f"{command} --seed {one['seed']}", seconds=one["seconds"])
    if not texts:
        note(records, rig, "ended without a summary", {}, held=False, seed="", command=command, seconds=0)


def page(lines: Sequence[dict]) -> str:
    """The whole page."""
    rigs: dict[str, list[dict]] = defaultdict(list)
    for line in lines:
        rigs[line["rig"]].append(line)
    parts = [HEAD, "| rig | runs | held | counts | hours |", "|---|---:|---:|---|---:|"]
    for rig, runs in sorted(rigs.items()):
        hours = sum(run["seconds"] for run in runs) / 3600
        parts.append(f"| [{rig}](#{_anchor(rig)}) | {len(runs)} | {sum(run['held'] for run in runs)} | {_counts(_sum(runs))} | "
                     f"{hours:.1f} |")
    for rig, runs in sorted(rigs.items()):
        parts += ["", f"## {_title(rig)}", "", "| what | counts | held | commit | date | again |", "|---|---|---|---|---|---|"]
        for run in sorted(runs, key=lambda run: (run["what"], run["date"], run["commit"])):
            parts.append(f"| {run['what']} | {_counts(run['counts'])} | {'yes' if run['held'] else '**no**'} | {run['commit']} | "
                         f"{run['date']} | `{run['command'].replace('|', chr(92) + '|')}` |")
    return "\n".join(parts) + "\n"


def _title(rig: str) -> str:
    return rig[:1].upper() + rig[1:]


def _anchor(rig: str) -> str:
    return "".join("-" if letter == " " else letter for letter in rig.lower() if letter.isalnum() or letter in " -_")


def _sum(runs: Sequence[dict]) -> dict[str, int]:
    total: dict[str, int] = defaultdict(int)
    for run in runs:
        for name, count in run["counts"].items():
            if name not in GIVEN:
                total[name] += count
    return total


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count or name in HARM)


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["add", records, rig, command]:
            add_summaries(Path(records), rig, command, sys.stdin.read())
        case ["page", records, target]:
            text = page(read(Path(records)))
            temporary = Path(f"{target}.new")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
