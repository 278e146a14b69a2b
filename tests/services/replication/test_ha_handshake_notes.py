"""config/replication.json while a replicator runs: what cannot be noted is told, and what was unreadable is not forgotten."""

from __future__ import annotations

from pyengine.native import control as native
from pyengine.services.replication.ha_handshake import ReplicationNotes
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


def test_where_queues_end_is_kept_although_the_file_could_not_be_read(make_owner):
    owner = make_owner("store", role=native.SYNC_MASTER, replicates=1, dispatch_at=1)
    owner.publish()
    file = ReplicationStateFile(owner.root)
    file.path.parent.mkdir(exist_ok=True)
    file.path.write_text("{")
    assert ReplicationNotes(owner.context()).note()
    assert file.read().state.dispatch_at == "replicated"
