"""Checks of arguments: a wrong type is TypeError, a wrong value UsageError, in a sentence that names the argument.

The public functions check first, so that the wrong call itself raises the error, not a worker, a thread or a later message.
At the end: what objects of programs have in common at the end of a block and in a forked child.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from pyengine.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import asyncio
    from asyncio import AbstractEventLoop
    from concurrent.futures import Future

INT32_MIN, INT32_MAX = -(1 << 31), (1 << 31) - 1  # Java's int and long: of the files, the wire and the settings
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
EVERY_OFFSET = (INT64_MIN, INT64_MAX)  # the bounds of offsets that leave none out
FOLDER_NAME_BYTES_MAX = 255  # NAME_MAX of Linux
TIME_MS_MIN = 10 ** 11  # a smaller number than this, of March 1973, is a time in seconds; 0 is one that is over
TIME_MS_MAX = 10 ** 14  # a larger one, of the year 5138, is a time in micro- or nanoseconds
MOMENT = "a datetime with a time zone, or an int of milliseconds since 1970"

_Each = TypeVar("_Each")


def wrong_type(value: object, name: str, wanted: str) -> TypeError:
    """Return the error that says what `name` must be and what it is."""
    hint = ""
    if wanted == "str" and isinstance(value, (bytes, bytearray)):
        hint = ": decode it first, for example with .decode()"
    elif wanted == "a sequence of str" and isinstance(value, str):
        hint = f": give [{value!r}]"
    return TypeError(f"{name} must be {wanted}, not {type(value).__name__}{hint}")


def text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, name, "str")
    return value


def topic_name(value: object) -> str:
    """Return the name of a topic to read; UsageError for a name that no folder, and so no topic, can have."""
    name = text(value, "topic")
    if not is_folder_name(name):
        raise UsageError(f"the topic {name!r} cannot be a folder's name: give one of 1 to "
                         f"{FOLDER_NAME_BYTES_MAX} bytes that is not '.' or '..' and holds no '/'")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the topic {name!r} holds a lone surrogate: give it as valid text") from None
    return name


def is_folder_name(name: str) -> bool:
    """Whether a folder of the file system can have this name."""
    try:
        size_bytes = len(os.fsencode(name))
    except UnicodeEncodeError:
        return False
    return 0 < size_bytes <= FOLDER_NAME_BYTES_MAX and name not in (".", "..") and "/" not in name and "\0" not in name


def integer(value: object, name: str) -> int:
    """Return `value`, which must be an int or, like numpy's, be usable as one."""
    if not hasattr(value, "__index__"):
        raise wrong_type(value, name, "int")
    return value  # type: ignore[return-value]  # numpy's integers stay what they are


def number(value: object, name: str, low: float = 0) -> float:
    """Return `value`, which must be a number of at least `low`."""
    if not hasattr(value, "__float__") or isinstance(value, bool):
        raise wrong_type(value, name, "a number")
    found = value if isinstance(value, (int, float)) else float(value)  # of Decimal, which does not mix with floats
    if not found >= low:
        raise UsageError(f"{name} is {value}: give {f'{low:g} or more' if low > -math.inf else 'a number'}")
    return found


def moment_ms(value: object, name: str, wanted: str = MOMENT) -> int:
    """Return a time as ms since 1970; UsageError for seconds, micro- and nanoseconds, and for a datetime without a time zone."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise UsageError(f"{name} {value.isoformat()} has no time zone: give one, for example datetime.UTC")
        return round(value.timestamp() * 1000)
    if not hasattr(value, "__index__") or isinstance(value, bool):
        hints = {float: ": round it", timedelta: ": add it to datetime.now(UTC)"}
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}{hints.get(type(value), '')}")
    time_ms = value.__index__()
    if time_ms and not TIME_MS_MIN <= time_ms <= TIME_MS_MAX:
        others = wanted.replace(MOMENT, "").strip(", ")
        other = "seconds: multiply by 1000" if time_ms < TIME_MS_MIN else "micro- or nanoseconds: divide"
        raise UsageError(f"{name} is {time_ms}: it is a time in milliseconds since 1970, not in {other}, or give a datetime with a time "
                         f"zone{', ' * bool(others)}{others}")
    return int(time_ms)


def local_path(value: str | os.PathLike[str], name: str = "the path of the store") -> Path:
    """Return the path; UsageError for an empty text, which would mean the current directory, and for a URI."""
    given = os.fspath(value)
    if not given:
        raise UsageError(f"{name} is empty: give a directory (. for this one)")
    if isinstance(given, str) and "://" in given:
        raise UsageError(f"{name}, {given}, is a URI: give a directory of this host")
    return Path(given)


def truth(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(value, name, "bool")
    return value


def mapping(value: object, name: str) -> Mapping[Any, Any]:
    if not hasattr(value, "items"):
        raise wrong_type(value, name, "a mapping")
    return value  # type: ignore[return-value]  # what has items() will do


def known_keywords(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """TypeError, with the nearest name of `known`, for a keyword argument that `call` does not have."""
    for name in given:
        if name not in known:
            names = list(known)
            raise TypeError(f"{call}() has no argument {name!r}{did_you_mean(name, names) or ': it has ' + ', '.join(names)}")


def running_loop() -> AbstractEventLoop | None:
    """Return the event loop of asyncio that runs in this thread, if one does."""
    asyncio = sys.modules.get("asyncio")  # importing it takes 10 ms, and a program with an event loop has done that
    running = getattr(asyncio, "_get_running_loop", None)  # another thread may import it just now
    return None if running is None else running()


def event_loop() -> AbstractEventLoop:
    """Return the event loop that runs; UsageError in none of asyncio's."""
    loop = running_loop()
    if loop is None:
        raise UsageError("await works in an event loop of asyncio only: elsewhere call the blocking method in a thread, with trio by "
                         "trio.to_thread.run_sync")
    return loop


