"""The state of replication that a store keeps between runs: `config/replication.json` (docs/formats.md section 14).

A store that joins a master may truncate its log above `confirm`, never below (docs/replication.md). `confirm` may be a second old, and is
never ahead. `"dispatchAt": "replicated"` is there if the queues end at that offset. While the engine runs, only the replicator writes the
file; before that, only the supervisor.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pyengine.arguments import INT64_MAX
from pyengine.errors import DiskError, FormatError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import decode_config, encode_config
from pyengine.storage.durable_file import ConfigFile

NAME = "replication.json"
ROLES = ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE")
DISPATCH_AT = ("committed", "replicated")


@dataclass(frozen=True, slots=True)
class ReplicationState:
    """The last role of a store, and the confirmed offset of its log. A write with `dispatch_at` None keeps that of the file.

    `master_end`: of a slave, the last known end of its master's log; 0 if unknown. `term`: its own as a master, or that of
    the master that it followed last; 0 before the first promotion. `fenced_by`: as a master, the highest
    term of another store that it knows of. A write never decreases these two. `second_master`: as a master, the address of
    another of its term for which it takes no puts; a write keeps it until the store is a slave, or of a higher term.
    """

    role: str
    confirm: int
    dispatch_at: str | None = field(default=None, compare=False)
    master_end: int = 0
    term: int = 0
    fenced_by: int = 0
    second_master: str = ""

    @property
    def known_term(self) -> int:
        """The highest term that this store knows of."""
        return max(self.term, self.fenced_by)

    @property
    def is_fenced(self) -> bool:
        """Whether another master has replaced this one."""
        return self.fenced_by > self.term or self.second_master != ""


def second_master_sentence(address: str) -> str:
    """Say why a master takes no puts, and what decides."""
    return (f"{address} is a master of the same term, so this one takes no puts: start it as that one's slave (broker_role=SLAVE and "
            "ha_master_address=HOST:PORT), or stop it and make it the master again by `pyengine promote --force`: then the other one takes "
            "none. Instead restore a copy for a drill again, and start it with ha_peers= (empty)")


class ReadState(NamedTuple):
    """The content of the file, None if no file can be used; a sentence about a damaged one."""

    state: ReplicationState | None
    problem: str


class ReplicationStateFile:
    """The file of one store. It keeps no file open between calls."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._file = ConfigFile(StorePaths(root).config / NAME, _decode)
        self.path = self._file.path
        self._dispatch_at: str | None = None
        self._term = self._fenced_by = 0
        self._unread = self._second_master = ""

    def read(self) -> ReadState:
        """Read the file, or `.bak` if it is damaged; the `confirm` of that is older, which is safe.

        Its role may be older too: if there is a sentence, the store does not start as a master (pyengine/engine/bring_up.py).
        """
        state, problem, _, is_unread, _ = self._file.read()
        self._unread = problem if is_unread else ""
        self._dispatch_at = (state and state.dispatch_at) or DISPATCH_AT[0]
        if state is not None:
            self._term, self._fenced_by, self._second_master = state.term, state.fenced_by, state.second_master
        return ReadState(state, problem)

    def write(self, state: ReplicationState) -> None:
        """Replace the file, durably; the old one is kept as `.bak`. Raises DiskFullError, DiskError or FlushError.

        DiskError too if the file could not be read: its term must not be lost.
        """
        if self._dispatch_at is None:
            self.read()
        if self._unread:  # its term may be higher than the ones that this process knows
            raise DiskError(f"{self._unread}: it is not changed; repair the file or remove it", path=str(self.path))
        self._dispatch_at = state.dispatch_at or self._dispatch_at
        kept = self._second_master if state.term <= self._term else ""
        self._second_master = "" if state.role == ROLES[-1] else state.second_master or kept
        self._term, self._fenced_by = max(self._term, state.term), max(self._fenced_by, state.fenced_by)
        others = {"term": self._term, "fencedBy": self._fenced_by, "secondMaster": self._second_master, "masterEnd": state.master_end}
        document = {"role": state.role, "confirm": state.confirm} | {name: value for name, value in others.items() if value}
        if self._dispatch_at != DISPATCH_AT[0]:
            document["dispatchAt"] = self._dispatch_at
        self._file.write(encode_config(document))


def _decode(text: str) -> ReplicationState:
    document: Any = decode_config(text)
    try:
        role, confirm, dispatch_at = document["role"], document["confirm"], document.get("dispatchAt", DISPATCH_AT[0])
        master_end = document.get("masterEnd", 0)
        term, fenced_by, second_master = document.get("term", 0), document.get("fencedBy", 0), document.get("secondMaster", "")
    except (AttributeError, KeyError, TypeError) as error:
        raise FormatError(f"no role and confirmed position: {error!r}") from error
    if role not in ROLES:
        raise FormatError(f"{role!r} is not a role")
    for number in (confirm, master_end, term, fenced_by):
        if type(number) is not int or not 0 <= number <= INT64_MAX:
            raise FormatError(f"{number!r} is not a term or an offset of the log")
    if type(second_master) is not str:
        raise FormatError(f"{second_master!r} is not an address")
    if dispatch_at not in DISPATCH_AT:
        raise FormatError(f"{dispatch_at!r} is not a place to dispatch at")
    return ReplicationState(role, confirm, dispatch_at, master_end, term, fenced_by, second_master)
