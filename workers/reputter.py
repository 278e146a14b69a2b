"""Reputter: the only process that dispatches the log into consume queues and index, and moves `reput_from`.

Promise: readers find everything below `reput_from` by queue and by key, in the order of the log. On a full
disk it waits, reports the reason, and continues once there is room.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.reput_message import ReputMessageService

main = worker.main(native.REPUTTER, "Dispatches the log into consume queues and index.",
                   lambda attached: ReputMessageService(attached.context))

if __name__ == "__main__":
    raise SystemExit(main())
