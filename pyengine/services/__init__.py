"""What RocketMQ calls ServiceThreads: decide and act, no process handling.

A service is driven by its worker (pyengine/engine/worker.py):

    while service.work(): ...    one round; True: there may be more, go round at once
    arm the latch
    service.work() once more     what was published before arming rang no bell
    sleep at most service.pause_s()

and, on the way out, `drain()` until it is False, then `close()`. Services are built on
ipc and storage, so a test drives them in its own process. A service that can be kept from its
work says by what in `obstacle`, for `status`; "" when nothing does. It is looked at when there is nothing to do, and,
of a service with `never_idle`, after each round.
"""

from __future__ import annotations

from typing import Protocol


class Service(Protocol):
    """One worker's work."""

    def work(self) -> bool:
        """One bounded round; True when there may be more to do at once."""

    def pause_s(self) -> float:
        """Longest sleep until the next round, in seconds; a wake-up ends it."""

    def drain(self) -> bool:
        """One round of an orderly stop; True until everything published before is done."""

    def close(self) -> None:
        """Give back descriptors and mappings; nothing is written."""
