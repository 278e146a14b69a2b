"""How this process gets a CPU (csrc/cpu.cdef.h). All of it is advice: refused, the engine is only slower."""

from __future__ import annotations

from pyengine._native import lib


def schedule_interactive() -> None:
    """Woken, interrupt who runs in long slices: for a process that does little each time and that others wait for."""
    lib.ms_cpu_schedule(lib.MS_CPU_PROMPT)


def schedule_batch() -> None:
    """Woken, take an idle CPU at once, but wait for one rather than interrupt a putting producer or the writer."""
    lib.ms_cpu_schedule(lib.MS_CPU_BEHIND)
