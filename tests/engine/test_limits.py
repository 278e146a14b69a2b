"""An engine that may open too few files: refused at once, with the limit and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

import pytest

import pyengine
from fix_cli import spawn
from fix_engine import SMALL
from pyengine.engine import limits
from pyengine.engine.limits import DESCRIPTORS_MIN, raise_descriptors
from pyengine.errors import EngineError

FEW = 24


def with_limit(number: int):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))


def test_a_start_with_too_few_descriptors_is_refused_at_once(tmp_path):
    root = tmp_path / "store"
    done = spawn("start", root, preexec_fn=with_limit(FEW))
    assert done.code == 1 and f"may have {FEW} files open" in done.stderr and "ulimit -n" in done.stderr, done
    assert f"needs {DESCRIPTORS_MIN}" in done.stderr and "Traceback" not in done.stderr and not root.exists()


@pytest.mark.parametrize(("soft", "hard", "becomes"), [
    (FEW, 1 << 20, 1024), (FEW, 60, 60), (FEW, resource.RLIM_INFINITY, 1024), (DESCRIPTORS_MIN, DESCRIPTORS_MIN, None),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None), (FEW, FEW, "refused")])
def test_a_supervisor_raises_what_it_may(monkeypatch, soft, hard, becomes):
    raised = []
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(limits.resource, "setrlimit", lambda which, pair: raised.append(pair))
    if becomes == "refused":
        with pytest.raises(EngineError, match="LimitNOFILE="):
            raise_descriptors()
    else:
        raise_descriptors()
    assert raised == ([(becomes, hard)] if isinstance(becomes, int) else [])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_fewest_that_are_not_refused_are_enough_for_all_workers_and_a_dozen_producers(tmp_path):
    """In pool mode, with a replicator and forty queues."""
    root = tmp_path / "store"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {**SMALL, "transient_store_pool_enable": "true", "transient_store_pool_size": 2, "ha_listen_port": port}
    with_few = with_limit(DESCRIPTORS_MIN)
    done = spawn("start", root, *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
                 preexec_fn=with_few)
    assert done.code == 0, done
    try:
        with contextlib.ExitStack() as stack:
            producers = [stack.enter_context(pyengine.connect(root)) for _ in range(12)]
            for number in range(480):
                assert producers[number % 12].put(f"t{number % 40}", bytes(500), keys="k", timeout_s=20).ok
        with pyengine.open_store(root) as store:
            for queue in range(40):
                assert store.wait_for_message(f"t{queue}", 0, 11, 60), queue
    finally:
        done = spawn("stop", root, preexec_fn=with_few)
    assert done.code == 0, done
    assert spawn("check", root, preexec_fn=with_few).code == 0
    assert os.strerror(errno.EMFILE) not in (root / "engine.log").read_text()
