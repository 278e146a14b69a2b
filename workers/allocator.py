"""Allocator: creates, allocates and warms segments ahead of the writer.

Why: a new 1 GiB file takes milliseconds, a page fault per 4 KiB takes more. Promise: what
lies below `ready_end` is allocated to the last block, so a full disk is a status and
never SIGBUS. Its death: the writer goes on until it runs out of ready segments, then
puts wait (bounded); the next allocator takes a half told segment over.
"""

from __future__ import annotations

import sys

from pyengine.engine import worker
from pyengine.native import control as native
from pyengine.services.allocate_mapped_file import AllocateMappedFileService


def make_service(attached: worker.Worker) -> AllocateMappedFileService:
    return AllocateMappedFileService(attached.context)


def main() -> int:
    """Run the allocator with the arguments of this process; its exit code."""
    return worker.main(native.ALLOCATOR, "Keeps the next log segments ready.", make_service)


if __name__ == "__main__":
    sys.exit(main())
