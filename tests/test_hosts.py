"""containers/cluster.yaml and kubernetes.yaml: valid by their schemas, and their hosts are the cluster of docs/hosts.md."""

from __future__ import annotations

import copy
import json
import re
import signal
import subprocess
import urllib.request
from importlib import resources
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from fix_cli import SOURCES, command_line, environment
from fix_gateway import Client
from fix_slave import secret_file
from pyengine.gateway import codes
from pyengine.storage.config import load_config
from waiting import eventually, scaled_timeout_s

CONTAINERS = SOURCES / "containers"
KUBERNETES = "1.33"  # the first in which matchLabelKeys of pods' affinity is not beta


def compose(name: str = "cluster.yaml") -> dict[str, Any]:
    return yaml.safe_load((CONTAINERS / name).read_text(encoding="utf-8"))


def manifests() -> list[dict[str, Any]]:
    return yaml.safe_load((CONTAINERS / "kubernetes.yaml").read_text(encoding="utf-8"))["items"]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in manifests() if each["kind"] == kind]


def pods() -> dict[str, dict[str, str]]:
    """The environment of each pod, as the kubelet expands it, by the pod's name."""
    found = {}
    for each in of_kind("StatefulSet"):
        (container,) = each["spec"]["template"]["spec"]["containers"]
        for number in range(each["spec"]["replicas"]):
            of_pod = {"metadata.name": f"{each['metadata']['name']}-{number}", "metadata.namespace": "shops",
                      "metadata.labels['apps.kubernetes.io/pod-index']": str(number)}
            values: dict[str, str] = {}
            for one in container["env"]:  # a variable may use those before it
                text = one["value"] if "value" in one else of_pod[one["valueFrom"]["fieldRef"]["fieldPath"]]
                values[one["name"]] = re.sub(r"\$\((\w+)\)", lambda name, known=dict(values): known[name[1]], text)
            found[of_pod["metadata.name"]] = values
    return found


def services() -> dict[str, dict[str, str]]:
    """The environment of each service of cluster.yaml that runs a host."""
    return {name: each["environment"] for name, each in compose()["services"].items() if "environment" in each}


def of_the_specification() -> jsonschema.protocols.Validator:
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)


# ---- the files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "cluster.yaml"])
def test_a_compose_file_is_valid_by_the_schema_of_the_specification(name):
    document, validator = compose(name), of_the_specification()
    assert [error.message for error in validator.iter_errors(document)] == []
    document["services"]["prometheus"]["depend_on"] = []
    assert not validator.is_valid(document), "a field that does not exist is seen"


@pytest.mark.parametrize("name", ["compose.yaml", "cluster.yaml"])
def test_what_serves_comes_up_again_with_the_machine(name):
    """An orderly stop, with which the machine goes down, exits with 0."""
    restarts = {service: each.get("restart") for service, each in compose(name)["services"].items() if service != "secret"}
    assert set(restarts.values()) == {"unless-stopped"}


