"""The list of acknowledged messages that `pyengine ingest --acked FILE` keeps and `pyengine check --acked FILE` reads.

One JSON object a line: topic, queue_id, queue_offset, physical_offset (null where the answer does not
tell it: of a put_many only the first message's is known) and body_sha256. A message stands in it only
after it was acknowledged with PUT_OK. Several processes may append to one file: their lines do not mix.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from types import TracebackType

from pyengine.errors import DiskError, UsageError
from pyengine.results import PutManyResult, PutResult

ROWS_AT_ONCE = 1024


class AckedList:
    """Appends to the file at `path`, made if need be; UsageError when it cannot be opened. `write` or leave the block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"cannot write the list of acknowledged messages {path}: {error.strerror}") from error
        self._path = path
        self._rows: list[bytes] = []

    def add(self, result: PutResult | PutManyResult, bodies: Sequence[bytes]) -> None:
        """Note the messages of one answer; nothing if it is not PUT_OK."""
        if not result.ok:
            return
        if isinstance(result, PutManyResult):
            first, places = result.first_queue_offset, [result.first_physical_offset, *[None] * (len(bodies) - 1)]
        else:
            first, places = result.queue_offset, [result.physical_offset]
        for number, (body, place) in enumerate(zip(bodies, places, strict=True)):
            row = {"topic": result.topic, "queue_id": result.queue_id, "queue_offset": first + number,
                   "physical_offset": place, "body_sha256": hashlib.sha256(body).hexdigest()}
            self._rows.append(json.dumps(row).encode() + b"\n")
        if len(self._rows) >= ROWS_AT_ONCE:
            self.write()

    def write(self) -> None:
        """Hand what was noted to the kernel, in one write(2) if it takes all."""
        rest, self._rows = b"".join(self._rows), []
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest):]
        except OSError as error:
            raise DiskError(f"cannot write the list of acknowledged messages {self._path}: {error.strerror}",
                            errno=error.errno or 0, path=str(self._path)) from error

    def __enter__(self) -> AckedList:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        finally:
            os.close(self._descriptor)
