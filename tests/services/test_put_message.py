"""What the writer's service decides beside the native pass."""

from __future__ import annotations

import errno

from pyengine.native import control as native
from pyengine.native import flush
from pyengine.services.put_message import PutMessageService


def test_a_pool_that_cannot_be_locked_is_warned_of_once(make_parts, monkeypatch):
    parts = make_parts(mode=native.MODE_POOL, pool_buffers=3)
    parts.kill(native.WRITER)
    monkeypatch.setattr(flush, "lock_memory", lambda base, length: errno.ENOMEM)
    said = []
    service = PutMessageService(parts.owner.memory, parts.owner.root, parts.owner.config, warn=said.append)
    service.close()
    assert len(said) == 1 and "memlock" in said[0] and f"{3 * parts.owner.memory.identity.segment_bytes:,}" in said[0]
