"""One store that serves gRPC for all tests of a module, each with topics and groups of its own; and a gRPC server in the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyengine.engine_config import EngineConfig
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Connections, Limits, Request
from pyengine.ipc.sessions import bound_socket
from pyengine.ipc.shared_objects import GATEWAY_SOCKET
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from waiting import scaled_timeout_s


@pytest.fixture(scope="module")
def grpc_store(tmp_path_factory):
    """A GrpcStore."""
    from grpc_caller import start_grpc

    store = start_grpc(tmp_path_factory.mktemp("grpc") / "store")
    yield store
    store.close()


class FakeGateway:
    """A gateway of the test at the Unix socket of a folder. `asked` are the codes of its requests; `handlers` answer them, or it does."""

    def __init__(self, folder: Path, **handlers: Callable[[Request], Any]) -> None:
        """The names of the handlers are those of the codes."""
        self.folder, self.asked = folder, []
        self.handlers = {getattr(codes, name): handler for name, handler in handlers.items()}
        self.connections = Connections(Limits(), lambda host, sentence: None)

    async def __aenter__(self) -> FakeGateway:
        served = dict.fromkeys([*self.handlers, codes.HEART_BEAT, codes.SEND_MESSAGE_V2, codes.UNREGISTER_CLIENT], self.serve)
        await self.connections.listen_local(bound_socket(self.folder, GATEWAY_SOCKET), {}, served)
        await self.connections.start()
        return self

    def serve(self, request: Request):
        self.asked.append(request.frame.code)
        return self.handlers.get(request.frame.code, lambda asked: Answer())(request)

    async def __aexit__(self, *_: object) -> None:
        await self.connections.close()


class GrpcRig:
    """A gRPC server in this process for a FakeGateway; calls by the names of the service's methods. `said` has its lines."""

    def __init__(self, root: Path, **settings: object) -> None:
        from pyengine.gateway.grpc_service import GrpcServer

        TopicConfigs(root).ensure(TopicConfig("T", 4, 4))
        self.said: list[str] = []
        self.server = GrpcServer(root, EngineConfig(**{"grpc_enable": True, "grpc_port": 0, **settings}), root,
                                 report=lambda event, text: self.said.append(text))

    def call(self, name: str, client_id: str = "test@1", **fields: object):
        """Begin a call."""
        from grpc_caller import V2

        method = V2.methods[name]
        kind = self.channel.unary_stream if method.server_streaming else self.channel.unary_unary
        request, answer = (getattr(V2, each.name) for each in (method.input_type, method.output_type))
        return kind(f"/{V2.service}/{name}", request.SerializeToString, answer.FromString)(
            request(**fields), timeout=scaled_timeout_s(30), metadata=(("x-mq-client-id", client_id), ("x-mq-language", "PYTHON")))

    async def __aenter__(self) -> GrpcRig:
        import grpc

        self.port = await self.server.start()
        self.said.clear()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", [("grpc.use_local_subchannel_pool", 1)])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.close()
