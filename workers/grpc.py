"""gRPC: takes the clients of RocketMQ 5 (`apache.rocketmq.v2`) for the gateway; it runs if grpc_enable is set.

Promise: what it answers OK the gateway has answered so. It holds no message, offset or receipt: it translates each call for the
gateway, at a Unix socket. If it dies, clients connect again and repeat what has no answer; what they held stays theirs for its
invisible time. It is a process of its own, since an HTTP/2 stack in Python takes ten times the gateway's time for a message.
"""

from __future__ import annotations

import asyncio
import os

from pyengine.engine import worker
from pyengine.errors import os_error_sentence
from pyengine.gateway.gateway import serve as serve_clients
from pyengine.native import control as native

OWN_DESCRIPTORS = 256  # in addition to two for each client: its connection, and that to the gateway


def serve(attached: worker.Worker) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else its C code writes lines that clients can cause without limit
    try:
        from pyengine.gateway.grpc_service import GrpcServer  # here, since the fork server loads all workers and need not have it
    except ModuleNotFoundError as error:
        raise worker.BootFailedError(f"gRPC needs packages that are not installed ({error}): pip install 'pyengine-store[grpc]', "
                                     "or set grpc_enable=false") from error
    attached.limit_connections(2, OWN_DESCRIPTORS)
    server = GrpcServer(attached.root, attached.config, attached.memory.folder.path, report=attached.report)
    try:
        asyncio.run(serve_clients(server.start, server.close, attached))
    except OSError as error:
        raise worker.BootFailedError(f"gRPC cannot listen: {os_error_sentence(error)}") from error


main = worker.run(native.GRPC, "Serves clients of RocketMQ 5 by gRPC.", serve)

if __name__ == "__main__":
    raise SystemExit(main())
