"""The gateway in front of a store, and RocketMQ's broker on the same files."""

from __future__ import annotations

from pyengine.engine_config import EngineConfig
from shapes import Picture

SIZE = (760, 320)
ALT = """Left: unchanged RocketMQ clients speak to the gateway, which is name server and broker, and Python programs and Spark
use the same store. Right: after pyengine stop RocketMQ's own broker opens the same directory, and the clients go on with the
same ports, topics, groups and offsets. The way back is the same."""


def draw(p: Picture) -> None:
    config = EngineConfig()
    ports = f"ports {config.gateway_namesrv_port}, {config.gateway_broker_port}"
    p.rect(16, 16, 340, 206, "paper", edge="grey_edge", radius=6)
    p.text(28, 38, "pyengine start", bold=True, mono=True)
    clients = p.box(28, 56, 140, 48, "RocketMQ's clients", "Java, Go, ...", fill="yellow")
    gateway = p.box(204, 56, 140, 48, "gateway", ports, fill="green")
    programs = p.box(28, 150, 140, 48, "Python, Spark", "on this host", fill="blue")
    engine = p.box(204, 150, 140, 48, "engine", "writer, flusher, ...", fill="green")
    p.line(clients.right, gateway.left, head=True)
    p.line(programs.right, engine.left, head=True)
    p.line(gateway.bottom, engine.top, head=True)
    p.rect(404, 16, 340, 206, "paper", edge="grey_edge", radius=6)
    p.text(416, 38, "after pyengine stop", bold=True)
    same = p.box(416, 56, 140, 48, "the same clients", "unchanged", fill="yellow")
    broker = p.box(592, 56, 140, 142, "RocketMQ 4.9", "name server", "and broker", "on the same ports", fill="purple")
    p.line(same.right, (592, 80), head=True)
    store = p.box(180, 252, 400, 52, "one store", "topics, groups, offsets, delayed messages, keys, transactions", fill="grey")
    p.line(engine.bottom, (274, store.top[1]), head=True)
    p.line((broker.x + 70, 198), (662, 278), store.right, head=True)
    p.line((358, 120), (402, 120), head=True)
    p.line((402, 140), (358, 140), head=True)
