"""Where the commit log ends, found by reading it: for a store that no engine tells about.

Nothing is written, and nothing is judged: the end is the first byte that is not part
of a whole record. It is looked for where RocketMQ looks when it starts
(docs/recovery.md): from our own durable watermark if there is one, else from the third-last
segment after an orderly stop, else from the newest segment that the checkpoint covers.
Once found it is followed, so that a log that another process appends to can be read.
"""

from __future__ import annotations

import os
import time

from pyengine.formats.constants import MESSAGE_BYTES_MIN, MESSAGE_MAGIC
from pyengine.formats.record_case import CaseLabel, classify
from pyengine.formats.record_layout import I32, I64, MAGIC_AT, SYS_FLAG_AT, store_timestamp_at
from pyengine.formats.walk import WalkResult
from pyengine.storage.abort_file import abort_file_exists
from pyengine.storage.segment_files import SegmentFolder
from pyengine.storage.store_checkpoint import read_checkpoint
from pyengine.storage.watermark import read_watermark

try:
    from pyengine.native.scan import walk
except ImportError:  # the C module is not built: the same walk, record by record
    from pyengine.formats.walk import walk

_SEGMENTS_AFTER_ORDERLY_STOP = 3  # CommitLog.recoverNormally
_LOOK_AGAIN_S = 1.0
_TRIES = 16
# What an appending process leaves for a moment; anything else at the end is final.
_UNFINISHED = frozenset(
    (CaseLabel.FOREIGN, CaseLabel.OVERRUN, CaseLabel.TORN, CaseLabel.OFFSET_MISMATCH, CaseLabel.BAD_CRC)
)


class LogEnd:
    """The end of one commit log, as far as it was found. Not shared between threads without a lock."""

    def __init__(self, root: str | os.PathLike[str], commit_log: SegmentFolder) -> None:
        self._root = root
        self._log = commit_log
        self._end: int | None = None
        self._looked_again_s = 0.0

    def find(self) -> int:
        """The end now. The first call reads up to three segments; later ones only what was appended since.

        0 for a log without segments.
        """
        end = 0
        for _ in range(_TRIES):
            starts = self._log.starts()
            if not starts:
                self._end = None
                return 0
            end = self._find(starts)
            if end >= self._log.min_offset:
                self._end = end
                return end
            self._end = None  # the segment was deleted, and perhaps emptied, while it was read
        return end

    def _find(self, starts: list[int]) -> int:
        if self._end is None or not starts[0] <= self._end <= starts[-1] + self._log.size_bytes:
            return self._walk(self._first_offset(starts))[0]
        end, reason = self._walk(self._end)
        if end == self._end and reason in _UNFINISHED and self._may_look_again():
            # Either someone is writing there, or the writer was killed and what we had
            # passed was cleared and written over: the segment's start is sure.
            segment = self._log.start_of(end)
            if segment is not None:
                return self._walk(segment)[0]
        return end

    def _walk(self, offset: int) -> tuple[int, str]:
        """(end, reason) of a walk from a record's start over as many segments as it takes."""
        while True:
            start = self._log.start_of(offset)
            view = None if start is None else self._log.view(start)
            if start is None or view is None:
                return offset, CaseLabel.RANGE_END
            end = start + self._log.size_bytes
            result: WalkResult = walk(view, start, offset, end)
            if result.reason != CaseLabel.BLANK and result.end_offset < end:
                return result.end_offset, result.reason
            if self._log.start_of(end) is None:
                # RocketMQ writes over a blank that no segment follows, so it is the end.
                return result.end_offset, result.reason
            offset = end

    def _first_offset(self, starts: list[int]) -> int:
        """A record's start from which on everything is to be read."""
        reading = read_watermark(self._root)
        durable = reading.watermark
        if reading.is_copied:  # any segment may have been copied while it was written
            return starts[0]
        if durable is not None:
            sure = self._sure_start(durable.flushed)
            if sure is not None:
                return sure
        if not abort_file_exists(self._root):
            return starts[max(0, len(starts) - _SEGMENTS_AFTER_ORDERLY_STOP)]
        covered_ms = read_checkpoint(self._root).min_timestamp_ms
        for start in reversed(starts):
            store_timestamp_ms = self._first_store_timestamp_ms(start)
            if store_timestamp_ms is not None and 0 < store_timestamp_ms <= covered_ms:
                return start
        return starts[0]

    def _sure_start(self, flushed: int) -> int | None:
        """Our watermark if a record, a blank or nothing stands there, else its segment's start; None beyond the log.

        Behind it a torn record may stand, or, in a log that RocketMQ went on with, the middle of another.
        """
        start = self._log.start_of(flushed)
        view = None if start is None else self._log.view(start)
        if start is None or view is None:
            return None
        label = classify(view, flushed - start, start + self._log.size_bytes - flushed, flushed, check_crc=False).label
        return start if label in _UNFINISHED else flushed

    def _first_store_timestamp_ms(self, start: int) -> int | None:
        view = self._log.view(start)
        if view is None or len(view) < MESSAGE_BYTES_MIN:
            return None
        if int.from_bytes(view[MAGIC_AT : MAGIC_AT + 4], "big") != MESSAGE_MAGIC:
            return None
        (sys_flag,) = I32.unpack_from(view, SYS_FLAG_AT)
        return I64.unpack_from(view, store_timestamp_at(sys_flag))[0]

    def _may_look_again(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_again_s < _LOOK_AGAIN_S:
            return False
        self._looked_again_s = now_s
        return True