def several(value: Iterable[_Each], name: str, wanted: str) -> Iterable[_Each]:
    """Return `value`, which must be iterable; a text or bytes, which are iterable too, are a wrong type."""
    if isinstance(value, (str, bytes, bytearray, memoryview)) or not isinstance(value, Iterable):
        raise wrong_type(value, name, wanted)
    return value


def instance(value: object, name: str, kind: type[_Each]) -> _Each:
    if not isinstance(value, kind):
        raise wrong_type(value, name, f"a {kind.__name__}")
    return value


def one_or_several(value: _Each | Iterable[_Each], name: str, kind: type[_Each]) -> list[_Each]:
    """Return the one `kind`, or the several, as a list."""
    if isinstance(value, kind):
        return [value]
    wanted = f"a {kind.__name__} or an iterable of them"
    return [instance(each, f"each of {name}", kind) for each in several(cast("Iterable[_Each]", value), name, wanted)]


def queue_ids(queues: Iterable[int]) -> list[int]:
    """Return the queues that a program named, sorted; UsageError if there are none or one is not a queue id."""
    ids = sorted({integer(queue_id, "a queue id") for queue_id in several(queues, "queues", "a sequence of int")})
    if not ids:
        raise UsageError("queues is empty: name at least one, or leave it out for all")
    for one in (ids[0], ids[-1]):
        if not 0 <= one <= INT32_MAX:
            raise UsageError(f"{one} is not a queue id: give 0 to {INT32_MAX}")
    return ids


class Closing:
    """An object that closes at the end of a `with` block."""

    __slots__ = ()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncBlock:
    """`async with`, as `with` does it; the end runs in a thread, to its end also if the task is cancelled."""

    __slots__ = ()

    async def __aenter__(self: AbstractContextManager[_Each]) -> _Each:
        event_loop()  # without one the end of the block could not wait
        return self.__enter__()

    async def __aexit__(self: AbstractContextManager[object], *exception: Any) -> None:
        await in_thread(partial(self.__exit__, *exception))


class _Inherited(Protocol):
    def _forked(self) -> None: ...


_inherited: weakref.WeakSet[_Inherited] = weakref.WeakSet()


def after_fork(each: _Inherited) -> None:
    """Call its _forked() in each forked child, in no order, while it lives."""
    _inherited.add(each)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def inherited_lock() -> threading.RLock:
    """Return an RLock that a forked child finds free, since there no thread of the parent would give it back."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in [*_locks]:
        if not lock._is_owned():  # by the thread that forks, which goes on in the child
            lock._at_fork_reinit()
    for each in [*_inherited]:  # a list: one that another one drops here has its turn too
        each._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


def own_thread(call: Callable[[], _Each]) -> Future[_Each]:
    """Begin the call in a thread of its own: a program's own calls may hold all threads of its event loop. The interpreter waits for it."""
    from concurrent.futures import Future  # as of running_loop()
    from contextvars import copy_context

    called: Future[_Each] = Future()

    def run() -> None:
        try:
            called.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller's, who gets it
            called.set_exception(error)

    called.set_running_or_notify_cancel()
    try:
        threading.Thread(target=copy_context().run, args=(run,), name="pyengine-call", daemon=False).start()
    except RuntimeError:  # the interpreter ends, or has too many
        run()
    return called


def called(call: Callable[[], _Each]) -> asyncio.Future[_Each]:
    """Await what the call returns in a thread of its own, which goes on if the wait is cancelled."""
    import asyncio  # as of running_loop()

    loop = event_loop()
    return asyncio.wrap_future(own_thread(call), loop=loop)


async def in_thread(call: Callable[[], _Each], undo: Callable[[_Each], object] = lambda result: None) -> _Each:
    """Return what the call returns; if the task is cancelled meanwhile, once or more, wait for the end of the call and undo it."""
    import asyncio  # as of running_loop()

    async def ended(future: asyncio.Future[Any]) -> None:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # anyio cancels again in each turn of the loop
                await asyncio.wait({future})

    begun = called(call)
    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        await ended(begun)
        if begun.exception() is None:
            await ended(called(partial(undo, begun.result())))
        raise
