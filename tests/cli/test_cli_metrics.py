"""`pyengine metrics`: what Prometheus gets, by its own parser, and the endpoint as a process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import pyengine
from fix_cli import command_line, environment, run
from fix_engine import SMALL
from fix_golden import usual
from fix_owner import add_sync
from pyengine.cli import engine_status
from pyengine.cli import metrics as metrics_module
from pyengine.cli.metrics import CONNECTIONS_MAX, Exposition, _replication, serve
from pyengine.formats.paths import set_log_folders
from pyengine.ipc import sessions
from pyengine.ipc.control_block import EngineMemory
from pyengine.native import control as native
from pyengine.storage.config import config_path
from pyengine.storage.consumer_offset import ConsumerOffsets
from waiting import eventually, scaled_timeout_s

MONITORING = Path(__file__).parents[2] / "monitoring"
PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"


@pytest.fixture
def owner(make_owner):
    """A store that this test's process owns, with some figures."""
    owner = make_owner()
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    owner.position(4096)
    for slot in owner.control.slots:
        slot.put_messages, slot.put_bytes = 30, 4096
    stats = owner.memory.counters
    stats.put.refused[6] = 2
    stats.put.size[7] = 29
    stats.put.size[11] = 1
    for ns in (500, 3_000_000, 25_000_000_000):
        add_sync(stats, ns)
    owner.publish()
    return owner


def families(text: str) -> dict[str, object]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_the_figures_once_are_one_document_with_json(owner):
    ran = run("metrics", owner.root, "--once", "--json")
    assert ran.code == 0, ran
    found = {family["name"]: family for family in json.loads(ran.stdout)}
    assert found.keys() == scrape(owner.root).keys()
    assert found["pyengine_up"]["type"] == "gauge" and found["pyengine_up"]["samples"][0]["value"] in (0, 1)


def scrape(root) -> dict[str, object]:
    ran = run("metrics", root, "--once")
    assert ran.code == 0, ran
    return families(ran.stdout)


def value(found, name: str, **labels: str) -> float:
    matching = [sample.value for family in found.values() for sample in family.samples
                if sample.name == name and labels.items() <= sample.labels.items()]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def test_figures_have_their_values(owner):
    found = scrape(owner.root)
    assert value(found, "pyengine_up") == 1
    assert value(found, "pyengine_put_messages_total") == 30 and value(found, "pyengine_put_bytes_total") == 4096
    assert value(found, "pyengine_refused_puts_total", status="MESSAGE_ILLEGAL") == 2
    assert value(found, "pyengine_refused_puts_total", status="SERVICE_NOT_AVAILABLE") == 0
    assert value(found, "pyengine_position_bytes", position="wrote") == 4096
    assert value(found, "pyengine_state", state="running") == 1 and value(found, "pyengine_state", state="stopped") == 0
    assert value(found, "pyengine_info", store=str(owner.root), mode="async") == 1
    assert value(found, "pyengine_worker_up", kind="supervisor") == 0  # it is still starting
    assert 0 < value(found, "pyengine_disk_used_ratio", folder="commitlog") < 1


@pytest.mark.root
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_log_on_several_disks_the_least_full_one_counts_as_for_puts(owner, make_small_disk, order):
    disks = make_small_disk("1m"), make_small_disk("1m")
    for disk in disks:
        (disk / "log").mkdir()
    (disks[0] / "ballast").write_bytes(bytes(900_000))
    set_log_folders(owner.root, ",".join(f"{disks[number]}/log" for number in order), "")
    assert value(scrape(owner.root), "pyengine_disk_used_ratio", folder="log") < 0.1
    assert run("status", owner.root, "--json").document["statistics"]["commit_log_disk_ratio"] < 0.1
    (disks[1] / "ballast").write_bytes(bytes(950_000))
    assert value(scrape(owner.root), "pyengine_disk_used_ratio", folder="log") > 0.85


def test_histograms_hold_each_duration_below_its_bound(owner):
    found = scrape(owner.root)
    name = "pyengine_sync_duration_seconds"
    buckets = {float(sample.labels["le"]): sample.value for sample in found[name].samples if sample.name == f"{name}_bucket"}
    assert list(buckets.values()) == sorted(buckets.values())
    assert {bound: count for bound, count in buckets.items() if bound < 1e-5} == {
        1.024e-06: 1, 2.048e-06: 1, 4.096e-06: 1, 8.192e-06: 1}
    assert [buckets[bound] for bound in (0.002097152, 0.004194304, 17.179869184, float("inf"))] == [1, 2, 2, 3]
    assert value(found, f"{name}_count") == 3 and value(found, f"{name}_sum") == pytest.approx(25.0030005)
    assert value(found, "pyengine_put_size_bytes_bucket", le="255") == 29
    assert value(found, "pyengine_put_size_bytes_bucket", le="4095") == 30


