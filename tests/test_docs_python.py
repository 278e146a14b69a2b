"""docs/python.md is true: its programs run, with RocketMQ's own client."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pyengine
from crash.replicas import free_port
from test_docs import blocks_of, reader  # noqa: F401
from waiting import eventually


@pytest.mark.timeout(600)
def test_the_blocks_of_the_python_page_run(reader):  # noqa: F811
    port, store = free_port(), reader.folder / "my-store"
    reader.environment |= {"PYENGINE_GATEWAY_NAMESRV_PORT": "0", "PYENGINE_GATEWAY_BROKER_PORT": "0",  # not another test's
                           "PYENGINE_GRPC_PORT": str(port), "HOME": str(reader.folder.parent)}
    start, own, put, consume, by_asyncio, transaction = [
        replace(block, text=block.text.replace("8081", str(port))) for block in blocks_of("docs/python.md")]
    reader.run(start)
    assert reader.run(own) == "PUT_OK\n"
    assert len(reader.run(put).strip()) == 34
    assert reader.run(consume) == "[b'one apple', b'two pears']\n"
    assert len(reader.run(by_asyncio).strip()) == 34
    reader.run(transaction)

    def bodies():
        with pyengine.open_store(store) as opened:
            return {message.body for queue_id in opened.topics()["orders"]
                    for message in opened.get_message("orders", queue_id, 0).messages}

    eventually(lambda: bodies() == {b"one apple", b"two pears", b"three plums", b"four figs"}, "all are stored")
