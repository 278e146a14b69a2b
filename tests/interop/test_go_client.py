"""Apache RocketMQ's client for Go, unchanged, on a gateway: the program of examples/clients/go, with an access key and with TLS."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import trustme

from crash.replicas import free_port
from fix_cli import SOURCES
from fix_gateway import put_certificate, put_private, start_served
from interop.judge import cache_folder
from pyengine import open_store
from pyengine.gateway import codes
from pyengine.storage.config_table import TopicConfig, TopicConfigs
from waiting import eventually, scaled_timeout_s

PROGRAM = SOURCES / "examples" / "clients" / "go"

# The first build compiles the client and all that it needs, which takes longer than all other clients' tests together.
pytestmark = [pytest.mark.go, pytest.mark.long, pytest.mark.timeout(900)]


LIST = b"""
accounts:
- {accessKey: shop-key, secretKey: shop-secret, defaultTopicPerm: DENY, defaultGroupPerm: DENY, topicPerms: [orders=PUB|SUB],
   groupPerms: [billing=SUB]}
"""


def build(folder, *arguments):
    """The example, built."""
    built = folder / "example"
    environ = os.environ | {"GOCACHE": str(cache_folder() / "go-build"), "GOFLAGS": "-buildvcs=false"}
    done = subprocess.run(["go", "build", "-o", built, *arguments, "."], cwd=PROGRAM, env=environ, capture_output=True, text=True,
                          timeout=scaled_timeout_s(600))
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """With the newest release of the client, which has no TLS."""
    return build(tmp_path_factory.mktemp("go"))


@pytest.fixture(scope="module")
def program_with_tls(tmp_path_factory):
    return build(tmp_path_factory.mktemp("go"), "-modfile", "tls.mod", "-tags", "tls")


def run(program, served, *arguments, secret: str = "", limit_s: float = 120):
    return subprocess.run(
        [program, "-namesrv", f"127.0.0.1:{served.ports[0]}", "-count", "20", "-limit", f"{scaled_timeout_s(limit_s):.0f}s", *arguments],
        env=os.environ | {"ROCKETMQ_SECRET_KEY": secret}, capture_output=True, text=True, timeout=scaled_timeout_s(240))


def check_all_came(shown):
    assert shown.returncode == 0, shown.stdout + shown.stderr
    lines = shown.stdout.splitlines()
    assert [line for line in lines if line.startswith("put")] == [f"put true {number}" for number in range(20)]
    assert sorted(line for line in lines if line.startswith("got")) == sorted(f"got order {number}" for number in range(20))


def test_the_go_client_puts_and_consumes(program, tmp_path):
    served = start_served(tmp_path / "store")
    try:
        check_all_came(run(program, served))
        with open_store(served.engine.root) as store:
            found = [message for queue_id in store.topics()["orders"] for message in store.get_message("orders", queue_id, 0).messages]
        assert {message.tags for message in found} == {"paid"} and len(found) == 20
    finally:
        served.close()


def test_the_go_client_uses_all_hosts_of_a_cluster_and_those_that_are_left(program, tmp_path):
    ports = [free_port(), free_port()]
    names = ";".join(f"127.0.0.1:{port}" for port in ports)
    hosts = [start_served(tmp_path / str(port), gateway_namesrv_cluster=True, gateway_namesrv_port=port, namesrvAddr=names,
                          brokerName=f"broker-{number}") for number, port in enumerate(ports)]

    def stored(host, topic: str) -> int:
        with open_store(host.root) as store:
            return sum(store.queue_range(topic, queue_id)[1] for queue_id in store.topics().get(topic, []))

    try:
        for host in hosts:
            for topic in ("orders", "prices"):
                TopicConfigs(host.root).ensure(TopicConfig(topic, 4, 4))
        for host in hosts:
            eventually(lambda host=host: len(json.loads(host.name_server().ask(
                codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "prices"}).body or b'{"brokerDatas":[]}')["brokerDatas"]) == 2, "both have it", 60)
        check_all_came(run(program, hosts[1]))
        assert sum(found := [stored(host, "orders") for host in hosts]) == 20 and min(found) >= 5
        hosts[0].engine.kill_all()
        check_all_came(run(program, hosts[1], "-topic", "prices", "-group", "readers"))
        assert stored(hosts[1], "prices") == 20
    finally:
        for host in hosts:
            host.close()


def test_the_go_client_with_a_key_does_what_its_account_may(program, tmp_path):
    served = start_served(tmp_path / "store", acl_enable=True, gateway_acl_file=str(put_private(tmp_path / "plain_acl.yml", LIST)))
    try:
        check_all_came(run(program, served, "-access-key", "shop-key", secret="shop-secret"))
        for key, secret, topic, why in (("shop-key", "wrong-secret", "orders", "Check signature failed for accessKey=shop-key"),
                                        ("", "", "orders", "No accessKey is configured"),
                                        ("shop-key", "shop-secret", "prices", "No default permission for topic:prices")):
            shown = run(program, served, "-access-key", key, "-topic", topic, secret=secret)
            assert shown.returncode != 0 and why in shown.stderr, shown.stdout + shown.stderr
    finally:
        served.close()


def test_the_go_client_with_tls_and_a_key_puts_and_consumes_and_without_tls_is_refused(program, program_with_tls, tmp_path):
    served = start_served(tmp_path / "store", acl_enable=True, gateway_acl_file=str(put_private(tmp_path / "plain_acl.yml", LIST)),
                          gateway_tls_mode="enforcing", **put_certificate(tmp_path, trustme.CA()))
    try:
        check_all_came(run(program_with_tls, served, "-access-key", "shop-key", secret="shop-secret"))
        shown = run(program, served, "-access-key", "shop-key", secret="shop-secret")
        assert shown.returncode != 0 and "put" not in shown.stdout, shown.stdout + shown.stderr
        assert "it does not begin with TLS" in served.engine.log()
    finally:
        served.close()
