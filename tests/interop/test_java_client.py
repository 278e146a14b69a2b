"""Apache RocketMQ's client for Java, unchanged, on a gateway: the program of examples/clients/java."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

import needs
from crash.replicas import free_port
from fix_cli import SOURCES
from fix_gateway import start_served
from fix_judge import available
from interop.clients import FLAGS
from interop.judge import build
from pyengine import open_store
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.ci, pytest.mark.java, pytest.mark.maven, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs the example with the name server at a port; it puts 20 messages."""
    with available():
        target = build(SOURCES / "examples" / "clients" / "java") / "target"
    home = tmp_path_factory.mktemp("home")  # of the client's logs
    command = [needs.java_command(), *FLAGS, f"-Duser.home={home}", "-cp", f"{target / 'orders.jar'}{os.pathsep}{target / 'lib' / '*'}"]
    return lambda port: subprocess.run([*command, "Orders", "20", f"127.0.0.1:{port}"], capture_output=True, text=True,
                                       timeout=scaled_timeout_s(120))


def test_the_java_client_puts_and_consumes(run, tmp_path):
    with contextlib.closing(start_served(tmp_path / "store")) as served:
        shown = run(served.ports[0])
        assert shown.returncode == 0, shown.stdout + shown.stderr
        lines = shown.stdout.splitlines()
        assert [line for line in lines if line.startswith("put")] == [f"put SEND_OK {number}" for number in range(20)]
        assert sorted(line for line in lines if line.startswith("got")) == sorted(f"got order {number}" for number in range(20))
        with open_store(served.root) as store:
            found = [message for queue_id in store.topics()["orders"] for message in store.get_message("orders", queue_id, 0).messages]
        assert {message.tags for message in found} == {"paid"} and len(found) == 20


def test_the_java_program_ends_with_the_reason_where_no_gateway_listens(run):
    port = free_port()
    shown = run(port)
    assert shown.returncode == 1 and f"connect to 127.0.0.1:{port} failed" in shown.stderr.replace("[", "").replace("]", ""), shown
