"""Lines about slaves that come and go, so many a minute: a peer on the port must not fill the disk with the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

WINDOW_NS = 60_000_000_000
LINES_MAX = 6       # of one host in a window; the rest are counted, and the count is a line
HOSTS_MAX = 64      # with a limit of their own; all others share one
_OTHERS = "other hosts"


@dataclass(slots=True)
class _Said:
    until_ns: int
    lines: int = 0
    left_out: int = 0


class HostLines:
    """Says sentences about hosts, or counts them."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._hosts: dict[str, _Said] = {}

    def say(self, host: str, text: str, now_ns: int) -> None:
        """A sentence about a host."""
        said = self._hosts.get(host)
        if said is None:
            if len(self._hosts) >= HOSTS_MAX:
                host = _OTHERS
            said = self._hosts.setdefault(host, _Said(now_ns + WINDOW_NS))
        if said.lines < LINES_MAX:
            said.lines += 1
            self._report(text)
        else:
            said.left_out += 1

    def tick(self, now_ns: int) -> None:
        """Now and then: what was counted in minutes that are over."""
        for host, said in [(host, said) for host, said in self._hosts.items() if now_ns >= said.until_ns]:
            del self._hosts[host]
            if said.left_out:
                self._report(f"{host}: {said.left_out:,} more lines like those above within a minute")
