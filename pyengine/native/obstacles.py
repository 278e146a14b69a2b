"""Why each worker is blocked, in shared memory (csrc/obstacles.cdef.h)."""

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
    """Return an unchecked `struct ms_obstacles *` over a mapping, which the caller keeps alive."""
    return ffi.cast("struct ms_obstacles *", ffi.from_buffer(memory))


def private() -> ms_obstacles:
    """Return a block in private memory, for a worker that finds no shared one."""
    obstacles = ffi.new("struct ms_obstacles *")
    lib.ms_obstacles_format(obstacles)
    return obstacles


def format_obstacles(obstacles: ms_obstacles) -> None:
    """Initialize a zeroed block, with no worker blocked; called by the supervisor."""
    lib.ms_obstacles_format(obstacles)


def check(obstacles: ms_obstacles, mapped_bytes: int) -> None:
    """Raise EngineUnavailableError, which names the fault, unless the object is complete and of this build's layout."""
    raise_layout_error("the workers' obstacles", lib.ms_obstacles_check(obstacles, mapped_bytes))


def say(obstacles: ms_obstacles, kind: int, text: str) -> None:
    """Publish why the worker of that kind, which calls this, is blocked; "" if it is not."""
    data = text.replace("\0", " ").encode("utf-8", "replace")[: TEXT_BYTES - 1].decode("utf-8", "ignore").encode()
    lib.ms_obstacle_say(obstacles, kind, data)


def read(obstacles: ms_obstacles, kind: int) -> str:
    """Return the reason that the worker of that kind published last."""
    into = ffi.new("char[]", TEXT_BYTES)
    lib.ms_obstacle_read(obstacles, kind, into)
    return ffi.string(into).decode("utf-8", "replace")
