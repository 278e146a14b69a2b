"""What a service reports, for a test to look at."""

from __future__ import annotations

from pyengine.events import Event, Report


class Said(list[str]):
    """The sentences that were reported, and their events."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __call__(self, event: Event, text: str) -> None:
        self.append(text)
        self.events.append(event)


def into(said: list[str]) -> Report:
    """Reports go to that list, as sentences."""
    return lambda event, text: said.append(text)
