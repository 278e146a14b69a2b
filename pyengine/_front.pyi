"""pyengine._front (csrc/front): puts and gets of single messages, in C."""

from collections.abc import Callable, Collection
from typing import Any, Self

from typing_extensions import Buffer

from pyengine.client.outgoing import QueueChoice
from pyengine.client.submission import Submitter
from pyengine.formats.record import Message

class Result:
    """The fields of a PutResult, whose types are there."""

    def __new__(cls, answer: tuple[int, ...], topic: str, queue_id: int, store_host: bytes, reason: str, indeterminate: bool,
                msg_id: str, /) -> Self: ...
    @property
    def _status(self) -> int: ...
    @property
    def _store_host(self) -> bytes: ...
    @property
    def _msg_id(self) -> str: ...
    @property
    def _answer(self) -> tuple[int, ...]: ...
    def __bool__(self) -> bool: ...

class Lock:
    """A lock for `with`, which C takes too. Leaving one that is not held is RuntimeError."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
    def locked(self) -> bool: ...

class PendingPut:
    """The methods of a concurrent.futures.Future for one put."""

    def _watch(self) -> None:
        """Give it the fields of a Future, for callbacks and wait()."""
    def _wait(self, slice_ns: int, /) -> bool:
        """Wait for at most a slice; return whether the result is there."""
    def _await(self, deadline_ns: int, /) -> Any:
        """Return the result, whatever its status; an indeterminate one if the writer has not answered by then."""
    def _resolve(self, result: object, /) -> None:
        """End a put that was not submitted with this result; ValueError if it was."""

    _raises: bool
    @property
    def _has_answer(self) -> bool: ...
    @property
    def _is_watched(self) -> bool: ...
    @property
    def _waits(self) -> int: ...
    @property
    def _given(self) -> object:
        """The result, whatever its status; None until it is there."""
    @property
    def _owner(self) -> Any:
        """What was given to its SessionFront; None before it is submitted and once the result is there."""

class SessionFront:
    """One session, and the futures that wait for its answers."""

    give_up_ns: int
    patience_ns: int
    def __new__(cls, producer: int, calls: int, producer_owner: object, owner: object, result_type: type[Result], store_host: bytes,
                /) -> Self: ...
    @property
    def waiting(self) -> int: ...
    @property
    def has_open(self) -> bool: ...
    def end(self) -> None: ...
    def take_answers(self) -> None: ...
    def assign(self, future: PendingPut, sequence: int, kind: int, topic: str, queue_id: int, how: int, submitted_ns: int,
               context: object, /) -> None:
        """Give a submitted entry to a future. `context`: what the owner needs beside these to make the result, or None."""
    def forget(self) -> None: ...

class Turn:
    """The queues of a topic in turn: `queues` of them, a number that is read again at `until_ns`."""

    queues: int
    next: int
    until_ns: int
    def take(self) -> int: ...

class SubmitterFront:
    """The base of Submitter: the session that is put to now."""

    lock: Lock
    front: SessionFront | None
    queued_puts: Collection[object]
    body_bytes_max: int
    payload_bytes_max: int
    waits: int
    raises: bool
    sessions: int

class ProducerFront:
    """The base of Producer: ordinary puts, in C; Producer makes all others."""

    def __init__(self, puts: SubmitterFront, /) -> None: ...
    @property
    def _puts(self) -> Submitter: ...
    @property
    def _prefixes(self) -> dict[tuple[str, int, str | None, int], bytes]: ...
    @property
    def _turns(self) -> dict[str, Turn]: ...
    _choice: QueueChoice | None
    def _follow(self) -> None: ...

def use_message(message: type[Message], decode_host: Callable[[bytes], str], /) -> None:
    """Set the class of the messages that read_queue returns, and the function that decodes their hosts."""

def read_queue(
    entries: Buffer, first: int, end: int, offset: int, messages_max: int, topic: str, queue_id: int,
    limits: tuple[int, int, int, int, int, int], codes: Buffer, tags: Collection[str] | None,
    find_segment: Callable[[int], tuple[int, int, Buffer | None]], find_code: Callable[[int], int | None],
    belongs: Callable[[Message, str, int], bool], /,
) -> tuple[int, list[Message], list[int], int]:
    """Return the messages of the queue entries in [first, end) of a file, the first of which has the queue offset `offset`.

    The result: (GetStatus, messages, their queue offsets, entries passed).

    `limits`: the log's end, how many bytes before it are assumed to be
    in memory, and bytes and messages of one answer from memory and from disk. `tags` are wanted and `codes` their hashes as
    32-bit numbers; None: all. `find_segment(physical offset)` gives start, end and bytes of a segment, None if it does
    not exist; `find_code` gives the tags code at an address of the extension, None if it does not exist; `belongs` tells whether
    a record of another topic or queue belongs to this queue too.
    """

def read_records(
    entries: Buffer, first: int, end: int, offset: int, messages_max: int, topic: str, queue_id: int,
    limits: tuple[int, int, int, int, int, int], codes: Buffer, tags: Collection[str] | None,
    find_segment: Callable[[int], tuple[int, int, Buffer | None]], find_code: Callable[[int], int | None],
    belongs: Callable[[Message, str, int], bool], /,
) -> tuple[int, bytes, int, int, int]:
    """Return the messages of read_queue as records of the log: (GetStatus, records end to end, their count, entries passed,
    physical offset of the first)."""

def use_futures(put_future: type[PendingPut], future: type[Any], /) -> None: ...
