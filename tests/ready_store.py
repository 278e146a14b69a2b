"""A store with segments ready and a plain writer, for the tests of services."""

from __future__ import annotations

from fix_owner import Owner
from fix_writer import PlainWriter
from pyengine.native import control as native
from pyengine.services.allocate_mapped_file import AllocateMappedFileService
from pyengine.storage.config import EngineConfig

SEGMENT = 65536


def ready_segments(owner: Owner, count: int) -> None:
    """Allocate `count` segments ahead."""
    native.store(owner.control.writer, "wanted_end", count * SEGMENT)
    allocator = AllocateMappedFileService(owner.context(EngineConfig()))
    while native.load(owner.control.allocator, "ready_end") < count * SEGMENT:
        assert allocator.work()
    allocator.close()


def store_with_writer(make_owner, segments: int = 4, **identity) -> tuple[Owner, PlainWriter]:
    """A published owner of an empty store with `segments` ready, and its writer."""
    owner = make_owner(segment_bytes=SEGMENT, **identity)
    owner.position(0)
    owner.publish()
    ready_segments(owner, segments)
    return owner, PlainWriter(owner)
