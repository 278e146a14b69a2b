"""The common part of the crash commands: options, seed, a working folder, the judgement and the last line."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from crash.audit import read_acked, still_kept
from crash.peer import PeerUnavailableError, open_with_rocketmq
from pyengine.cli.torture import as_failure
from pyengine.engine.embedded import deferred
from pyengine.engine_config import MODES

INTERRUPTED = 130
SCRIPT = "PYENGINE_SCRIPT"  # names the script that the user has called


@dataclass
class Summary:
    """The outcome of a run, which has passed if there are no `failures`."""

    kind: str
    mode: str
    seed: int
    rounds: int = 0
    kills: int = 0
    kills_in_the_middle: int = 0
    undrained_bytes: int = 0
    acknowledged: int = 0
    checked: int = 0
    lost: int = 0
    redelivered: int = 0
    cancelled: int = 0
    peer: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


class Run(Protocol):
    """The part of a run that `finish` uses."""

    store: Path
    settings: dict[str, object]
    acked: list[Path]
    summary: Summary

    def leave(self, *, held: bool) -> None:
        """Remove what the run has outside its folder; called once, at the end."""


def crash_parser(words: str | None, rounds: int | None = 20, *, mode: str | None = "async",
                 has_peer: bool = True) -> argparse.ArgumentParser:
    """A parser with --rounds (unless None), --seed, --mode, --json and, if RocketMQ is asked (`has_peer`), --peer."""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=at_least_one, default=rounds, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="repeats the choices of a run")
    parser.add_argument("--json", action="store_true", help="the summary as one JSON document")
    parser.set_defaults(peer=False)
    if has_peer:
        parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=None,
                            help="let the real RocketMQ open the store at the end (default: if Java and Maven are there)")
    parser.add_argument("--mode", choices=list(MODES), default=mode)
    return parser


def tell(text: str) -> None:
    """Print one line about the run on stderr."""
    print(text, file=sys.stderr, flush=True)


def at_least_one(text: str) -> int:
    """Parse the number of rounds; ArgumentTypeError for less than one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return int(text)


def ended_in_order(main: Callable[..., int]) -> Callable[..., int]:
    """Let Ctrl-C and SIGTERM end `main` by an exception, so that it removes what it made; the exit code is INTERRUPTED."""
    @functools.wraps(main)
    def run(*arguments: object) -> int:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        sys.argv[0] = os.environ.pop(SCRIPT, sys.argv[0])
        try:
            return main(*arguments)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED

    return run


def finish(arguments: argparse.Namespace, make: Callable[[Path, Path], Any], go: Callable[[Any], Summary],
           more: Callable[[Any], str] = lambda summary: "") -> int:
    """Make the run in a new folder, run it with `go`, and print its summary; return the exit code.

    `more` returns words for the line of the summary. The folder is removed if the run held or could not be made; otherwise it is
    kept and named. Ctrl-C (and SIGTERM: ended_in_order) ends the run and all its processes.
    """
    scratch = Path(tempfile.mkdtemp(prefix="pyengine-crash-"))
    try:
        run: Run = make(scratch / "store", scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    summary = run.summary
    held = False
    try:
        tell(f"seed={arguments.seed} kind={summary.kind} mode={summary.mode}")
        tell(f"an engine and its producers work on {run.store}")
        go(run)
        if not summary.failures and arguments.peer is not False:
            _ask_peer(run, summary, required=bool(arguments.peer))
        held = not summary.failures
    except Exception as error:  # proof.py counts summaries: a failed run must have one too
        summary.failures.append(as_failure(error))
    except KeyboardInterrupt:
        print(f"interrupted; kept: {scratch}", file=sys.stderr)
        return INTERRUPTED
    finally:
        with deferred(signal.SIGINT, signal.SIGTERM):
            try:
                run.leave(held=held)
            except Exception as error:
                summary.failures.append(as_failure(error))
    if arguments.json:
        print(json.dumps(asdict(summary)))
    else:
        words = more(summary)
        print(f"{summary.kind} ({summary.mode}): {summary.rounds} rounds, {summary.kills} kills, {words + ', ' if words else ''}"
              f"{summary.acknowledged} acknowledged, {summary.checked} checked, lost {summary.lost}, "
              f"RocketMQ {summary.peer or 'not asked'}, {summary.seconds} s, seed {summary.seed}")
    for sentence in summary.failures:
        print(sentence, file=sys.stderr)
    if summary.failures:
        print(f"kept: {scratch}", file=sys.stderr)
        tell(f"It did not hold: {len(summary.failures)} failure{'' if len(summary.failures) == 1 else 's'}, the first: "
             f"{summary.failures[0].splitlines()[0]}")
        return 1
    shutil.rmtree(scratch)
    tell(f"It held: after {summary.kills:,} kills all {summary.acknowledged:,} acknowledged messages are there, once and in order.")
    return 0


def _ask_peer(run: Run, summary: Summary, *, required: bool) -> None:
    rows = still_kept(run.store, read_acked(run.acked))
    try:
        failures = open_with_rocketmq(run.store, run.settings, rows)
    except PeerUnavailableError as error:
        summary.peer = "not asked"
        print(f"not opened by RocketMQ: {error}", file=sys.stderr)
        if required:
            summary.failures.append(f"RocketMQ was asked for: {error}")
        return
    summary.failures += failures
    summary.peer = "complains" if failures else "opens it"
