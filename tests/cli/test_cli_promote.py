"""`pyengine promote`: what it writes, what it starts again with, what it refuses, and what it says of what is missing."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import pyengine
from broker_lock import held_by_a_broker
from damage import flip
from fix_cli import changes, command_line, environment, picture, run
from fix_engine import SMALL
from fix_slave import secret_file
from pyengine.cli.promote import (
    BACKGROUND,
    EMBEDDED,
    FOREGROUND,
    UNITS,
    SlaveProgress,
    Start,
    _wait_until_caught_up,
    judge,
    manual_steps,
    promote_stopped,
    require_restartable,
    started_by,
    take_over_steps,
)
from pyengine.engine.embedded import supervisor_pid
from pyengine.errors import ConfigError, EngineError, EngineUnavailableError, StoreBusyError
from pyengine.native import control as native
from pyengine.storage import durable_file
from pyengine.storage.config import EngineConfig, config_path, read_file, record_sizes, set_in_file
from pyengine.storage.consumer_offset import ConsumerOffsets
from pyengine.storage.replication_state import ReplicationState, ReplicationStateFile
from waiting import eventually

SLAVE = {"broker_role": "SLAVE"}


@pytest.fixture
def stopped(tmp_path):
    """stopped(text, role) -> root of a store whose engine.toml says `text`, and that ran as `role` last."""
    def make(text: str, role: str | None = "SLAVE", confirm: int = 77):
        root = tmp_path / "store"
        (root / "commitlog").mkdir(parents=True)
        (root / "config").mkdir()
        record_sizes(root, EngineConfig(**SMALL))
        config_path(root).write_text(config_path(root).read_text() + text)
        if role:
            ReplicationStateFile(root).write(ReplicationState(role, confirm))
        return root
    return make


def test_promote_gives_a_stopped_slave_its_new_role_and_keeps_its_other_settings(stopped):
    root = stopped('# mine\nbrokerRole = "SLAVE"   # for now\nha_master_address = "10.0.0.1:10912"\nspin = 0')
    before = read_file(config_path(root))
    done = run("promote", root, "--role", "SYNC_MASTER", "--json")
    assert done.code == 0, done
    assert (done.document["role"], done.document["was"], done.document["running"]) == ("SYNC_MASTER", "SLAVE", False)
    assert before.pop("ha_master_address") == "10.0.0.1:10912"
    assert read_file(config_path(root)) == before | {"broker_role": "SYNC_MASTER"}
    assert "# mine\n" in config_path(root).read_text()
    assert ReplicationStateFile(root).read().state == ReplicationState("SYNC_MASTER", 77, term=1)
    again = run("promote", root)
    assert again.code == 1 and "is not a slave" in again.stderr


@pytest.mark.parametrize("role", ["SLAVE", None])
def test_a_slave_that_knows_it_from_one_side_only_is_one(stopped, role, monkeypatch):
    root = stopped("" if role else 'broker_role = "SLAVE"\n', role)
    monkeypatch.setenv("PYENGINE_BROKER_ROLE", "SLAVE")
    done = run("promote", root)
    assert done.code == 0 and "the environment, which win" in done.stdout and "note: the old master is not told" in done.stdout
    assert read_file(config_path(root))["broker_role"] == "ASYNC_MASTER"


@pytest.mark.parametrize(("peers", "written"), [
    ("", "10.0.0.1:10912"), ("10.0.0.2:1, ,[::1]:2", "10.0.0.1:10912, 10.0.0.2:1, [::1]:2"),
    ("10.0.0.2:1,10.0.0.1:10912", "10.0.0.1:10912, 10.0.0.2:1")])
def test_the_old_masters_address_is_added_to_the_peers(stopped, monkeypatch, peers, written):
    root = stopped(f'broker_role = "SLAVE"\nha_master_address = "10.0.0.1:10912"\nha_secret_file = "ha.secret"\nha_peers = "{peers}"\n')
    monkeypatch.setenv("PYENGINE_BROKER_ROLE", "ASYNC_MASTER")
    done = run("promote", root)
    assert done.code == 0 and "is not told" not in done.stdout and "also set" not in done.stdout, done
    assert read_file(config_path(root))["ha_peers"] == written


def test_peers_of_the_environment_hide_the_old_master_and_promote_says_so(stopped, monkeypatch):
    root = stopped('broker_role = "SLAVE"\nha_master_address = "10.0.0.1:10912"\nha_secret_file = "ha.secret"\n')
    monkeypatch.setenv("PYENGINE_HA_PEERS", "10.0.0.2:1")
    done = run("promote", root)
    assert done.code == 0 and "ha_peers is also set by --set or the environment" in done.stdout, done
    assert "give 10.0.0.1:10912, 10.0.0.2:1" in done.stdout


def test_peers_that_promote_did_not_write_are_not_said_to_be_hidden(stopped, monkeypatch):
    """Without a secret it adds none."""
    root = stopped('broker_role = "SLAVE"\nha_master_address = "10.0.0.1:10912"\nha_peers = "10.0.0.2:1"\n')
    monkeypatch.setenv("PYENGINE_HA_PEERS", "10.0.0.3:1")
    done = run("promote", root)
    assert done.code == 0 and "also set" not in done.stdout, done


def test_peers_without_the_old_masters_address_do_not_tell_it(stopped):
    done = run("promote", stopped('broker_role = "SLAVE"\nha_secret_file = "ha.secret"\nha_peers = "10.0.0.2:1"\n'))
    assert done.code == 0 and "note: the old master is not told" in done.stdout, done


@pytest.mark.parametrize("role", ["SYNC_MASTER", None])
def test_a_master_is_not_promoted(stopped, role):
    root = stopped("spin = 0\n", role)
    before = picture(root)
    refused = run("promote", root)
    assert refused.code == 1 and f"its role is {role or 'ASYNC_MASTER'}" in refused.stderr
    assert set(changes(before, picture(root))) <= {".", "lock"}


def test_a_store_that_a_broker_has_open_is_left_alone(stopped):
    root = stopped("")
    (root / "lock").touch()
    with held_by_a_broker(root):
        before = picture(root)
        refused = run("promote", root)
        assert refused.code == 5 and not changes(before, picture(root))


def test_promote_restarts_a_running_slave_as_a_master_with_its_settings(make_engine, monkeypatch):
    one = make_engine(ha_master_address="", osPageCacheBusyTimeOutMills="1234", **SLAVE)
    monkeypatch.setenv("PYENGINE_SLAVE_TIMEOUT_MS", "4321")
    one.start()
    monkeypatch.delenv("PYENGINE_SLAVE_TIMEOUT_MS")
    assert run("put", one.root, "--topic", "T", "x").code != 0
    waited = run("wait", one.root, "--timeout", 3600)
    assert waited.code == 1 and "a slave takes no puts: put to its master" in waited.stderr, waited
    supervisor = one.pid("supervisor")
    done = run("promote", one.root, "--json")
    assert done.code == 0, done
    with one.memory() as memory:
        one.semaphores.add(memory.identity.sysv_semaphore_id)
        identity = memory.identity
        assert (identity.role, identity.os_page_cache_busy_timeout_ms, identity.slave_timeout_ms) == (0, 1234, 4321)
    assert done.document["pid"] == one.pid("supervisor") != supervisor
    assert run("put", one.root, "--topic", "T", "x").code == 0
    again = run("promote", one.root)
    assert again.code == 1 and "is a master already" in again.stderr
    assert read_file(config_path(one.root))["broker_role"] == "ASYNC_MASTER", "and stays one"


@pytest.mark.long
def test_a_slave_whose_log_is_damaged_is_no_master_that_takes_puts(make_engine):
    one = make_engine(ha_master_address="")
    one.start()
    for body in ("first", "second", "third"):
        assert run("put", one.root, "--topic", "T", body).code == 0
    one.stop()
    one.start(**SLAVE)
    segment = one.root / "commitlog" / ("0" * 20)
    flip(segment, segment.read_bytes().index(b"second"))
    done = run("promote", one.root)
    assert done.code == 6 and "but it takes no puts" in done.stdout and "note: " in done.stdout, done
    assert run("put", one.root, "--topic", "T", "x").code != 0
    assert run("stop", one.root).code in (0, 6)


def test_a_store_that_could_not_run_as_a_master_is_unchanged(make_engine):
    one = make_engine(dispatch_at="replicated", **SLAVE)
    one.start()
    supervisor = one.pid("supervisor")
    refused = run("promote", one.root)
    assert refused.code == 2 and "ha_listen_port" in refused.stderr
    assert one.pid("supervisor") == supervisor and "broker_role" not in read_file(config_path(one.root))


def test_a_slave_whose_offsets_another_process_holds_runs_on(make_engine, monkeypatch):
    one = make_engine(ha_master_address="", **SLAVE)
    one.start()
    supervisor = one.pid("supervisor")
    monkeypatch.setattr(durable_file, "LOCK_WAIT_S", 0.05)
    with durable_file.exclusive(ConsumerOffsets(one.root).path):
        refused = run("promote", one.root)
    assert refused.code == 5 and "another process has held" in refused.stderr, refused
    assert one.pid("supervisor") == supervisor and "broker_role" not in read_file(config_path(one.root))
    assert run("promote", one.root).code == 0
    with one.memory() as memory:
        one.semaphores.add(memory.identity.sysv_semaphore_id)


def test_a_slave_whose_secret_cannot_be_used_any_more_is_unchanged(make_engine, tmp_path):
    secret = Path(secret_file(tmp_path))
    one = make_engine(ha_secret_file=str(secret), ha_master_address="127.0.0.1:1", **SLAVE)
    with pyengine.Engine(one.root, **SMALL) as master, master.connect() as producer:
        producer.put("T", b"a slave without a record does not start without its master")
    one.start()
    supervisor = one.pid("supervisor")
    secret.chmod(0o644)
    refused = run("promote", one.root, "--timeout", "0", "--force")
    assert refused.code == 2 and "chmod 600" in refused.stderr, refused
    assert one.pid("supervisor") == supervisor and "broker_role" not in read_file(config_path(one.root))


@pytest.mark.parametrize(("words", "by", "told", "instead"), [
    (["--report-fd", "5"], BACKGROUND, None, None),
    ([], FOREGROUND, "kill -TERM 42", "kill -TERM 42"),
    (["--report-fd", "5", "--embedder-fd", "6"], EMBEDDED, "stop the program", "stop the program"),
    (["--no-children"], UNITS, "`systemctl stop pyengine@store.target pyengine-store@store.service`, `pyengine promote",
     "`systemctl restart pyengine@store.target`"),
])
def test_the_supervisors_command_line_tells_how_its_engine_was_started(words, by, told, instead):
    root = Path("/srv/store")
    assert started_by([str(root), *words, "--set", "broker_role=SLAVE"]) == by
    start = Start(42, by, {}, os.geteuid())
    if told:
        with pytest.raises(StoreBusyError) as refused:
            require_restartable(root, start, manual_steps(root, start, "SYNC_MASTER", []), "promote", root)
        assert told in str(refused.value) and f"pyengine promote {root} --role SYNC_MASTER" in str(refused.value)
        assert instead in take_over_steps(root, start)
    else:
        require_restartable(root, start, "", "promote", root)


@pytest.mark.parametrize(("uid", "name"), [(65534, "nobody"), (123_456_789, "'#123456789'")])
def test_the_engine_of_another_user_is_for_that_user_to_promote(uid, name):
    with pytest.raises(EngineError, match=f"`sudo -u {name} pyengine promote '/srv/my store'`"):
        require_restartable(Path("/srv/my store"), Start(42, BACKGROUND, {}, uid), "", "promote", Path("/srv/my store"))


def test_an_engine_that_another_program_keeps_is_left_to_it(make_engine, tmp_path):
    one = make_engine(ha_secret_file=secret_file(tmp_path), ha_master_address="127.0.0.1:1", ha_peers="127.0.0.1:2", **SLAVE)
    with pyengine.Engine(one.root, **SMALL) as master, master.connect() as producer:
        producer.put("T", b"a slave without a record does not start without its master")
    options = [word for name, value in one.settings.items() for word in ("--set", f"{name}={value}")]
    keeper = subprocess.Popen(command_line("start", one.root, "--foreground", *options), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=environment())
    try:
        eventually(lambda: is_run_by(one, keeper.pid), "it runs")
        with one.memory() as memory:
            one.semaphores.add(memory.identity.sysv_semaphore_id)
        refused = run("promote", one.root)
        assert refused.code == 5 and f"kill -TERM {keeper.pid}" in refused.stderr
        assert one.pid("supervisor") == keeper.pid
    finally:
        keeper.send_signal(signal.SIGTERM)
        keeper.wait(60)
    (told,) = re.findall("`pyengine (promote .*?)`", refused.stderr)
    assert run(*shlex.split(told)).code == 0, "the command that it names tells the old master, whose address was in no file"
    assert read_file(config_path(one.root))["ha_peers"] == "127.0.0.1:1, 127.0.0.1:2"
    assert "without broker_role and ha_master_address and ha_peers" in refused.stderr


def is_run_by(one, pid: int) -> bool:
    """A supervisor holds its lock before there is shared memory to tell of workers."""
    try:
        return supervisor_pid(one.root) == pid and bool(one.pids().get("writer"))
    except EngineUnavailableError:
        return False


def standing(owner, **lines):
    for name, value in lines.items():
        if name == "wrote":
            native.store_position(owner.control.wrote, value)
        else:
            native.store(owner.control.replicator, name, value)
    return _wait_until_caught_up(owner.control, 0.01)


def test_missing_bytes_are_those_the_master_announced_and_the_slave_has_not_written(make_owner):
    owner = make_owner(role=2)
    assert standing(owner, wrote=500) == SlaveProgress(False, 500, 0)
    assert standing(owner, master_end=500).missing_bytes == 0
    found = standing(owner, master_end=900)
    assert found == SlaveProgress(False, 500, 900) and found.missing_bytes == 400
    with pytest.raises(EngineError, match="400 bytes are missing here: it has its master's log up to 500, .* last known end is 900"):
        judge(found, False, [])
    notes: list[str] = []
    judge(found, True, notes)
    assert "400 bytes are missing" in notes[0] and "the last known end of its master's log is 900" in notes[1]


def test_a_stopped_slave_knows_the_last_end_of_its_masters_log(tmp_path):
    with pyengine.Engine(tmp_path / "store", **SMALL):
        pass
    ReplicationStateFile(tmp_path / "store").write(ReplicationState("SLAVE", 500, master_end=900))
    with pytest.raises(EngineError, match="400 bytes are missing"):
        promote_stopped(tmp_path / "store", {}, "ASYNC_MASTER", False, [])
    promote_stopped(tmp_path / "store", {}, "ASYNC_MASTER", True, [])
    assert ReplicationStateFile(tmp_path / "store").read().state == ReplicationState("ASYNC_MASTER", 500, term=1)


def test_a_master_that_lives_and_one_that_was_never_reached_are_told_apart():
    linked: list[str] = []
    judge(SlaveProgress(True, 10, 10), False, linked)
    silent: list[str] = []
    judge(SlaveProgress(False, 10, 0), False, silent)
    assert "is not informed: make sure that it takes no puts" in linked[0] and "has received nothing" in silent[0]


@pytest.mark.parametrize("text", ['broker_role = """\nSLAVE"""\n', "broker_role = 'SLAVE'\nspin = [0]\n"])
def test_an_engine_toml_that_cannot_be_changed_line_by_line_is_not_changed(tmp_path, text):
    path = tmp_path / "engine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        set_in_file(path, {"broker_role": "ASYNC_MASTER"})
    assert path.read_text() == text


def test_no_store_is_no_slave(tmp_path):
    assert run("promote", tmp_path / "nothing").code != 0
    assert not os.listdir(tmp_path)
