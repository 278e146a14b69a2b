"""Kill or stop one process at each step of the list of failpoints, while producers put; then audit.

    python -m crash.failpoints [--mode async|pool|sync] [--scene puts|cleaning|...]
                                     [--point NAME]... [--share K/N] [--way restart|crash|hang]... [--nth 1] [--seed N]
                                     [--json]

steps.py has the steps and what a crash leaves at each. Each step is struck in three ways:

    restart   the process is killed there, and its successor continues
    crash     it is stopped there and everything is killed, then recovered: `pyengine recover`, then a new start
    hang      it is stopped there for a moment and resumed

Steps in C need a build with PYENGINE_BUILD_FAILPOINTS=1; another build leaves them out and counts them.
The scenes `replicated` and `promoted` have two engines, master and slave (failpoint_replicas.py).
A step that is not reached is a failure. Exit 0: held. 1: a message was lost, torn, doubled or out of order, or something hung.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from crash.failpoint_replicas import PromotedRun, ReplicatedRun
from crash.failpoint_rounds import SCENES, WAYS, FailpointRun, FailpointSummary, points_of, ways_of
from crash.report import crash_parser, ended_in_order, finish
from crash.steps import FAILPOINTS, PROMOTED, PUTS, REPLICATED, TABLES, is_built


def share(text: str) -> tuple[int, int]:
    """`2/4` as (2, 4)."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share: give K/N, as 1/4")
    return int(found[1]), int(found[2])


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, rounds=None)
    parser.add_argument("--scene", choices=SCENES, default=PUTS)
    parser.add_argument("--point", action="append", choices=sorted(FAILPOINTS), metavar="NAME",
                        help="only this step; may be repeated")
    parser.add_argument("--share", type=share, default=(1, 1), metavar="K/N",
                        help="only the K-th of N shares of the steps: each round checks all that was put into its store, so that a "
                             "long scene is over sooner in several")
    parser.add_argument("--way", action="append", choices=WAYS, help="only this way; may be repeated")
    parser.add_argument("--nth", type=int, default=1, help="which passing of the step strikes (1)")
    arguments = parser.parse_args()

    points = [point for point in points_of(arguments.scene, arguments.mode)
              if not arguments.point or point.name in arguments.point][arguments.share[0] - 1::arguments.share[1]]
    there = [point for point in points if is_built(point)]
    if not there:
        parser.error("none of these steps is in this scene, mode and build")
    if arguments.scene == TABLES and len(there) > 1:
        parser.error("a queue table grows once in a run: give one --point")
    ways, said = ways_of(arguments.scene, arguments.way)
    if not ways:
        parser.error(said)
    if said:
        print(f"{said}; the others are left out", file=sys.stderr)

    def make(store: Path, scratch: Path) -> FailpointRun:
        kind = {REPLICATED: ReplicatedRun, PROMOTED: PromotedRun}.get(arguments.scene, FailpointRun)
        run = kind(store, scratch, arguments.scene, arguments.mode, arguments.seed)
        run.summary.left_out = len(points) - len(there)
        number, shares = arguments.share
        run.summary.part = " ".join([*(arguments.point or ()), *([f"share {number}/{shares}"] if shares > 1 else [])])
        return run

    def words(summary: FailpointSummary) -> str:
        return f"{len(summary.struck)} steps of {len(points)} ({summary.left_out} not in this build)"

    return finish(arguments, make, lambda run: run.go_through(there, ways, arguments.nth), words)


if __name__ == "__main__":
    sys.exit(main())
