"""A walk over a long range by two processors, with the outcome of one walk.

Where a record begins in the middle of a log is known only once a walk has come there. So
while one piece is walked here, a thread guesses where the first record of the next piece
begins and walks that. Its walk counts only if the first walk ended at that very byte: what
a walk finds depends on the bytes and on where it begins, and on nothing else. A body that
was made to look like a record costs time, never the truth.

    piece k, here        [====walk====>|             the same byte:  both count
    piece k + 1, thread                |[====walk====>
                          guess of the first record behind the border

With one processor, with no thread to be had, or with nothing that looks like a record at the
border, it is the plain walk, piece by piece.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

from pyengine.formats.record_case import CaseLabel, WalkResult
from pyengine.native.scan import sync, walk

# The first record of a piece is looked for no further than this behind its border: what lies behind the log's
# end may be allocated and never written, and reading that is the slowest reading there is.
GUESS_BYTES = 1 << 20

Piece = tuple[int, bool]  # where it stops; whether topic and properties are judged too (strict)


def walk_pieces(
    view, base_offset: int, start: int, pieces: Sequence[Piece], *, limit: int, check_crc: bool, check_offset: bool,
    processors: int | None = None,
) -> Iterator[WalkResult]:
    """Walk from the record at `start` through `pieces`, which follow each other; one result for each piece walked.

    The last result's `end_offset` and `reason` are those of a single walk; it stops at the
    first piece whose end no record reaches. A piece that the record before it covers
    altogether has no result. `processors`: default, as many as this process may use.
    """
    if processors is None:
        processors = len(os.sched_getaffinity(0))
    checks = {"limit": limit, "check_crc": check_crc, "check_offset": check_offset}
    at, ahead = start, None
    for number, (stop, strict) in enumerate(pieces):
        if at >= stop:
            continue
        if ahead is not None and ahead.guess == at:  # its thread is done
            result, ahead = ahead.result, None
        else:
            ahead = None
            if processors > 1 and number + 1 < len(pieces):
                ahead = _Ahead(view, base_offset, stop, pieces[number + 1], checks)
            try:
                result = walk(view, base_offset, at, stop, strict=strict, **checks)
            finally:
                if ahead is not None:
                    ahead.join()
        yield result
        at = result.end_offset
        if result.reason != CaseLabel.RANGE_END or at < stop:
            return


class _Ahead:
    """The walk of one piece from a guessed record on, in a thread; `guess` is None when it found nothing to begin at."""

    def __init__(self, view, base_offset: int, border: int, piece: Piece, checks: dict) -> None:
        self.guess: int | None = None
        self.result: WalkResult | None = None
        self._view, self._base_offset, self._border, self._piece, self._checks = view, base_offset, border, piece, checks
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="walk-ahead", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # a limit on processes: this piece is walked in its turn
            self._thread = None

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        stop, strict = self._piece
        guess = sync(self._view, self._base_offset, self._border, min(stop, self._border + GUESS_BYTES),
                     limit=self._checks["limit"])
        if guess is not None:
            self.result = walk(self._view, self._base_offset, guess, stop, strict=strict, **self._checks)
            self.guess = guess
