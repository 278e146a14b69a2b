"""What the disk under a folder does by itself: how long it takes until it says that bytes are safe."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 4096
FILE_BYTES = 8 << 20
HONEST_US_MIN = 15.0  # no medium that keeps its bytes without power has been seen to answer sooner


@dataclass(frozen=True, slots=True)
class DiskMeasure:
    """Overwriting a block of an allocated file and fdatasync, again and again, in one thread."""

    file_system: str
    syncs: int
    syncs_per_s: float
    sync_p50_us: float
    sync_p99_us: float

    @property
    def verdict(self) -> str:
        """What the figures say about the promise that a sync makes."""
        if self.file_system in ("tmpfs", "ramfs"):
            return f"{self.file_system} is memory: nothing survives a power cut here"
        if self.sync_p50_us < HONEST_US_MIN:
            return (f"fdatasync answers after {self.sync_p50_us:.1f} us: it may not wait for the medium; a power cut may take "
                    "what it called safe")
        return f"fdatasync answers after {self.sync_p50_us:.0f} us: it waits for something"


def measure_disk(folder: Path, seconds: float) -> DiskMeasure:
    """Measure for about so long; leaves nothing behind. OSError as the disk gives it."""
    took_ns: list[int] = []
    block = os.urandom(BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        for at in range(0, FILE_BYTES, BLOCK_BYTES):
            os.pwrite(descriptor, block, at)
        os.fsync(descriptor)
        began_ns = now_ns = time.monotonic_ns()
        while now_ns < began_ns + seconds * 1e9 or not took_ns:
            os.pwrite(descriptor, block, len(took_ns) * BLOCK_BYTES % FILE_BYTES)
            os.fdatasync(descriptor)
            before_ns, now_ns = now_ns, time.monotonic_ns()
            took_ns.append(now_ns - before_ns)
    took_ns.sort()
    return DiskMeasure(file_system_of(folder), len(took_ns), len(took_ns) / ((now_ns - began_ns) / 1e9),
                       took_ns[len(took_ns) // 2] / 1000, took_ns[len(took_ns) * 99 // 100] / 1000)


def file_system_of(folder: Path | str) -> str:
    """The type of the file system that holds the folder, by the longest mount point; empty if nobody knows."""
    path = os.path.realpath(folder)
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind
