"""For the tests of programs that use pyengine: an engine in memory, messages without a store, and a pytest plugin.

    with pyengine.testing.ephemeral_store() as engine: ...          # a new store and its engine, gone at the end
    pyengine.testing.make_message("orders", b"one apple")           # what a handler gets

pytest finds the plugin by itself. Its fixtures are

    pyengine_engine   one engine for the whole session, started when a test first wants it
    pyengine_store    the path of that engine's store
    pyengine_topic    a topic of the test's own in it, so that tests do not see each other's messages
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Unpack

from pyengine.client.outgoing import RefusedError, properties_text, topic_bytes
from pyengine.engine.embedded import Engine
from pyengine.engine_config import EngineSettings, keywords
from pyengine.errors import UsageError
from pyengine.formats.record import Message, body_crc, record_size
from pyengine.storage.config import check_keywords, from_environment

__all__ = ["ephemeral_store", "make_message"]

try:
    import pytest
except ImportError:  # unittest, doctest and scripts use the rest
    pytest = None  # type: ignore[assignment]

SMALL_FILES: EngineSettings = {
    "mapped_file_size_commit_log_bytes": 1 << 20, "mapped_file_size_consume_queue_bytes": 6000, "max_hash_slot_num": 1000,
    "max_index_num": 4000, "max_message_size_bytes": 256 << 10}
"""The sizes of an ephemeral store: 2 MB for a few messages, and files that end soon enough for a test to see the next.

Those that the environment sets are taken from there: it is what clients compare a store with.
"""

MEMORY = Path("/dev/shm")
EMPTY_S = 60.0  # after which the maker of an empty folder has locked it, or is dead
ROOM_BYTES = 64 << 20  # a container often has this much there for everything
_PREFIX = "pyengine-testing-"
_numbers = itertools.count()


@contextlib.contextmanager
def ephemeral_store(**settings: Unpack[EngineSettings]) -> Iterator[Engine]:
    """Run an engine on a new store in memory inside the block.

    `engine.path` is the store. The folder of a killed program goes with the next one.
    """
    check_keywords(ephemeral_store, settings)
    chosen = {name: value for name, value in SMALL_FILES.items() if name not in from_environment(os.environ)} | settings
    with _folder() as folder, Engine(folder / "store", **keywords(chosen)) as engine:
        yield engine


def make_message(
    topic: str = "topic", body: bytes = b"", *, tags: str | None = None, keys: str | Iterable[str] | None = None,
    properties: Mapping[str, str] | None = None, queue_id: int = 0, queue_offset: int = 0, physical_offset: int = 0,
    flag: int = 0, store_timestamp_ms: int | None = None, reconsume_times: int = 0,
) -> Message:
    """Return a message as a consumer gets it, or raise UsageError."""
    try:
        topic_bytes(topic)
        text = properties_text(tags, keys, properties)
    except RefusedError as refused:
        raise UsageError(refused.reason) from None
    stored_ms = time.time_ns() // 1_000_000 if store_timestamp_ms is None else store_timestamp_ms
    return Message(
        topic, body, queue_id, queue_offset, physical_offset, record_size(len(body), len(topic.encode()), len(text.encode())), text,
        flag, born_timestamp_ms=stored_ms, store_timestamp_ms=stored_ms, reconsume_times=reconsume_times, body_crc=body_crc(body))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder in memory, or where temporary files are, that is locked as long as the block runs; then remove it."""
    parent = MEMORY if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES else Path(tempfile.gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        _remove_unused(left)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # which others leave alone while it is empty
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    """Remove a folder of this user that no process has locked; not a new one that is empty, which its maker is about to lock."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            is_used = os.listdir(descriptor) or time.time() - status.st_ctime > EMPTY_S
            if status.st_uid == os.geteuid() and is_used:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


if pytest is not None:

    @pytest.fixture(scope="session")
    def pyengine_engine() -> Iterator[Engine]:
        """An engine on an ephemeral store, one for the whole session."""
        with ephemeral_store() as engine:
            yield engine

    @pytest.fixture(scope="session")
    def pyengine_store(pyengine_engine: Engine) -> Path:
        """The path of the session's store, for pyengine.connect, consume and open_store."""
        return pyengine_engine.path

    @pytest.fixture
    def pyengine_topic(request: pytest.FixtureRequest) -> str:
        """A topic that no other test of the session has."""
        return f"{re.sub(r'[^A-Za-z0-9_-]', '-', request.node.name)[:80]}-{next(_numbers)}"
