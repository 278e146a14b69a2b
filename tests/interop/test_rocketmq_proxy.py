"""RocketMQ's own proxy 5.5.0 in cluster mode, unchanged, in front of a gateway, and its Java client in front of that."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest

import needs
from crash.replicas import free_port
from fix_gateway import start_served
from fix_judge import available
from interop.clients import FLAGS, class_path_5
from interop.judge import build
from pyengine.storage.config_table import SubscriptionGroup, SubscriptionGroups, TopicConfig, TopicConfigs
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven, pytest.mark.ci, pytest.mark.timeout(300)]
SYNCER = "DefaultHeartBeatSyncerTopic"  # by which several proxies tell each other of their clients


@contextlib.contextmanager
def proxy(name_server: str, folder: Path):
    """Run the proxy; gives its gRPC port."""
    with available():
        libraries = build(Path(__file__).parent / "proxy") / "target" / "lib"
    port, said = free_port(), folder / "proxy.out"
    (folder / "rmq-proxy.json").write_text(json.dumps({
        "rocketMQClusterName": "DefaultCluster", "proxyMode": "CLUSTER", "namesrvAddr": name_server, "grpcServerPort": port,
        "remotingListenPort": free_port()}))
    with open(said, "w") as out:
        process = subprocess.Popen(
            [needs.java_command(), *FLAGS, f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}", "-cp", f"{libraries}{os.sep}*",
             "org.apache.rocketmq.proxy.ProxyStartup", "-pm", "cluster", "-n", name_server, "-pc", str(folder / "rmq-proxy.json")],
            stdout=out, stderr=out, cwd=folder)
    try:
        eventually(lambda: "startup successfully" in said.read_text() or process.poll() is not None, "the proxy runs", 120)
        assert process.poll() is None, said.read_text()[-3000:]
        yield port
    finally:
        process.kill()
        process.wait()


def test_all_types_of_messages_come_through_the_proxy_as_they_were_sent(tmp_path):
    store = start_served(tmp_path / "store", transaction_timeout_ms=1000, transaction_check_interval_ms=1000)
    try:
        TopicConfigs(store.root).ensure(TopicConfig(SYNCER, 1, 1))
        for name, kind in (("java5", "MIXED"), ("halves", "TRANSACTION")):  # of a MIXED topic it tells brokers no producers
            TopicConfigs(store.root).ensure(TopicConfig(name, 4, 4, more={"attributes": {"message.type": kind}}))
        for name in ("push_java5", "simple_java5", "ordered_java5"):  # the proxy makes none
            SubscriptionGroups(store.root).put(SubscriptionGroup(name, more={"consumeMessageOrderly": name.startswith("ordered")}))
        with available():
            class_path = class_path_5()
        with proxy(f"127.0.0.1:{store.ports[0]}", tmp_path) as port:
            told = subprocess.run([needs.java_command(), *FLAGS, f"-Duser.home={tmp_path}", "-cp",
                                   class_path, "clients5.Grpc",
                                   str(port), "java5", "ordered_java5", "halves"], capture_output=True, text=True,
                                  timeout=scaled_timeout_s(200), cwd=tmp_path)
        assert told.returncode == 0, told.stdout + told.stderr
        in_order = ",".join(map(str, range(30)))
        assert told.stdout.splitlines()[-2:] == [f"pushed {{1=103, 2=1}} ordered {in_order}", "simple 50"]
        stored = ConsumerOffsets(store.root)
        eventually(lambda: sum(stored.read("java5", "push_java5").values()) >= 131, "what is acknowledged is in the file")
    finally:
        store.close()