def test_names_and_units_follow_the_rules(owner):
    for name, family in scrape(owner.root).items():
        assert name == "pyengine" or name.startswith("pyengine_"), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name) and family.documentation.endswith("."), name
        assert not re.search(r"_(ms|us|ns|kb|mb|percent|total|count)(_|$)", name), f"{name}: base units, no such endings"
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            assert all(re.fullmatch(r"[a-z_]+", label) for label in sample.labels)
    assert "pyengine_put_duration_seconds" in scrape(owner.root)


def replication_text(*, slave: bool) -> str:
    """Return what the exposition says of a master's two slaves, or of a slave's master."""
    registry = CollectorRegistry()
    document = {
        "linked": slave or None, "slaves_connected": 2, "unconfirmed_bytes": 7, "master_end": 900, "connections": 5, "refused": 1,
        "closed": 3, "master_lag_s": 2.5, "links": [
            {"address": "10.0.0.2:4000", "bytes": 55, "lag_bytes": 9, "lag_s": 1.5},
            {"address": "10.0.0.3:4000", "bytes": 0, "lag_bytes": None, "lag_s": None}]}
    registry.register(type("Fixed", (), {"collect": lambda self: _replication(document)})())
    return generate_latest(registry).decode()


def test_links_have_their_figures():
    master, slave = families(replication_text(slave=False)), families(replication_text(slave=True))
    assert (value(master, "pyengine_slaves_connected"), value(master, "pyengine_unconfirmed_bytes")) == (2, 7)
    assert (value(slave, "pyengine_master_linked"), value(slave, "pyengine_master_end_bytes")) == (1, 900)
    assert value(master, "pyengine_links_closed_total") == value(slave, "pyengine_links_closed_total") == 3
    assert value(master, "pyengine_link_lag_bytes", address="10.0.0.2:4000") == 9
    assert value(master, "pyengine_link_lag_seconds", address="10.0.0.2:4000") == 1.5
    assert value(slave, "pyengine_master_lag_seconds") == 2.5
    assert value(master, "pyengine_link_bytes_total", address="10.0.0.3:4000") == 0
    assert not master.keys() & {"pyengine_master_linked"} and not slave.keys() & {"pyengine_slaves_connected"}


@pytest.mark.parametrize("name", ["alerts.yml", "alerts_test.yml", "dashboard.json"])
def test_alerts_and_dashboard_use_only_exported_metrics(owner, name):
    text = (MONITORING / name).read_text(encoding="utf-8").replace('\\"', '"')
    found = scrape(owner.root) | families(replication_text(slave=False)) | families(replication_text(slave=True))
    by_page = set(re.findall(r"`(pyengine_\w+)`", PAGE.read_text(encoding="utf-8")))  # some have samples only when there is something
    samples = [sample for family in found.values() for sample in family.samples]
    shown = {sample.name for sample in samples} | {name for name in by_page if name.removesuffix("_total") in found}
    asked = set(re.findall(r"\bpyengine_\w+", text))
    assert len(asked) > 15 and asked <= shown, asked - shown
    for metric, label, value in re.findall(r'(pyengine_\w+)\{[^}]*\b(state|verdict|position)="(\w+)"', text):
        assert any(sample.name == metric and sample.labels.get(label) == value for sample in samples), (metric, label, value)


def test_every_name_is_on_the_page(owner):
    page = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`(pyengine_\w+)`", page))
    found = scrape(owner.root) | families(replication_text(slave=False)) | families(replication_text(slave=True))
    shown = {name + ("_total" if family.type == "counter" else "") for name, family in found.items()}
    assert shown <= named, shown - named
    assert named <= shown | {"pyengine_up"}, named - shown


def test_a_stopped_store_is_down_and_still_answers(owner):
    owner.memory.retire()
    owner.lock.close()
    found = scrape(owner.root)
    assert value(found, "pyengine_up") == 0
    assert "pyengine_put_messages" not in found


