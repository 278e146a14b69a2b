"""Kill one kind of process at random moments, in many rounds, while producers put; then audit.

    python -m crash.kills KIND [--rounds 20] [--seed N] [--mode async|pool|sync] [--aim 0.5] [--json] [--peer]

KIND is a worker kind, `supervisor`, `producer`, or `everything` (all at once, then `pyengine recover`).
After each kill acknowledgements must move again within a time limit: a hang is a failure. A share of the
kills (--aim) is aimed: the process is stopped repeatedly until it is in the middle of an operation.

With the gateway or the gRPC worker as victim producers speak RocketMQ's protocol to it.
With the scheduler as victim some messages are delayed: each must be delivered, at most twice, but one that
was cancelled never. At the end RocketMQ opens the store, if it is there (--peer, --no-peer).

Exit 0: held. 1: an acknowledged message was lost, one was torn, doubled or reordered, or something hung.
The store of a failed run is kept and named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from crash.replicas import ReplicatorRun
from crash.report import Summary, crash_parser, ended_in_order, finish
from crash.rounds import AIM_SHARE, VICTIMS, CrashRun
from crash.served import GatewayRun, GrpcRun


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, mode=None)
    parser.add_argument("kind", choices=VICTIMS, metavar="KIND", help=", ".join(VICTIMS))
    parser.add_argument("--aim", type=float, default=AIM_SHARE, help="the share of aimed kills, 0 to 1")
    arguments = parser.parse_args()
    modes = VICTIMS[arguments.kind]
    mode = arguments.mode or modes[0]
    if mode not in modes:
        parser.error(f"a {arguments.kind} runs in mode {' or '.join(modes)} only")

    def make(store: Path, scratch: Path) -> CrashRun:
        made = {"replicator": ReplicatorRun, "gateway": GatewayRun, "grpc": GrpcRun}.get(arguments.kind, CrashRun)
        return made(store, scratch, arguments.kind, mode, arguments.seed, arguments.aim)

    def words(summary: Summary) -> str:
        return (f"{summary.kills_in_the_middle} of them in the middle of a pass, "
                f"{summary.undrained_bytes} bytes undrained at the kill"
                + (f", {summary.redelivered} delayed messages delivered again" if summary.redelivered else "")
                + (f", {summary.cancelled} cancelled" if summary.cancelled else ""))

    return finish(arguments, make, lambda run: run.run(arguments.rounds), words)


if __name__ == "__main__":
    sys.exit(main())
