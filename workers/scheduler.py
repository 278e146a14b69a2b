"""Scheduler: delivers delayed messages when they are due; the only process that writes `delayOffset.json`.

Promise: every delayed message reaches its topic at least once, in order within its level. It puts through a session like
any producer and writes no file of the log. If it dies, deliveries wait for the next scheduler, which continues at the
offsets in the file and may deliver later ones again. The supervisor stops it last: puts are refused by then,
and its deliveries are flushed.
"""

from __future__ import annotations

from pyengine.client.producer import connect_with
from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.schedule_message import ScheduleMessageService

SESSION_WAIT_S = 2.0


def make_service(attached: worker.Worker) -> ScheduleMessageService:
    return ScheduleMessageService(attached.context, lambda: connect_with(attached.root, attached.config, timeout_s=SESSION_WAIT_S))


main = worker.main(native.SCHEDULER, "Delivers delayed messages when they are due.", make_service)

if __name__ == "__main__":
    raise SystemExit(main())
