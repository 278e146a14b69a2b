"""Work that goes on by itself in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Work = TypeVar("Work", bound="asyncio.Future[Any]")


class Tasks(set["asyncio.Task[None]"]):
    """Pieces of work, each until its end."""

    def begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.follow(task)
        return task

    def follow(self, task: asyncio.Task[Any] | None) -> None:
        """Have it among them until its end."""
        if task is not None:
            self.add(task)
            task.add_done_callback(self.discard)


class Pending(dict[Key, Work]):
    """Work by keys, until its end: each key has one at a time."""

    def once(self, key: Key, begin: Callable[[], Work]) -> Work:
        """Return a key's work, which is begun if there is none. Those who share it shield it, and get its failure."""
        found = self.get(key)
        if found is None:
            found = self[key] = begin()
            found.add_done_callback(lambda done: (self.pop(key, None), done.cancelled() or done.exception()))
        return found
