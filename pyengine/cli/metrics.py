"""`pyengine metrics`: exports a store's metrics to Prometheus, over HTTP or once, and its health.

Only this module imports prometheus_client. Each scrape attaches to the engine's shared memory read-only, copies, and
detaches. Names follow Prometheus's rules: base units (seconds, bytes), `_total` for counters, one name for one thing with
labels for its kinds. docs/statistics.md says what each means.
"""

from __future__ import annotations

import contextlib
import functools
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

import pyengine
from pyengine.cli.engine_status import Verdict, live_status
from pyengine.cli.output import json_option, parsed, set_option, store_argument, write_json
from pyengine.engine_config import SLAVE, keywords
from pyengine.errors import ConfigError, DiskError, EngineError
from pyengine.formats.paths import StorePaths
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.ipc.statistics import Statistics
from pyengine.ipc.store_lock import living_kinds
from pyengine.native import store_stats
from pyengine.native.store_stats import Latency
from pyengine.results import PutStatus
from pyengine.settings import join_address, split_address
from pyengine.storage.commit_log import measure_log
from pyengine.storage.config import existing_store, load_config
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.file_system import used_ratio

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PORT = 9464
Labels = tuple[str, ...]


def _host_and_port(text: str) -> tuple[str, int]:
    host, port = split_address(text)
    host.encode("idna")  # UnicodeError as of the look-up, a ValueError
    return host, port


