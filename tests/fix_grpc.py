"""One store that serves gRPC for all tests of a module: each uses topics and groups of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def grpc_store(tmp_path_factory):
    """A GrpcStore."""
    from grpc_caller import start_grpc

    store = start_grpc(tmp_path_factory.mktemp("grpc") / "store")
    yield store
    store.close()