@pytest.mark.parametrize("document", manifests(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_a_manifest_is_valid_by_the_schema_of_the_api(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)
    wrong = copy.deepcopy(document)
    wrong["spec"]["selectors"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_probes_ports_and_labels_of_the_manifests_fit_each_other():
    (service,), (budget,) = of_kind("Service"), of_kind("PodDisruptionBudget")
    for each in of_kind("StatefulSet"):
        template = each["spec"]["template"]
        labels, (container,) = template["metadata"]["labels"], template["spec"]["containers"]
        assert each["spec"]["serviceName"] == service["metadata"]["name"]
        for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"], each["spec"]["selector"]["matchLabels"]):
            assert selector.items() <= labels.items()
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert ports == {one["name"]: one["port"] for one in service["spec"]["ports"]}
        assert f"0.0.0.0:{ports['metrics']}" in container["args"]
        paths = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")}
        takes_puts = labels["role"] == "broker"
        assert paths == {"/healthz"} and container["readinessProbe"]["httpGet"]["path"] == ("/readyz" if takes_puts else "/healthz")
        mounted = {one["name"] for one in container["volumeMounts"]}
        claimed = {one["metadata"]["name"] for one in each["spec"]["volumeClaimTemplates"]}
        assert mounted <= claimed | {one["name"] for one in template["spec"]["volumes"]}
    assert service["spec"]["clusterIP"] == "None" and budget["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("hosts", [services, pods])
def test_settings_of_the_hosts_make_three_brokers_with_slaves(tmp_path, hosts):
    found = {name: load_config(tmp_path, {"gateway_enable": True}, values) for name, values in hosts().items()}
    assert len(found) == 6
    for name, config in found.items():
        advertised = config.gateway_advertised_host
        assert advertised.partition(".")[0] == name and config.gateway_listen_host == "0.0.0.0" and config.ha_secret_file
        masters = {other.broker_name: other for other in found.values() if other.number_in_routes == 0}
        assert len(masters) == 3 and config.broker_name in masters
        name_servers = {each.partition(":")[0].partition(".")[0] for each in config.name_servers}
        assert name_servers == {each for each, other in found.items() if other.gateway_namesrv_cluster} and len(name_servers) == 3
        if config.number_in_routes != 0:
            host, _, port = config.ha_master_address.partition(":")
            master = found[host.partition(".")[0]]
            assert master.broker_name == config.broker_name and master.ha_port == int(port) and master.ha_listen_host == "0.0.0.0"


# ---- the hosts --------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("hosts", [services, pods])
def test_the_hosts_are_a_cluster_with_loopback_addresses_instead_of_names(tmp_path, hosts, rng):
    """As `serve` runs them in their containers, with the ports of the files."""
    found, net = hosts(), f"127.{rng.randrange(64, 250)}.{rng.randrange(250)}"
    address = {name: f"{net}.{number}" for number, name in enumerate(found, 1)}
    secret, running = secret_file(tmp_path), []

    def values(name: str) -> dict[str, str]:
        told = {key: value.replace("0.0.0.0", address[name]).replace("/secret/ha.secret", str(secret))
                for key, value in found[name].items() if key.startswith("PYENGINE_")}
        for other in found:
            told = {key: value if key == "PYENGINE_BROKER_NAME" else re.sub(rf"\b{other}\b(\.[a-z.]+)?", address[other], value)
                    for key, value in told.items()}
        return told | {"PYENGINE_MAPPED_FILE_SIZE_COMMIT_LOG_BYTES": "1MiB", "PYENGINE_MAX_HASH_SLOT_NUM": "1000",
                       "PYENGINE_MAX_INDEX_NUM": "4000"}

    def is_good(name: str, path: str) -> bool:
        try:
            return urllib.request.urlopen(f"http://{address[name]}:9464{path}", timeout=5).status == 200
        except OSError:
            return False

    def brokers(name: str) -> dict[str, dict[str, str]]:
        with Client(9876, address[name]) as client:
            rows = json.loads(client.ask(codes.GET_ROUTEINFO_BY_TOPIC, {"topic": "TBW102"}).body or b'{"brokerDatas":[]}')["brokerDatas"]
        return {row["brokerName"]: row["brokerAddrs"] for row in rows}

    try:
        for name in found:  # masters first: a container of a slave is started again until its master is there
            log = open(tmp_path / f"{name}.log", "wb")
            running.append(subprocess.Popen(
                command_line("serve", tmp_path / name, "--metrics", f"{address[name]}:9464"), env=environment(**values(name)),
                stdout=log, stderr=log))
            log.close()
            eventually(lambda name=name: is_good(name, "/healthz"), f"{name} lives", 60)
        masters = [name for name in found if found[name]["PYENGINE_BROKER_ROLE"] == "SYNC_MASTER"]
        for name in masters:
            eventually(lambda name=name: is_good(name, "/readyz"), f"{name} takes puts", 60)
            every = {found[one]["PYENGINE_BROKER_NAME"]: {"0": f"{address[one]}:10911"} for one in masters}
            for one in found.keys() - set(masters):
                every[found[one]["PYENGINE_BROKER_NAME"]]["1"] = f"{address[one]}:10911"
            eventually(lambda name=name, every=every: brokers(name) == every, "each name server has each broker and its slave", 60)
    finally:
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait(scaled_timeout_s(60))
