"""Replicator: RocketMQ's HAService. The engine's role decides: a master serves slaves, a slave follows its master.

Promise: it sends only committed bytes, as they are in the log; `confirm` moves only over what enough slaves have
reported. A slave appends whole records, through its writer. A peer that sends wrong bytes loses its connection. If the
replicator dies, puts that wait for slaves wait on, each until its deadline.
"""

from __future__ import annotations

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
    waiting.schedule(waiting.INTERACTIVE)  # puts wait for it; the master's puts for a slave's replicator too
    try:
        replication = Replication(attached.memory.folder, writable=True)
    except OtherLayoutError:  # the engine was started by another build: `status` does not show the links then
        replication = Replication(None)
    if identity.role == native.SLAVE:
        return HAClient(attached.context, lambda ring_bytes: open_session(attached.root, ring_bytes, SESSION_WAIT_S), replication)
    service = HAService(attached.context, replication, must_listen=attached.incarnation == 1)
    service.start()
    return service


main = worker.main(native.REPLICATOR, "Sends the log to slaves, or follows a master.", make_service)

if __name__ == "__main__":
    raise SystemExit(main())
