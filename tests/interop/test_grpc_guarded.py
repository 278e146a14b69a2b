"""RocketMQ's own Java, Node and Python clients for RocketMQ 5, unchanged, on a store with an access list, with TLS and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import trustme

import needs
from crash.replicas import free_port
from fix_gateway import put_certificate, put_private
from fix_judge import available
from interop.clients import FLAGS, class_path_5, node_programs
from waiting import scaled_timeout_s

LIST = b"""
accounts:
- {accessKey: the-shop, secretKey: its-secret, topicPerms: [orders=PUB|SUB], groupPerms: [billing=SUB]}
- {accessKey: the-boss, secretKey: boss-secret, admin: true, tlsOnly: true}
"""
pytestmark = pytest.mark.ci
SHOP = ("the-shop", "its-secret")
PYTHON = """
import os, sys, time
from rocketmq.v5.client import ClientConfiguration, Credentials
from rocketmq.v5.consumer import SimpleConsumer
from rocketmq.v5.model import FilterExpression, Message
from rocketmq.v5.producer import Producer

endpoints, is_by_tls, key, secret, topic, group = sys.argv[1:]
settings, deadline_s = ClientConfiguration(endpoints, Credentials(key, secret)), time.time() + 60

def send():
    producer = Producer(settings, tls_enable=is_by_tls == "true")
    producer.startup()
    message = Message()
    message.topic, message.body = topic, b"by Python"
    producer.send(message)

def receive():
    consumer = SimpleConsumer(settings, group, {topic: FilterExpression("*")}, 2, tls_enable=is_by_tls == "true")
    consumer.startup()
    while time.time() < deadline_s:
        for message in consumer.receive(4, 30) or ():
            return consumer.ack(message)
    raise TimeoutError("nothing came")

for work in (send, receive):
    try:
        work()
        print(work.__name__, "ok", flush=True)
    except Exception as error:
        print(work.__name__, type(error).__name__, error, flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A GrpcStore with an access list, a port with TLS and a plain one; `trusted` is the file of its authority."""
    from grpc_caller import start_grpc

    root, authority = tmp_path_factory.mktemp("guarded") / "store", trustme.CA()
    (root / "config").mkdir(parents=True)
    put_private(root / "config" / "plain_acl.yml", LIST)
    store = start_grpc(root, acl_enable=True, gateway_tls_mode="permissive", grpc_plain_port=free_port(),
                       **put_certificate(root / "config", authority))
    for name in ("orders", "others"):
        store.make_topic(name)
    store.plain_port = int(re.search(r"without TLS at port (\d+)", store.engine.log())[1])
    store.trusted = root / "config" / "ca.pem"
    authority.cert_pem.write_to_path(str(store.trusted))
    yield store
    store.close()


@pytest.fixture(params=[pytest.param("Java", marks=[pytest.mark.java, pytest.mark.maven]), pytest.param("Node", marks=pytest.mark.node),
                        "Python"])
def run(request, guarded, tmp_path):
    """A function that lets a client send and receive, and returns what it prints about each, without the requests' ids."""
    if request.param == "Java":
        with available():
            command = [needs.java_command(), *FLAGS, f"-Duser.home={tmp_path}", "-cp", class_path_5(), "clients5.Guarded"]
    elif request.param == "Node":
        command = ["node", node_programs() / "guarded.js"]
    else:
        command = [sys.executable, "-c", PYTHON]

    def told(*account: str, is_by_tls: bool = False, topic: str = "orders", group: str = "billing") -> list[str]:
        endpoints = f"localhost:{guarded.grpc_port}" if is_by_tls else f"127.0.0.1:{guarded.plain_port}"
        done = subprocess.run(
            [*command, endpoints, str(is_by_tls).lower(), *account, topic, group], capture_output=True, text=True, cwd=tmp_path,
            timeout=scaled_timeout_s(150),
            env=os.environ | {"HOME": str(tmp_path), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(guarded.trusted)})
        assert done.returncode == 0, done.stdout + done.stderr
        return [re.sub(r"request-id=[^,]*, ", "", line) for line in done.stdout.splitlines() if line.startswith(("send ", "receive "))]

    return told


def test_a_client_with_a_key_sends_and_receives_with_tls_and_without(run):
    assert run(*SHOP, is_by_tls=True) == ["send ok", "receive ok"]
    assert run(*SHOP) == ["send ok", "receive ok"]


def test_a_client_without_the_right_key_is_told_which_one_is_missing(run):
    for account, why in ((("the-shop", "another-one"), "Check signature failed for accessKey=the-shop"),
                         (("", ""), "No accessKey is configured"), (("the-boss", "boss-secret"), "is for connections with TLS only")):
        sent, received = run(*account)
        # Python's client, and the others' consumers when they start, have no word of the server in what they raise.
        assert why in sent and "40100" in sent or "failed to fetch topic:orders route" in sent, sent
        assert received != "receive ok"


def test_a_client_without_a_right_is_told_which_one_is_missing(run):
    sent, received = run(*SHOP, topic="others")
    for told in (sent, received):
        assert "No default permission for topic:others" in told
    sent, received = run(*SHOP, group="thieves")
    assert sent == "send ok" and "No default permission for group:thieves" in received
