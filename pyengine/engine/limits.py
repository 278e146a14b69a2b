"""How many files an engine's processes may have open: too few are told at the start, not found out by each of them later."""

from __future__ import annotations

import resource

from pyengine.errors import EngineError

# An engine with all kinds of workers, a producer and forty queues needs 36 in the process that holds most; each further
# producer, and each buffer of a pool, takes one of the supervisor's.
DESCRIPTORS_MIN = 48
DESCRIPTORS_RAISED_TO = 1024


def require_descriptors() -> None:
    """EngineError where a process started from here could not open enough files, even by raising its own limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if _is_below(hard):
        raise EngineError(f"a process may have {hard} files open here, and an engine needs {DESCRIPTORS_MIN} at least: raise the limit "
                          "(`ulimit -n 1024`, LimitNOFILE= in a unit; root can raise the hard one)")


def raise_descriptors() -> None:
    """For the supervisor, whose limit its workers inherit: a soft limit that is too low becomes what the hard one allows."""
    require_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _is_below(soft):
        wanted = DESCRIPTORS_RAISED_TO if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS_RAISED_TO)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _is_below(limit: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < DESCRIPTORS_MIN
