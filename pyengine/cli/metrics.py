"""`pyengine metrics`: the figures of a store for Prometheus, over HTTP or once, and its health."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli.options import existing_store, store_command
from pyengine.cli.output import write_json
from pyengine.errors import EngineError
from pyengine.storage.config import load_config

if TYPE_CHECKING:
    from pyengine.cli.exposition import Exposition

PORT = 9464


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{value}: give HOST:PORT, as in 127.0.0.1:{PORT} or [::1]:{PORT}", ctx, param)
    return host.strip("[]"), int(port)


def host_and_port(host: str, port: int) -> str:
    """HOST:PORT as the option takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_option(name: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An option HOST:PORT, as a pair; None if it is not given and has no default."""
    return click.option(name, callback=_address, metavar="HOST:PORT", **options)


@click.command()
@store_command
@address_option("--listen", default=f"127.0.0.1:{PORT}", show_default=True,
                help="Where to answer; port 0 takes a free one and says which.")
@click.option("--once", is_flag=True, help="Print the figures to stdout and end.")
def metrics(store: Path, settings: dict[str, str], as_json: bool, listen: tuple[str, int], once: bool) -> None:
    """Give an engine's figures to Prometheus: names, types and units by its rules.

    GET /metrics answers with the figures; /healthz with 200 while the engine is alive, /readyz
    while it takes puts, else with 503 and the reason; any other path with 404.

    Reads shared memory and asks no worker anything. Goes on while the engine is stopped
    or started again: pyengine_up tells. Answers this machine alone unless --listen says
    otherwise: each client that reaches the port can read the names of topics and groups.
    Ctrl-C or SIGTERM ends it, SIGHUP does not. With --json the figures of --once are one
    document, and the address is one otherwise.

    \b
    Examples:
      pyengine metrics STORE
      pyengine metrics STORE --listen 127.0.0.1:0
      pyengine metrics STORE --once > /var/lib/node_exporter/pyengine.prom
    """
    from pyengine.cli.exposition import Exposition

    load_config(existing_store(store), settings)  # a wrong setting is told now, not at the first scrape
    with Exposition(store, settings) as exposition:
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
    """Answer until SIGTERM; SIGHUP changes nothing, as with the engine, whose terminal may close. Signal handlers come back."""
    stop = threading.Event()
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: stop.set()),
              signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    try:
        _answer(exposition, host, port, stop, as_json=as_json)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _answer(exposition: Exposition, host: str, port: int, stop: threading.Event, *, as_json: bool) -> None:
    from pyengine.cli.exposition import serve

    try:
        server = serve(exposition, host, port)
    except OSError as error:
        raise EngineError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    try:
        url = f"http://{host_and_port(host, server.server_port)}/metrics"
        if as_json:
            write_json({"url": url})
            sys.stdout.flush()
        else:
            click.echo(url)
        stop.wait()
    finally:
        server.shutdown()
        server.server_close()