def test_groups_show_their_lag(make_engine):
    engine = make_engine()
    engine.start()
    with pyengine.connect(engine.root) as producer, pyengine.open_store(engine.root) as store:
        for _ in range(5):
            producer.put("orders", b"x")
        assert store.wait_for_message("orders", 0, 4, 30)
    ConsumerOffsets(engine.root).commit("orders", "billing", {0: 2})
    found = scrape(engine.root)
    assert value(found, "pyengine_group_next_offset", group="billing", topic="orders", queue_id="0") == 2
    assert value(found, "pyengine_group_lag_messages", group="billing", topic="orders", queue_id="0") == 3
    assert value(found, "pyengine_topic_messages_total", topic="orders") == 5
    assert value(found, "pyengine_worker_up", kind="writer") == 1


# ---- the endpoint -----------------------------------------------------------


@contextlib.contextmanager
def serving(root, *arguments: str):
    """(process, URL) of an endpoint on a free port; killed at the end."""
    child = subprocess.Popen(command_line("metrics", root, "--listen", "127.0.0.1:0", *arguments), env=environment(),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield child, child.stdout.readline().strip()
    finally:
        child.kill()
        child.communicate()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=scaled_timeout_s(30)) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


def test_the_endpoint_answers_scrape_after_scrape_while_engines_come_and_go(make_engine):
    engine = make_engine()
    engine.start()
    with serving(engine.root) as (child, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        assert value(families(get(url)), "pyengine_put_messages_total") == 0
        with pyengine.connect(engine.root) as producer:
            producer.put("orders", b"x")
        assert value(families(get(url)), "pyengine_put_messages_total") == 1
        engine.kill_all()
        assert value(families(get(url)), "pyengine_up") == 0
        engine.start()
        assert value(families(get(url)), "pyengine_up") == 1
        held = len(os.listdir(f"/proc/{child.pid}/fd"))
        for _ in range(30):
            get(url)
        assert len(os.listdir(f"/proc/{child.pid}/fd")) <= held + 2
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


def ask(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    """(status, text) of another path of the endpoint."""
    request = urllib.request.Request(url.removesuffix("/metrics") + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=scaled_timeout_s(30)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def answering(root):
    """URL of an endpoint in this process."""
    server = serve(Exposition(root, {}), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


def test_an_engine_is_alive_until_it_stops_and_ready_while_it_takes_puts(make_engine):
    engine = make_engine()
    engine.start()
    with answering(engine.root) as url:
        assert ask(url, "/healthz")[0] == 200
        eventually(lambda: ask(url, "/readyz")[1].startswith("ok: it takes puts; 8 processes are ready; "), "it is ready")
        assert ask(url, "/readyz")[0] == 200
        writer = engine.kill("writer", signal.SIGSTOP)
        eventually(lambda: ask(url, "/readyz")[0] == 503, "a stopped writer takes no puts")
        code, text = ask(url, "/readyz")
        assert code == 503 and text.startswith(f"stuck: the writer (pid {writer})") and f"kill -CONT {writer}" in text
        assert ask(url, "/healthz")[0] == 200
        os.kill(writer, signal.SIGCONT)
        eventually(lambda: ask(url, "/readyz")[0] == 200, "it is ready again")
        engine.stop()
        assert ask(url, "/healthz") == ask(url, "/readyz") == (503, "stopped: no engine runs\n")


def test_it_is_not_ready_while_no_session_can_be_opened(make_engine, monkeypatch):
    engine = make_engine()
    engine.start()
    with answering(engine.root) as url:
        eventually(lambda: ask(url, "/readyz")[0] == 200, "it is ready")
        monkeypatch.setattr(sessions, "free_bytes", lambda folder: 0)
        assert ask(url, "/readyz")[0] == 503
        monkeypatch.undo()
        path = config_path(engine.root)
        was = path.read_text()
        path.write_text(was + "put_timeout_ms = 7s\n")
        assert ask(url, "/readyz")[0] == 503 and f"no program can connect: {path}" in ask(url, "/readyz")[1]
        path.write_text(was)
        assert ask(url, "/readyz")[0] == 200
        engine.kill("supervisor")
        eventually(lambda: ask(url, "/readyz")[0] == 503, "no supervisor opens one")
        assert "no supervisor is running" in ask(url, "/readyz")[1]


def test_it_is_not_ready_and_its_broker_takes_no_puts_while_no_gateway_runs(make_engine):
    engine = make_engine(gateway_enable=True, gateway_broker_port=0, gateway_namesrv_port=0, grpc_enable=False)
    engine.start()

    def told(url):
        return ask(url, "/readyz")[0], value(families(get(url)), "pyengine_broker_takes_puts")

    with answering(engine.root) as url:
        eventually(lambda: told(url) == (200, 1), "it is ready")
        path = config_path(engine.root)
        was = path.read_text()
        path.write_text(was + "put_timeout_ms = 7s\n")
        assert told(url) == (200, 1)  # its clients put; a Python program cannot
        assert "no Python program can connect, and the next start will be refused" in run("status", engine.root).stdout
        path.write_text(was)
        engine.kill("supervisor")
        engine.kill("gateway")
        eventually(lambda: told(url) == (503, 0), "no gateway runs")
        engine.start()
        eventually(lambda: told(url) == (200, 1), "it is ready again")


def test_a_gateway_that_has_never_run_is_waited_for_at_a_start_alone(make_engine, monkeypatch):
    engine = make_engine(gateway_enable=True, gateway_broker_port=0, gateway_namesrv_port=0, grpc_enable=False)
    engine.start()
    with answering(engine.root) as url, engine.memory(writable=True) as memory:
        eventually(lambda: ask(url, "/readyz")[0] == 200, "it is ready")
        engine.kill("supervisor")
        engine.kill("gateway")
        gateway, created_ns = memory.control.workers[native.GATEWAY], memory.identity.created_boot_ns
        eventually(lambda: value(families(get(url)), "pyengine_broker_takes_puts") == 0, "the gateway has died")
        native.store(gateway, "incarnation", 0)  # as if its unit had never started
        del gateway
        takes_puts = {}
        for age_s in (1, 29, 30, 3600):
            monkeypatch.setattr(engine_status, "boot_ns", lambda age_s=age_s: created_ns + age_s * 10**9)
            takes_puts[age_s] = value(families(get(url)), "pyengine_broker_takes_puts")
        assert takes_puts == {1: 1, 29: 1, 30: 0, 3600: 0}


def test_readiness_names_the_reason_for_refused_puts(make_owner):
    owner = make_owner(role=2)
    owner.make_rest()
    (owner.root / "commitlog").mkdir()
    with answering(owner.root) as url:
        assert ask(url, "/healthz")[0] == 200
        assert ask(url, "/readyz") == (503, "its counters cannot be seen: it recovers, starts or stops\n")
        owner.publish()
        native.refuse_puts(owner.control, native.REFUSE_SLAVE)
        code, text = ask(url, "/readyz")
        assert code == 503 and text.startswith("a SLAVE takes no puts; ok: it follows its master")
        native.refuse_puts(owner.control, native.REFUSE_DISK_FULL)
        code, text = ask(url, "/readyz")
        assert code == 503 and text.startswith("read-only: the disk is full")


def test_other_paths_are_not_found(owner):
    with answering(owner.root) as url:
        for path in ("/", "/metric", "/metrics/", "/healthz/x", "/favicon.ico"):
            assert ask(url, path)[0] == 404, path
        assert ask(url, "/healthz", "HEAD") == (200, "") and ask(url, "/readyz", "POST")[0] == 405
        assert value(families(get(f"{url}?from=here")), "pyengine_up") == 1


def test_the_verdict_is_a_figure(owner):
    native.refuse_puts(owner.control, native.REFUSE_DISK_FULL)
    found = scrape(owner.root)
    assert value(found, "pyengine_verdict", verdict="read-only") == 1 and value(found, "pyengine_verdict", verdict="ok") == 0


def test_scraping_wakes_no_worker_and_needs_no_write(make_owner):
    owner = make_owner()
    (owner.root / "commitlog").mkdir()
    owner.publish()
    before = bytes(owner.memory.control_object.memory)
    scrape(owner.root)
    assert bytes(owner.memory.control_object.memory) == before
    with EngineMemory.attach(owner.folder, writable=False) as seen:
        assert native.load(seen.control.state, "state") == native.STATE_RUNNING


def test_a_hangup_does_not_end_it_as_it_does_not_end_the_engine(owner):
    with serving(owner.root) as (child, url):
        child.send_signal(signal.SIGHUP)
        assert value(families(get(url)), "pyengine_up") == 1 and child.poll() is None
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0


def test_only_this_machine_is_answered_by_default(owner):
    with serving(owner.root) as (_, url):
        port = int(url.rsplit(":", 1)[1].split("/")[0])
        others = [address[4][0] for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
        for host in [host for host in others if not host.startswith("127.")]:
            with pytest.raises(urllib.error.URLError):
                urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5)


def test_a_taken_port_is_one_sentence(owner):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = run("metrics", owner.root, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert ran.code == 1 and "cannot listen on 127.0.0.1" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("listen", ("9464", "127.0.0.1", "127.0.0.1:http", ":9464", "127.0.0.1:70000"))
def test_a_wrong_address_is_a_usage_error(owner, listen):
    ran = run("metrics", owner.root, "--listen", listen)
    assert ran.code == 2 and "HOST:PORT" in ran.stderr


# ---- clients that are silent, slow or many ------------------------------------------


def connect(url: str, data: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0])), scaled_timeout_s(30))
    made.sendall(data)
    return made


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has ended the connection, which is waited for."""
    connection.settimeout(scaled_timeout_s(60))
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


NO_REQUESTS = {"nothing": b"", "a byte": b"G", "half": b"GET /healthz HTTP/1.0\r\nHost: x\r\n", "a long line": b"GET /" + b"x" * 200_000,
               "headers": b"GET / HTTP/1.0\r\n" + b"a: b\r\n" * 40_000}


@pytest.mark.parametrize("what", usual(NO_REQUESTS, ["half"], pytest.mark.ci))
def test_health_is_answered_beside_hundreds_of_connections_without_a_request(owner, what):
    data = NO_REQUESTS[what]
    with serving(owner.root) as (child, url), contextlib.ExitStack() as stack:
        for _ in range(400):
            with contextlib.suppress(ConnectionError):
                stack.enter_context(connect(url, data))
        assert ask(url, "/healthz")[0] == 200 and ask(url, "/readyz")[0] in (200, 503)
        assert value(families(get(url)), "pyengine_up") == 1
        process = psutil.Process(child.pid)
        assert process.num_threads() <= CONNECTIONS_MAX + 16 and process.num_fds() <= CONNECTIONS_MAX + 64
        assert process.memory_info().rss < 200 << 20
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert child.stderr.read() == ""


def test_a_connection_has_some_seconds_for_its_request(owner, monkeypatch):
    monkeypatch.setattr(metrics_module, "REQUEST_S", 0.2)
    with answering(owner.root) as url, connect(url) as silent, connect(url, b"GET /healthz") as slow:
        assert is_ended(silent) and is_ended(slow)
        assert ask(url, "/healthz")[0] == 200


def test_a_byte_now_and_then_does_not_keep_a_connection(owner, monkeypatch):
    monkeypatch.setattr(metrics_module, "REQUEST_S", 0.5)
    with answering(owner.root) as url, connect(url, b"GET /") as slow:
        slow.settimeout(0.05)

        def is_refused():
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        eventually(is_refused, "its time is over, whatever it sends")


def test_an_answer_that_is_not_read_ends_and_one_that_is_asked_for_is_not_cut_for_a_silent_client(owner, monkeypatch):
    monkeypatch.setattr(metrics_module, "CONNECTIONS_MAX", 8)
    monkeypatch.setattr(metrics_module, "ANSWER_S", 0.5)
    go_on = threading.Event()
    monkeypatch.setattr(Exposition, "health", lambda self: (go_on.wait(scaled_timeout_s(60)), "late"))
    with answering(owner.root) as url, contextlib.ExitStack() as stack:
        monkeypatch.setattr(metrics_module, "ANSWER_S", 60.0)
        asked = stack.enter_context(connect(url, b"GET /healthz HTTP/1.0\r\n\r\n"))
        eventually(lambda: ask(url, "/none")[0] == 404, "the server works")
        for _ in range(30):
            stack.enter_context(connect(url))
        assert ask(url, "/none")[0] == 404
        go_on.set()
        assert asked.recv(65536).startswith(b"HTTP/1.0 200 OK")
        go_on.clear()
        monkeypatch.setattr(metrics_module, "ANSWER_S", 0.5)
        assert is_ended(stack.enter_context(connect(url, b"GET /healthz HTTP/1.0\r\n\r\n")))
        go_on.set()


def test_the_metrics_of_a_store_whose_path_is_not_utf_8_are_valid(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/st\xff\xfe"))
    with pyengine.Engine(root, **SMALL) as engine, engine.connect() as producer:
        producer.put("T", b"x")
        with answering(root) as url:
            assert 'store="' in get(url) and ask(url, "/healthz")[0] == 200
        assert run("metrics", root, "--once").code == 0
