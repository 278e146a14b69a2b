"""Allocator: creates segments, reserves their blocks and warms their pages before the writer needs them.

Why: a new file takes milliseconds, and a page fault per 4 KiB takes more. Promise: every block below `reserved_end` is
allocated, so a full disk is a put status and never SIGBUS. If it dies, the writer continues up to there, then
puts wait for a bounded time; the next allocator completes a segment or a step that was not published yet.
"""

from __future__ import annotations

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.allocate_mapped_file import AllocateMappedFileService

main = worker.main(native.ALLOCATOR, "Keeps the next log segments ready.", lambda attached: AllocateMappedFileService(attached.context))

if __name__ == "__main__":
    raise SystemExit(main())
