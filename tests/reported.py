"""Keeps a service's reports for a test."""

from __future__ import annotations

from pyengine.events import Event


class Reported(list[str]):
    """A report that keeps the sentences, and in `events` their events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __call__(self, event: Event, text: str) -> None:
        self.append(text)
        self.events.append(event)