def address_option(name: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return an option HOST:PORT, whose value is a pair, or None if it is not given and has no default."""
    return click.option(name, metavar="HOST:PORT", **options,
                        callback=parsed(_host_and_port, f"HOST:PORT, as in 127.0.0.1:{PORT} or [::1]:{PORT}"))


@click.command()
@store_argument
@set_option
@json_option
@address_option("--listen", default=f"127.0.0.1:{PORT}", show_default=True,
                help="Address to listen on; port 0: a free port, printed.")
@click.option("--once", is_flag=True, help="Print the metrics to stdout and exit.")
def metrics(store: Path, settings: dict[str, str], as_json: bool, listen: tuple[str, int], once: bool) -> None:
    """Export an engine's metrics to Prometheus, over HTTP or once.

    It answers /metrics, /healthz and /readyz (docs/statistics.md), without a password.

    \b
    Examples:
      pyengine metrics STORE --listen 127.0.0.1:0
      pyengine metrics STORE --once > new && mv new pyengine.prom
    """
    load_config(existing_store(store), settings)  # a wrong setting is an error now, not at the first scrape
    exposition = Exposition(store, settings)
    if not once:
        _serve(exposition, *listen, as_json=as_json)
    elif as_json:
        write_json(_families(exposition.text()))
    else:
        click.echo(exposition.text(), nl=False)


def _families(text: str) -> list[dict[str, Any]]:
    from prometheus_client.parser import text_string_to_metric_families

    return [{"name": family.name, "type": family.type, "help": family.documentation,
             "samples": [{"name": sample.name, "labels": sample.labels, "value": sample.value} for sample in family.samples]}
            for family in text_string_to_metric_families(text)]


def _serve(exposition: Exposition, host: str, port: int, *, as_json: bool) -> None:
    """Serve until SIGTERM, ignoring SIGHUP because a terminal may close."""
    try:
        server = serve(exposition, host, port)
    except OSError as error:
        raise EngineError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        url = f"http://{join_address(host, server.server_port)}/metrics"
        if as_json:
            write_json({"url": url})
            sys.stdout.flush()
        else:
            click.echo(url)
        stop.wait()
    finally:
        server.shutdown()
        server.server_close()


VERDICTS = [str(verdict) for verdict in Verdict if verdict not in (Verdict.STOPPED, Verdict.RECOVERING)]  # of an engine that is seen
STATES = ("stopped", "recovering", "running", "read_only", "degraded")
# Powers of two of 1.024 us up to 17 s: each is the bound of a bucket in shared memory, so the counts are exact.
DURATION_BUCKETS = range(15, 400, 16)
SIZE_BUCKETS = range(6, 23)  # up to 127 bytes, 255 ... 8 MiB - 1


class Exposition:
    """Collects a store's metrics for prometheus_client; several threads may scrape at the same time."""

    def __init__(self, root: Path, settings: dict[str, str]) -> None:
        self._root = root
        self._settings = settings
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def text(self) -> str:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry).decode()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape; the bytes of names that are not UTF-8 are escaped."""
        for metric in self._collect():
            metric.samples = [sample._replace(labels={name: value.encode(errors="backslashreplace").decode()
                                                      for name, value in sample.labels.items()}) for sample in metric.samples]
            yield metric

    def _collect(self) -> Iterator[Metric]:
        live = live_status(self._root)
        yield _gauge("pyengine_up", "1 while an engine runs on the store and its counters can be read.", int(live is not None))
        yield from _disk(self._root)
        yield from self._groups()
        if live is None:
            return
        document, figures = live
        yield from _engine(document)
        yield from _workers(document["workers"])
        if document["replication"] is not None:
            yield from _replication(document["replication"])
        broker = document["broker"]  # by its names in routes: of one name one broker must take puts, and only one
        yield _by(("cluster", "broker", "id"), "pyengine_broker_takes_puts", "1 while the gateway's broker takes puts.",
                  [] if broker is None else [((broker["cluster"], broker["name"], str(broker["number"])), int(document["takes_puts"]))])
        yield _by(("group", "topic"), "pyengine_group_in_flight_messages", "Messages that clients have popped and not acknowledged.",
                  (((one["group"], one["topic"]), one["in_flight"]) for one in document["pops"]))
        yield _by("address", "pyengine_name_server_registered", "1 while the gateway's broker is registered with the name server.",
                  ((one["address"], int(one["registered"])) for one in document["name_servers"]))
        if figures is not None:
            yield from _figures(figures)
            yield from _topics(figures)

    def health(self) -> tuple[bool, str]:
        """Return whether a process of the store's engine lives, also while it recovers or is in trouble, and a sentence."""
        live = live_status(self._root)
        if live is not None:
            return True, _sentence(live[0])
        try:
            living = living_kinds(self._root)
        except DiskError as error:
            return False, str(error)
        if not living:
            return False, "stopped: no engine runs"
        return True, "its counters cannot be seen: it recovers, starts or stops"

    def readiness(self) -> tuple[bool, str]:
        """Return whether the store takes puts and every process that they need works, and a sentence with the reason."""
        live = live_status(self._root)
        if live is None:
            return False, self.health()[1]
        document = live[0]
        try:
            if document["broker"] is None:  # a gateway's clients need no file
                load_config(self._root, self._settings)
        except ConfigError as error:
            return False, f"no program can connect: {error}"
        if Verdict(document["verdict"]).is_trouble or document["takes_puts"]:
            return document["takes_puts"] and not Verdict(document["verdict"]).is_trouble, _sentence(document)
        if document["role"] == SLAVE:
            return False, f"a SLAVE takes no puts; {_sentence(document)}"
        return False, f"it takes no puts now; {_sentence(document)}"

    def _groups(self) -> Iterator[Metric]:
        """Yield the next offset and the lag of each consumer group."""
        next_offsets: list[tuple[Labels, float]] = []
        lags: list[tuple[Labels, float]] = []
        with contextlib.suppress(EngineError):  # the store cannot be read now; the other metrics are still valid
            if groups := ConsumerOffsets(self._root).groups():
                with LiveStoreReader(self._root, None, **keywords(self._settings)) as reader:
                    queue_range = functools.cache(reader.queue_range)  # a queue has many groups
                    for (topic, group), offsets in sorted(groups.items()):
                        for queue_id, offset in sorted(offsets.items()):
                            values = (group, topic, str(queue_id))
                            next_offsets.append((values, offset))
                            lags.append((values, max(0, queue_range(topic, queue_id)[1] - offset)))
        labels = ("group", "topic", "queue_id")
        yield _by(labels, "pyengine_group_next_offset", "Queue offset that the group reads next.", next_offsets)
        yield _by(labels, "pyengine_group_lag_messages", "Messages in the queue that the group has not read.", lags)


