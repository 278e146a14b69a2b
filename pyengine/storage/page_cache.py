"""Reading what is on the disk, not what the kernel remembers of it.

After a failed sync the kernel keeps the pages, marked clean, although they never reached
the disk: they read well until they are evicted, and the next fdatasync says all is fine.
A recovery that trusted them would call durable what is not. So after a freeze they are
dropped first, and recovery sees what will be there after a power cut.
"""

from __future__ import annotations

import contextlib
import os

from pyengine.formats.paths import StorePaths, parse_segment_name


def forget_cached(root: str | os.PathLike[str], flushed: int) -> int:
    """Drop the cached pages of log segments that reach above `flushed`, and of all queues and the index; the number of files.

    Whole files, since the kernel caches in pieces of up to a megabyte and keeps a piece
    that is dropped in part. Pages that another process has mapped, or that are dirty
    still, stay.
    """
    paths = StorePaths(root)
    count = 0
    log = paths.commit_log_folders.all
    for folder in (*log, paths.consume_queue, paths.index):
        for parent, _, names in os.walk(folder):
            for name in names:
                count += _drop(os.path.join(parent, name), flushed if folder in log else -1)
    return count


def _drop(path: str, flushed: int) -> bool:
    """Drop one file's pages, unless it is a segment that ends at or below `flushed`."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            start = parse_segment_name(os.path.basename(path)) or 0
            if flushed >= 0 and start + os.fstat(descriptor).st_size <= flushed:
                return False
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return True
        finally:
            os.close(descriptor)
    return False
