"""Writer: the only process that appends to the log, moves `wrote` and assigns queue offsets.

Promise: it executes an entry in a session's ring exactly once, whichever process is killed meanwhile; the
answer tells the record's offset. It does not wait for a producer, and for another worker only a bounded time. If it dies,
producers wait, each until its deadline, until the next writer has read the commit slot; no entry is lost, repeated or
reordered.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.errors import EngineError
from pyengine.native import control as native
from pyengine.services.put_message import PutMessageService


def serve(attached: worker.Worker) -> None:
    """Run passes until the supervisor stops this worker; then execute the entries that were published before."""
    try:
        service = PutMessageService(attached.context)
    except EngineError as error:
        raise worker.BootFailedError(str(error)) from error
    try:
        service.share_cpu()
        attached.ready()
        while not attached.stopping:
            attached.heartbeat(worked=service.work())
            attached.publish_blocked_reason(service)
        attached.control_line.state(native.WORKER_STOPPING)
        while not attached.memory.retired and not service.drained:
            attached.heartbeat(worked=service.work())
    finally:
        service.close()


main = worker.run(native.WRITER, "Appends what producers submit to the commit log.", serve)

if __name__ == "__main__":
    raise SystemExit(main())
