"""Replicator: RocketMQ's HAService. On a master it serves slaves, on a slave it follows the master.

Promise: bytes go over the wire as they stand in the log, and only what is committed;
`confirm` moves only over what enough slaves have said they have. Bad bytes on the port cost
the one who sent them his connection. Its death: slaves connect again to the next one and
say where they stand; puts that wait for them wait until then, each by its own deadline.
"""

from __future__ import annotations

import sys

from pyengine.native import control as native
from pyengine.services import Service
from pyengine.services.ha_service import HAService
from workers import worker


def make_service(attached: worker.Worker) -> Service:
    service = HAService(attached.memory, attached.root, attached.config, lambda text: worker.say(native.REPLICATOR, text))
    service.start()
    return service


if __name__ == "__main__":
    sys.exit(worker.main(native.REPLICATOR, "Sends the log to slaves, or follows a master.", make_service))