def serve(exposition: Exposition, host: str, port: int) -> WSGIServer:
    """Serve `/metrics`, `/healthz` and `/readyz` in threads; return the server (`server_port`, shutdown(), server_close()).

    OSError if it cannot listen there."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    server_class: type[_Server] = type("_ServerOfFamily", (_Server,), {"address_family": family})
    server = make_server(str(address[0]), port, _application(exposition), server_class, _Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


CONNECTIONS_MAX = 64         # each has a thread
REQUEST_S, ANSWER_S = 5.0, 30.0  # how long a connection has for its request, and from there for its answer
REQUEST_BYTES_MAX = 16 << 10


class _Server(ThreadingMixIn, WSGIServer):
    """Answers beside clients that are silent, slow or many: the one whose time is over first, a silent one, makes room for a new one.

    A connection is ended by a shutdown of its socket, with which the thread that reads or writes there ends.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._open: dict[socket.socket, float] = {}  # until when each connection may be open
        self._lock = threading.Lock()
        self._open_max = max(4, min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        super().__init__(*arguments, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= self._open_max:
                self._end(min(self._open, key=self._open.__getitem__))
            self._open[request] = time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End the connections that are late; serve_forever() calls it twice a second."""
        now_s = time.monotonic()
        with self._lock:
            for request in [request for request, until_s in self._open.items() if now_s >= until_s]:
                self._end(request)

    def has_asked(self, request: socket.socket) -> None:
        """Note that the connection's request has been read."""
        with self._lock:
            if request in self._open:
                self._open[request] = time.monotonic() + ANSWER_S

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone is no error
            super().handle_error(request, client_address)

    def _end(self, request: socket.socket) -> None:
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """The bytes of a request, of which no more than REQUEST_BYTES_MAX are read."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = REQUEST_BYTES_MAX

    def readline(self, size: int = -1) -> bytes:
        line = self._file.readline(self._left if size < 0 else min(size, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(WSGIRequestHandler):
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile = _Bounded(self.rfile)  # type: ignore[assignment]  # only readline() and close() are used

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.server.has_asked(self.request)
        return is_whole

    def log_message(self, format: str, *args: object) -> None:
        pass


def _application(exposition: Exposition) -> WSGIApplication:
    scrape: WSGIApplication = make_wsgi_app(exposition.registry)
    checks = {"/healthz": exposition.health, "/readyz": exposition.readiness}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return scrape(environ, start_response)
        if path not in checks:
            status, text = "404 Not Found", f"nothing is here: ask for /metrics, {' or '.join(checks)}"
        elif environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "use GET or HEAD"
        else:
            good, text = checks[path]()
            status = "200 OK" if good else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [f"{text}\n".encode(errors="backslashreplace")]

    return answer


def _sentence(document: dict[str, Any]) -> str:
    return f"{document['verdict']}: {document['summary']}"


_counter, _gauge = CounterMetricFamily, GaugeMetricFamily


def _by(label: str | Labels, name: str, text: str, values: Iterable[tuple[str | Labels, float | None]], *, counts: bool = False) -> Metric:
    """Return a gauge, or a counter if it `counts`, with a value for each value of the label, or labels; None leaves one out."""
    labels = (label,) if isinstance(label, str) else label
    metric: CounterMetricFamily | GaugeMetricFamily = (CounterMetricFamily if counts else GaugeMetricFamily)(name, text, labels=labels)
    for one, value in values:
        if value is not None:
            metric.add_metric((one,) if isinstance(one, str) else one, value)
    return metric


def _disk(root: Path) -> Iterator[Metric]:
    paths = StorePaths(root)
    yield _by("folder", "pyengine_disk_used_ratio", "How full the disk below a folder is, 0 to 1; for a log on several the least full, "
              "which takes new segments.", ((paths.commit_log.name, used_ratio(measure_log(root).folder)),
                                            (paths.consume_queue.name, used_ratio(paths.consume_queue))))


def _engine(document: dict[str, Any]) -> Iterator[Metric]:
    yield InfoMetricFamily("pyengine", "The engine.", value={
        "version": pyengine.__version__, "mode": document["mode"], "role": document["role"], "store": document["store"],
        "store_uuid": document["store_uuid"]})
    yield _by("state", "pyengine_state", "1 for the state that the store is in.",
              ((state, int(state == document["state"])) for state in STATES))
    yield _by("verdict", "pyengine_verdict", "1 for the word that `pyengine status` leads with.",
              ((word, int(word == document["verdict"])) for word in VERDICTS))
    yield _gauge("pyengine_read_only", "1 while puts are refused because the store or its disk is in trouble.",
                 int(document["read_only"]))
    yield _gauge("pyengine_start_time_seconds", "When the engine came up, since the epoch.", document["created_ms"] / 1000)
    yield _gauge("pyengine_sessions", "Producers that have a session.", document["sessions"])
    yield _by("position", "pyengine_position_bytes", "Physical offsets in the commit log.", document["positions"].items())
    for name, text in (("undrained", "Written to the pool and not yet to the files."),
                       ("unflushed", "Written and not yet durable."),
                       ("dispatch_lag", "Committed and not yet in queues and index.")):
        yield _gauge(f"pyengine_{name}_bytes", text, document[f"{name}_bytes"])
    yield _gauge("pyengine_clock_back_seconds", "Largest step back of the clock that the writer saw.",
                 document["clock_back_ms"] / 1000)
    yield _by("level", "pyengine_schedule_pending_messages", "Delayed messages that wait, by delay level.",
              ((level, one["pending"]) for level, one in document["schedule_message_offset"].items()))


def _replication(replication: dict[str, Any]) -> Iterator[Metric]:
    """Yield the metrics of a slave's link, or of a master's links."""
    if replication["linked"] is None:
        yield _gauge("pyengine_slaves_connected", "Slaves that have reported their position.", replication["slaves_connected"])
        yield _gauge("pyengine_unconfirmed_bytes", "Committed and not yet confirmed by slaves.", replication["unconfirmed_bytes"])
    else:
        yield _gauge("pyengine_master_linked", "1 while the master's bytes arrive and agree with the own ones.",
                     int(replication["linked"]))
        yield _gauge("pyengine_master_end_bytes", "Last known end of the master's log; 0 if unknown.",
                     replication["master_end"] or 0)
        if replication["master_lag_s"] is not None:
            yield _gauge("pyengine_master_lag_seconds", "Age of the newest message here while the master has more, else 0.",
                         replication["master_lag_s"])
    for name, text in (("connections", "Connections taken or made."), ("refused", "Connections refused, or tries that failed."),
                       ("closed", "Connections that ended for a reason.")):
        if name in replication:
            yield _counter(f"pyengine_links_{name}", text, replication[name])
    links = replication["links"]
    yield _by("address", "pyengine_link_lag_bytes", "Committed here and not acknowledged on the link.",
              ((link["address"], link["lag_bytes"]) for link in links))
    yield _by("address", "pyengine_link_lag_seconds", "Since the slave had all that was committed here; 0 while it has.",
              ((link["address"], link["lag_s"]) for link in links))
    yield _by("address", "pyengine_link_bytes", "Bytes sent or received on the link.",
              ((link["address"], link["bytes"]) for link in links), counts=True)


def _workers(workers: Sequence[dict[str, Any]]) -> Iterator[Metric]:
    yield _by("kind", "pyengine_worker_up", "1 while the worker is ready.",
              ((one["kind"], int(one["state"] == "ready")) for one in workers))
    yield _by("kind", "pyengine_worker_heartbeat_age_seconds", "Since the worker's last sign of progress.",
              ((one["kind"], None if one["heartbeat_age_ms"] is None else one["heartbeat_age_ms"] / 1000) for one in workers))
    yield _by("kind", "pyengine_worker_restarts", "Restarts of a dead worker.",
              ((one["kind"], one["restarts"]) for one in workers), counts=True)
    yield _by("kind", "pyengine_worker_errors", "Failures that the worker lived through.",
              ((one["kind"], one["errors"]) for one in workers), counts=True)


def _figures(figures: Statistics) -> Iterator[Metric]:
    yield _counter("pyengine_put_messages", "Messages stored.", figures.put_messages)
    yield _counter("pyengine_put_bytes", "Bytes of their records in the log.", figures.put_bytes)
    yield _counter("pyengine_puts", "Puts answered PUT_OK; one of many messages counts once.", figures.put_entries)
    yield _counter("pyengine_put_passes", "Rounds of the writer with puts in them.", figures.put_passes)
    yield _by("status", "pyengine_refused_puts", "Puts that the writer refused.",
              ((status.name, figures.refused.get(status.name, 0)) for status in PutStatus if status is not PutStatus.PUT_OK), counts=True)
    yield _durations("pyengine_put_duration_seconds", "From a put's submission to the writer's answer.",
                     figures.histograms["put"])
    yield _sizes(figures)
    yield _durations("pyengine_sync_duration_seconds", "Of each fdatasync of the log.", figures.histograms["sync"])
    yield _durations("pyengine_dispatch_lag_seconds", "From a message's store time to its visibility, by batch.",
                     figures.histograms["lag"])
    yield _counter("pyengine_dispatched_messages", "Records passed on to queues and index.", figures.dispatched)
    yield _counter("pyengine_dispatched_queue_entries", "Queue entries written.", figures.dispatch_entries)
    yield _counter("pyengine_dispatched_index_keys", "Keys put into the index.", figures.dispatch_keys)
    yield _counter("pyengine_out_of_order_queue_entries", "Queue entries from beyond their queue's end.",
                   figures.dispatch_out_of_order)
    yield _gauge("pyengine_dispatch_lag_max_bytes", "Most that was found committed and not dispatched.",
                 figures.dispatch_lag_max_bytes)


def _topics(figures: Statistics) -> Iterator[Metric]:
    topics = sorted(figures.topics.items())
    yield _by("topic", "pyengine_topic_messages", "Messages that entered the topic's queues.",
              ((topic, count.messages) for topic, count in topics), counts=True)
    yield _by("topic", "pyengine_topic_bytes", "Bytes of their records in the log.",
              ((topic, count.size_bytes) for topic, count in topics), counts=True)
    yield _counter("pyengine_other_topics_messages", "Messages of the topics that are not counted one by one.",
                   figures.other_topics.messages)


def _durations(name: str, text: str, latency: Latency) -> Metric:
    """Return a histogram of durations; its count is the sum of the buckets, so that both agree while the engine counts."""
    bounds, buckets, passed, at = store_stats.bounds_ns(), [], 0, 0
    for last in DURATION_BUCKETS:
        passed += sum(latency.buckets[at:last + 1])
        at = last + 1
        buckets.append((repr(bounds[last] / 1e9), passed))
    buckets.append(("+Inf", passed + sum(latency.buckets[at:])))
    metric = HistogramMetricFamily(name, text)
    metric.add_metric((), buckets, latency.sum_ns / 1e9)
    return metric


def _sizes(figures: Statistics) -> Metric:
    """Return the histogram of record sizes; for an entry with many records, each counts with their mean size."""
    buckets = [(str((2 << last) - 1), sum(figures.put_sizes[:last + 1])) for last in SIZE_BUCKETS]
    metric = HistogramMetricFamily("pyengine_put_size_bytes", "Size of a message's record in the log.")
    metric.add_metric((), [*buckets, ("+Inf", sum(figures.put_sizes))], figures.put_bytes)
    return metric
