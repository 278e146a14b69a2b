"""One store with its gateway for all tests of this folder: each uses topics and groups of its own."""

from __future__ import annotations

import pytest

from fix_gateway import start_served


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    """A ServedStore."""
    store = start_served(tmp_path_factory.mktemp("served") / "store")
    yield store
    store.close()


@pytest.fixture
def topic(request, served):
    """A topic of the test's own, with four queues, made as a client makes it."""
    from fix_gateway import send_fields
    from pyengine.gateway import codes

    name = "T_" + "".join(sign if sign.isalnum() else "_" for sign in request.node.name)[:100]
    assert served.broker().ask(codes.SEND_MESSAGE_V2, send_fields(name), b"first").code == codes.SUCCESS
    return name
