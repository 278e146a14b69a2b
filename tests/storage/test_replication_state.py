"""config/replication.json: the role and the confirmed position survive; for a damaged file the one before it is used."""

from __future__ import annotations

import errno
import json

import pytest

from pyengine.errors import DiskError
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile


def test_a_written_replication_state_is_read_back(tmp_path):
    file = ReplicationStateFile(tmp_path)
    assert file.read() == (None, "")
    file.write(ReplicationState("SYNC_MASTER", 4096))
    file.write(ReplicationState("SLAVE", 1 << 40))
    state, problem = ReplicationStateFile(tmp_path).read()
    assert (state, problem) == (ReplicationState("SLAVE", 1 << 40), "")
    assert json.loads(file.path.read_text()) == {"role": "SLAVE", "confirm": 1 << 40}


def test_the_noted_dispatch_level_is_kept_until_a_write_gives_another(tmp_path):
    file = ReplicationStateFile(tmp_path)
    file.write(ReplicationState("SYNC_MASTER", 10))
    assert file.read().state.dispatch_at == "committed"
    file.write(ReplicationState("SYNC_MASTER", 20, "replicated"))
    file.write(ReplicationState("SYNC_MASTER", 30))
    ReplicationStateFile(tmp_path).write(ReplicationState("SLAVE", 40))  # one that has read nothing
    assert json.loads(file.path.read_text()) == {"role": "SLAVE", "confirm": 40, "dispatchAt": "replicated"}
    assert file.read().state.dispatch_at == "replicated"
    file.write(ReplicationState("SLAVE", 50, "committed"))
    assert ReplicationStateFile(tmp_path).read().state.dispatch_at == "committed"


@pytest.mark.parametrize("bad", ["", "{", "[]", "{}", '{"role": "SLAVE", "confirm": -1}', '{"role": "SLAVE", "confirm": true}',
                                 '{"role": "KING", "confirm": 5}', '{"role": "SLAVE", "confirm": 5, "dispatchAt": "never"}',
                                 '{"role": ["SLAVE"], "confirm": 5}',
                                 '{"role": "SLAVE", "confirm": 9223372036854775808}'])
def test_a_bad_file_is_reported_and_the_previous_one_is_read(tmp_path, bad):
    file = ReplicationStateFile(tmp_path)
    file.write(ReplicationState("SLAVE", 100))
    file.write(ReplicationState("SLAVE", 200))
    file.path.write_text(bad)
    state, problem = file.read()
    assert state == ReplicationState("SLAVE", 100)
    assert "replication.json" in problem
    file.write(ReplicationState("SLAVE", 300))  # and the bad one does not become the one before
    file.path.write_text("")
    assert file.read().state == ReplicationState("SLAVE", 100)


def test_two_bad_files_are_no_state(tmp_path):
    file = ReplicationStateFile(tmp_path)
    file.write(ReplicationState("SLAVE", 100))
    file.write(ReplicationState("SLAVE", 200))
    for path in (file.path, file.path.with_name("replication.json.bak")):
        path.write_text("?")
    state, problem = file.read()
    assert state is None and "nothing of it is used" in problem


def test_a_second_master_is_kept_until_the_store_is_a_slave_or_of_a_higher_term(tmp_path):
    file = ReplicationStateFile(tmp_path)
    beside = ReplicationState("SYNC_MASTER", 10, term=3, second_master="10.0.0.2:1")
    file.write(beside)
    file.write(ReplicationState("SYNC_MASTER", 20))
    state = ReplicationStateFile(tmp_path).read().state
    assert state == ReplicationState("SYNC_MASTER", 20, term=3, second_master="10.0.0.2:1")
    assert state.is_fenced and state.known_term == 3
    ReplicationStateFile(tmp_path).write(ReplicationState("SLAVE", 10, term=3, second_master="10.0.0.2:1"))
    assert file.read().state == ReplicationState("SLAVE", 10, term=3)
    file.write(beside)
    assert file.read().state.is_fenced
    file.write(ReplicationState("SYNC_MASTER", 10, term=4))
    assert not file.read().state.is_fenced


def test_a_term_never_falls_and_is_kept_by_those_that_do_not_know_it(tmp_path):
    file = ReplicationStateFile(tmp_path)
    file.write(ReplicationState("SYNC_MASTER", 10, term=3, fenced_by=4))
    assert file.read().state.is_fenced and file.read().state.known_term == 4
    file.write(ReplicationState("SLAVE", 20))
    ReplicationStateFile(tmp_path).write(ReplicationState("SLAVE", 30, term=2, fenced_by=1))
    state = file.read().state
    assert (state.confirm, state.term, state.fenced_by) == (30, 3, 4)
    file.write(ReplicationState("SLAVE", 30, term=4))
    assert not file.read().state.is_fenced


@pytest.mark.parametrize("term", ["-1", "true", '"2"', "1e3"])
def test_a_wrong_term_is_damage(tmp_path, term):
    file = ReplicationStateFile(tmp_path)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_text('{"role": "SLAVE", "confirm": 1, "term": %s}' % term)
    assert file.read().state is None and "is not a term" in file.read().problem


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO], ids=errno.errorcode.get)
def test_a_term_that_could_not_be_read_is_not_replaced_by_none(tmp_path, monkeypatch, number):
    ReplicationStateFile(tmp_path).write(ReplicationState("SYNC_MASTER", 100, term=7, fenced_by=8))
    file = ReplicationStateFile(tmp_path)
    content = file.path.read_bytes()

    def refuse(path):
        raise OSError(number, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("pyengine.storage.durable_file.read_small_file", refuse)
        with pytest.raises(DiskError, match="refused"):
            file.write(ReplicationState("SYNC_MASTER", 200))
    assert file.path.read_bytes() == content
    file.read()
    file.write(ReplicationState("SYNC_MASTER", 200))
    assert ReplicationStateFile(tmp_path).read().state == ReplicationState("SYNC_MASTER", 200, term=7, fenced_by=8)
