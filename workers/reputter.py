"""Reputter: the only process that writes consume queues and index and moves `reput_from`.

Promise: what is below `reput_from` can be found by queue, and by key, in the order of the
log. Its death: puts go on, consumers see nothing new until its successor, which goes on at
`reput_from`. A full disk: it waits, says so, and goes on once there is room.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.reput_message import ReputMessageService


def make_service(attached: worker.Worker) -> ReputMessageService:
    return ReputMessageService(attached.context)


def main() -> int:
    """Run the reputter with the arguments of this process; its exit code."""
    return worker.main(native.REPUTTER, "Dispatches the log into consume queues and index.", make_service)


if __name__ == "__main__":
    sys.exit(main())
