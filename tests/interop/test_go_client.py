"""Apache RocketMQ's client for Go, unchanged, on a gateway: the program of examples/clients/go."""

from __future__ import annotations

import os
import subprocess

import pytest

from fix_cli import SOURCES
from fix_gateway import start_served
from interop.judge import cache_folder
from pyengine import open_store
from waiting import patience

PROGRAM = SOURCES / "examples" / "clients" / "go"

# The first build compiles the client and all that it needs, which takes longer than all other clients' tests together.
pytestmark = [pytest.mark.go, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The example, built."""
    built = tmp_path_factory.mktemp("go") / "example"
    environ = os.environ | {"GOCACHE": str(cache_folder() / "go-build"), "GOFLAGS": "-buildvcs=false"}
    done = subprocess.run(["go", "build", "-o", built, "."], cwd=PROGRAM, env=environ, capture_output=True, text=True,
                          timeout=patience(600))
    assert done.returncode == 0, done.stderr
    return built


def test_the_go_client_puts_and_consumes(program, tmp_path):
    served = start_served(tmp_path / "store")
    try:
        shown = subprocess.run(
            [program, "-namesrv", f"127.0.0.1:{served.ports[0]}", "-count", "20", "-limit", f"{patience(120):.0f}s"],
            capture_output=True, text=True, timeout=patience(240))
        assert shown.returncode == 0, shown.stdout + shown.stderr
        lines = shown.stdout.splitlines()
        assert [line for line in lines if line.startswith("put")] == [f"put true {number}" for number in range(20)]
        assert sorted(line for line in lines if line.startswith("got")) == sorted(f"got order {number}" for number in range(20))
        with open_store(served.engine.root) as store:
            found = [message for queue_id in store.topics()["orders"] for message in store.get_message("orders", queue_id, 0).messages]
        assert {message.tags for message in found} == {"paid"} and len(found) == 20
    finally:
        served.close()
