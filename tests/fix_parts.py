"""An engine in parts: the test's process owns the store and serves sessions, real workers do the rest."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from fix_owner import Owner, owners_below
from pyengine.client.producer import Producer
from pyengine.engine_config import EngineConfig
from pyengine.ipc import shared_objects
from pyengine.ipc.session_client import open_session
from pyengine.ipc.sessions import Sessions, SessionServer
from pyengine.native import control as native
from pyengine.native.writer import format_queue_table, queue_table_bytes, view_queue_table

QUEUE_SLOTS = 1024
MODES: dict[str, dict[str, int]] = {"async": {}, "sync": {"mode": native.MODE_SYNC}, "pool": {"mode": native.MODE_POOL, "pool_buffers": 3}}
MODULES = {kind: f"pyengine.workers.{name}" for kind, name in (
    (native.ALLOCATOR, "allocator"), (native.WRITER, "writer"), (native.FLUSHER, "flusher"), (native.COMMITTER, "committer"),
    (native.REPUTTER, "reputter"))}


class Parts:
    """Owner, session server in a thread, and the workers that a put needs in this mode."""

    def __init__(self, owner: Owner, more: tuple[int, ...] = (), environments: Mapping[int, dict[str, str]] | None = None) -> None:
        self.owner = owner
        self.environments = environments or {}
        self.control = owner.control
        identity = owner.memory.identity
        table = owner.folder.create(shared_objects.queues_name(1), queue_table_bytes(QUEUE_SLOTS))
        format_queue_table(view_queue_table(table.memory), QUEUE_SLOTS, 1)
        table.close()
        for slot in owner.control.slots:
            slot.queue_table_generation = 1
        for number in range(identity.pool_buffers):
            owner.folder.create(shared_objects.pool_name(number), identity.segment_bytes).close()
        for buffer in owner.control.pool:
            buffer.segment_base = -1
        (owner.root / "commitlog").mkdir()
        owner.position(0, ready_end=0)
        owner.publish()
        self.selector = selectors.DefaultSelector()
        self.server = SessionServer(owner.memory, self.selector, Sessions(owner.memory))
        self.running = True
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()
        self.workers = {}
        kinds = [native.ALLOCATOR, native.FLUSHER, native.WRITER]
        if identity.mode == native.MODE_POOL:
            kinds.append(native.COMMITTER)
        try:
            for kind in [*kinds, *more]:
                self.start(kind)
        except BaseException:  # the thread has to end before the owner unmaps what it looks at
            self.close()
            raise

    def loop(self) -> None:
        while self.running:
            for key, _ in self.selector.select(0.02):
                key.data()
            self.server.tick()

    def start(self, kind: int) -> None:
        incarnation = native.load(self.owner.worker(kind), "incarnation") + 1
        self.owner.environment, before = self.environments.get(kind, self.owner.environment), self.owner.environment
        self.workers[kind] = self.owner.spawn(MODULES[kind])
        self.owner.environment = before
        self.owner.wait_ready(kind, incarnation)

    def kill(self, kind: int) -> None:
        self.workers[kind].kill()
        self.workers[kind].wait()

    def producer(self, *, refusals: str = "return", **settings) -> Producer:
        """Return a new producer; `settings` are the engine's, as it knows them."""
        return Producer(lambda limit_s: open_session(self.owner.root), EngineConfig(**settings), refusals=refusals)

    def log(self) -> bytes:
        files = sorted((self.owner.root / "commitlog").iterdir())
        return b"".join(path.read_bytes() for path in files)

    def close(self) -> None:
        self.running = False
        self.thread.join()
        self.server.close()
        self.selector.close()


@pytest.fixture
def make_parts(make_owner):
    """make_parts(**identity) -> Parts, running; `more`: further kinds, `environments`: by kind, other than the test's own."""
    yield from _parts_of(make_owner)


@pytest.fixture(scope="module")
def shared_parts(tmp_path_factory):
    """Parts for the tests of a module that leave them as they were, whatever is in the log."""
    with contextmanager(owners_below)(tmp_path_factory.mktemp("shared")) as make_owner, contextmanager(_parts_of)(make_owner) as make:
        yield make(session_ring_bytes_default=1 << 20)


def _parts_of(make_owner: Callable[..., Owner]) -> Iterator[Callable[..., Parts]]:
    made = []

    def make(more: tuple[int, ...] = (), environments: Mapping[int, dict[str, str]] | None = None, **identity) -> Parts:
        identity.setdefault("session_ring_bytes_default", 65536)
        identity.setdefault("os_page_cache_busy_timeout_ms", 60_000)  # the machine may keep a writer off its processor
        made.append(Parts(make_owner(f"store{len(made)}", **identity), more, environments))
        return made[-1]

    yield make
    for parts in made:
        parts.close()
