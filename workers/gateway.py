"""Gateway: a name server and a broker for RocketMQ 4.9 clients; it runs if gateway_enable is set.

Promise: a message that it acknowledges is stored as the flush mode and the role promise. It puts through a session and
reads as any program does, so it cannot damage log or queues; a client can disturb its own connection only. If it
dies, clients reconnect and repeat sends without an answer; offsets that they committed in the last 5 s may be lost, so
those messages are delivered again. The supervisor stops it first.
"""

from __future__ import annotations

import asyncio
from asyncio.sslproto import SSLProtocol

from pyengine.client.producer import connect_with
from pyengine.engine import worker
from pyengine.errors import os_error_sentence
from pyengine.gateway.gateway import Gateway
from pyengine.gateway.gateway import serve as serve_clients
from pyengine.gateway.pop_shares import SHARES_MAX
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.native import control as native

SESSION_WAIT_S = 2.0
TLS_READ_BYTES = 16 << 10  # as long as a record of TLS; asyncio's own is 256 KiB
OWN_DESCRIPTORS = 512  # for the store's files and memory, in addition to one for each connection and each topic of a group that pops


def serve(attached: worker.Worker) -> None:
    each = 1 if attached.config.gateway_tls_mode == "disabled" else 2  # TLS needs a second descriptor to look at the first byte
    SSLProtocol.max_size = TLS_READ_BYTES  # each connection has a buffer of it; this process is no other program's
    each += attached.config.grpc_enable  # the gRPC worker has a connection for each of its clients, which are as many at most
    attached.limit_connections(each, SHARES_MAX + OWN_DESCRIPTORS)
    with LiveStoreReader(attached.root, attached.config) as reader:
        gateway = Gateway(reader, attached.config,
                          lambda: connect_with(attached.root, attached.config, timeout_s=SESSION_WAIT_S), report=attached.report,
                          blocked=attached.set_blocked_reason, memory=attached.memory)
        try:
            asyncio.run(serve_clients(gateway.start, gateway.close, attached))
        except OSError as error:
            raise worker.BootFailedError(f"the gateway cannot listen: {os_error_sentence(error)}") from error


main = worker.run(native.GATEWAY, "Serves RocketMQ 4.9 clients.", serve)

if __name__ == "__main__":
    raise SystemExit(main())
