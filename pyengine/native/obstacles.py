"""What keeps each worker from its work, in shared memory (csrc/obstacles.cdef.h)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyengine._native import ffi, lib
from pyengine.native.control import raise_layout_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from pyengine._native import ms_obstacles

OBSTACLES_BYTES: int = ffi.sizeof("struct ms_obstacles")
LAYOUT_VERSION: int = lib.MS_OBSTACLES_LAYOUT_VERSION
TEXT_BYTES: int = lib.MS_OBSTACLE_TEXT_BYTES


def view(memory: Buffer) -> ms_obstacles:
    """`struct ms_obstacles *` over a mapping that the caller keeps alive, not yet checked."""
    return ffi.cast("struct ms_obstacles *", ffi.from_buffer(memory))


def private() -> ms_obstacles:
    """Lines of this process alone, for a worker that finds no shared ones."""
    obstacles = ffi.new("struct ms_obstacles *")
    lib.ms_obstacles_format(obstacles)
    return obstacles


def format_obstacles(obstacles: ms_obstacles) -> None:
    """The supervisor, over zeros: no worker is kept from its work."""
    lib.ms_obstacles_format(obstacles)


def check(obstacles: ms_obstacles, mapped_bytes: int) -> None:
    """EngineUnavailableError, naming what is wrong, unless this is a whole object of our layout."""
    raise_layout_error("the workers' obstacles", lib.ms_obstacles_check(obstacles, mapped_bytes))


def say(obstacles: ms_obstacles, kind: int, text: str) -> None:
    """The worker of that kind: what keeps it from its work, "" for nothing any more."""
    data = text.replace("\0", " ").encode("utf-8", "replace")[: TEXT_BYTES - 1].decode("utf-8", "ignore").encode()
    lib.ms_obstacle_say(obstacles, kind, data)


def read(obstacles: ms_obstacles, kind: int) -> str:
    """What that worker said last."""
    into = ffi.new("char[]", TEXT_BYTES)
    lib.ms_obstacle_read(obstacles, kind, into)
    return ffi.string(into).decode("utf-8", "replace")
