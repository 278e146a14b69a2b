"""Replicator: RocketMQ's HAService. On a master it serves slaves, on a slave it follows the master.

Promise: bytes go over the wire as they are in the log, and only what is committed;
`confirm` moves only over what enough slaves have said they have. A slave's log grows by
whole records, through its writer. Bad bytes on the port cost the one who sent them his
connection. Its death: slaves connect again to the next one and report their position; puts
that wait for them wait until then, each by its own deadline. Which of both it is the engine's
role says.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.errors import EngineUnavailableError, OtherLayoutError
from pyengine.ipc.replication import Replication
from pyengine.ipc.session_client import open_session
from pyengine.native import control as native
from pyengine.native import waiting
from pyengine.services.replication.ha_client import HAClient
from pyengine.services.replication.ha_service import HAService
from pyengine.services.service import Service

SESSION_WAIT_S = 2.0


def make_service(attached: worker.Worker) -> Service:
    identity = attached.memory.identity
    if not identity.replicates:
        raise EngineUnavailableError("the engine was started without replication: no replicator belongs to it")
    waiting.schedule_interactive()  # puts wait for it, the master's for a slave's too
    try:
        replication = Replication(attached.memory.folder, writable=True)
    except OtherLayoutError:  # of the build that this one took over from: the links are not shown then
        replication = Replication.private()
    if identity.role == native.SLAVE:
        return HAClient(attached.context, lambda ring_bytes: open_session(attached.root, ring_bytes, SESSION_WAIT_S), replication)
    service = HAService(attached.context, replication, must_listen=attached.incarnation == 1)
    service.start()
    return service


def main() -> int:
    """Run the replicator with the arguments of this process; its exit code."""
    return worker.main(native.REPLICATOR, "Sends the log to slaves, or follows a master.", make_service)


if __name__ == "__main__":
    sys.exit(main())
