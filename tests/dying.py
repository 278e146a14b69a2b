"""Work that ends, like by SIGKILL, just before its system call number so-and-so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable


def run_and_die_at(
    step: int, work: Callable[[], object], system_calls: Iterable[str], others: Iterable[tuple[object, str]] = (),
) -> bool:
    """Do `work` in a child that ends before call number `step` (from 0) of `os.<name>` for the names given.

    `others` are functions of other modules that count too. True when the child got to the
    end of `work` instead; an exception in it fails the test.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(real):
            def call(*args, **named):
                nonlocal calls
                if calls == step:
                    os._exit(77)
                calls += 1
                return real(*args, **named)
            return call

        try:
            for module, name in [*((os, name) for name in system_calls), *others]:
                setattr(module, name, counted(getattr(module, name)))
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 77), f"the child failed; it was to end before system call {step}"
    return code == 0
