"""What tests see of a producer and of a consumer from inside; only here are these parts named."""

from __future__ import annotations


def submitter(producer):
    """A producer's Submitter: its session, its lock, its fast path in C."""
    return producer._puts


def awaiting_loops(producer):
    """The event loops whose tasks await puts of a producer now."""
    return producer._puts._pending._loops


def housekeep(consumer) -> None:
    """Do now what a consumer's thread does: join, claim and release queues, commit what is due; raises its errors."""
    consumer._housekeep()
