"""config/replication.json while a replicator runs: a failed write is reported, and what was unreadable is not forgotten."""

from __future__ import annotations

import threading

import pytest

from pyengine.native import control as native
from pyengine.services.replication.ha_notes import ReplicationNotes
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from reported import Reported


def test_a_note_that_cannot_be_written_blocks_until_it_can(make_owner):
    owner = make_owner("store", role=native.SYNC_MASTER, replicates=1)
    owner.publish()
    reported = Reported()
    notes = ReplicationNotes(owner.context(report=reported))
    file = ReplicationStateFile(owner.root)
    in_the_way = file.path.with_name(file.path.name + ".tmp")
    in_the_way.mkdir(parents=True)
    assert not notes.note() and not notes.note()
    assert "cannot be noted" in notes.blocked.text and str(file.path) in notes.blocked.text and reported == [notes.blocked.text]
    in_the_way.rmdir()
    assert notes.note() and not notes.blocked.text
    assert file.read().state == ReplicationState("SYNC_MASTER", 0)


def test_dispatch_at_is_noted_anew_although_the_replication_file_is_unreadable(make_owner):
    owner = make_owner("store", role=native.SYNC_MASTER, replicates=1, dispatch_at=1)
    owner.publish()
    file = ReplicationStateFile(owner.root)
    file.path.parent.mkdir(exist_ok=True)
    file.path.write_text("{")
    assert ReplicationNotes(owner.context()).note()
    assert file.read().state.dispatch_at == "replicated"


class SlowTerm(int):
    """A term whose comparison takes so long that another thread's higher one arrives meanwhile."""

    meanwhile: threading.Thread

    def __gt__(self, other: object) -> bool:
        is_greater = int(self) > other
        if self.meanwhile.ident is None:
            self.meanwhile.start()
            self.meanwhile.join(0.2)
        return is_greater


@pytest.mark.parametrize("method, known", [("fence", "known_term"), ("follow", "term")])
def test_of_two_terms_that_come_at_once_the_higher_one_is_kept(make_owner, method, known):
    owner = make_owner("store", role=native.SYNC_MASTER, replicates=1)
    owner.publish()
    notes = ReplicationNotes(owner.context())
    term = SlowTerm(5)
    term.meanwhile = threading.Thread(target=lambda: getattr(notes, method)(7))
    getattr(notes, method)(term)
    term.meanwhile.join()
    assert getattr(notes, known) == 7 == ReplicationStateFile(owner.root).read().state.known_term
