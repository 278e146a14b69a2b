"""Whether work comes singly or in a stream; for the services behind the writer.

Single pieces of work are done at once: the latch is armed in between, and who puts rings it.
In a stream the service goes on by itself in naps, so that nobody has to ring, and steps
behind whoever puts (SCHED_BATCH: it takes a free CPU but interrupts nobody;
docs/decisions/0014).
"""

from __future__ import annotations

from pyengine.native import cpu, nap
from pyengine.native.flush import monotonic_ns

CLOSE_NS = 500_000   # work that follows the last within this time belongs to a stream
STREAM_ROUNDS = 8    # so many in a row make one


class StreamDetector:
    """Calm or busy. `nap_ns`: how long to gather in a stream; `quiet_ns`: it ends after so long without work."""

    def __init__(self, nap_ns: int, quiet_ns: int) -> None:
        self.nap_ns = nap_ns
        self.quiet_ns = quiet_ns
        self.busy = False
        self._rounds = 0
        self._last_ns = 0
        cpu.schedule_interactive()

    def worked(self, now_ns: int | None = None) -> None:
        """A piece of work was found and done."""
        if self.busy:
            return
        now_ns = monotonic_ns() if now_ns is None else now_ns
        self._rounds = self._rounds + 1 if now_ns - self._last_ns < CLOSE_NS else 0
        self._last_ns = now_ns
        if self._rounds >= STREAM_ROUNDS:
            self.busy = True
            cpu.schedule_batch()

    def next_is_there(self, position, value: int, *, behind: bool = False) -> bool:
        """In a stream: gather, then wait until the position is above `value`; False: there is no stream (any more).

        `behind`: there is much left to do, do not gather.
        """
        if not self.busy:
            return False
        if not behind:
            nap.once(self.nap_ns)
        if nap.poll_until_above(position, value, self.quiet_ns, self.nap_ns):
            return True
        self.busy = False
        self._rounds = 0
        cpu.schedule_interactive()
        return False
