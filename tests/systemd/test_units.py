"""The systemd units: as the table of kinds has them, accepted and rated by systemd's own tools, and run by a real PID 1.

The guest scripts (*.sh here) print one line a fact, `ok` or `FAILED`. They run the commands of docs/systemd.md.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pyengine.engine import unit_files
from pyengine.engine.kinds import EVERY_MODE, KINDS, WorkerExit, kinds_for
from pyengine.engine.supervisor import STOP_TIMEOUT_S
from pyengine.errors import ExitCode
from pyengine.native import control as native
from pyengine.storage.config import config_path
from waiting import eventually

HERE = Path(__file__).parent
SOURCES = HERE.parents[1]
UNITS = SOURCES / "systemd"
INSTALL = SOURCES / "scripts" / "install-systemd.sh"
EXPOSURE_MAX = 2.0  # of 10; without hardening it is above 9


STORE_UNIT, UP_UNIT, METRICS_UNIT = unit_files.STORE_UNIT, "pyengine-up@.service", "pyengine-metrics@.service"
WORKER_UNITS = [unit_files.worker_unit(kind) for kind in KINDS]


# ---- the files --------------------------------------------------------------


def test_the_files_are_those_of_the_table():
    assert {path.name for path in UNITS.iterdir()} == {
        "pyengine.slice", "pyengine@.target", STORE_UNIT, UP_UNIT, METRICS_UNIT, *WORKER_UNITS}


def values(unit: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", (UNITS / unit).read_text(encoding="utf-8"), re.MULTILINE)


def test_every_kind_is_wanted_and_stops_before_what_finishes_its_work():
    target = values("pyengine@.target", "Wants")
    for kind in KINDS:
        name = unit_files.worker_unit(kind)
        assert name.replace("@.", "@%i.") in target
        [after] = values(name, "After")
        assert STORE_UNIT.replace("@.", "@%i.") in after
        for other in KINDS:
            assert (unit_files.worker_unit(other).replace("@.", "@%i.") in after) == (other.stop_rank > kind.stop_rank)
        assert values(name, "WatchdogSec") == [f"{kind.heartbeat_timeout_s:g}"]
    assert values(STORE_UNIT, "After") == []


def hardening(unit: str) -> list[str]:
    """Return the lines with which the unit drops rights: the paragraph that begins with NoNewPrivileges."""
    _, _, rest = (UNITS / unit).read_text(encoding="utf-8").partition("\nNoNewPrivileges=")
    return f"NoNewPrivileges={rest}".split("\n\n")[0].splitlines()


def test_each_unit_drops_the_same_rights_but_for_the_network():
    local = hardening(UP_UNIT)
    assert len(local) == 29 and {"PrivateNetwork=yes", "RestrictAddressFamilies=AF_UNIX", "IPAddressDeny=any"} <= set(local)
    networked = [line.replace("=AF_UNIX", "=AF_INET AF_INET6 AF_UNIX") for line in local if line != "PrivateNetwork=yes"]
    networked.insert(networked.index("IPAddressDeny=any") + 1, "IPAddressAllow=localhost")
    for kind in KINDS:
        on_network = kind.replicating or kind.serving or kind.serving_grpc
        assert hardening(unit_files.worker_unit(kind)) == (networked if on_network else local), kind.name
    assert hardening(STORE_UNIT) == hardening(METRICS_UNIT) == networked


def test_units_of_workers_differ_in_name_order_watchdog_condition_and_rights_only():
    common = None
    for kind in KINDS:
        text = (UNITS / unit_files.worker_unit(kind)).read_text(encoding="utf-8").partition("\nNoNewPrivileges=")[0]
        runs = f"ExecCondition=@PYTHON@ -P -m pyengine.engine.unit_files --runs {kind.name} /var/lib/pyengine/%i\n"
        is_conditional = kind.modes != EVERY_MODE or kind.replicating or kind.serving or kind.serving_grpc
        assert text.count("ExecCondition=") == text.count(runs) == is_conditional, kind.name
        text = text.replace(runs, "").replace(kind.name, "NAME").replace(f"WatchdogSec={kind.heartbeat_timeout_s:g}\n", "WatchdogSec=\n")
        text = re.sub("^After=.*$", "After=", text, flags=re.MULTILINE)
        common = common or text
        assert text == common, kind.name
    assert common is not None and f"RestartPreventExitStatus={int(WorkerExit.USAGE)}\n" in common
    assert values(STORE_UNIT, "RestartPreventExitStatus") == [f"{int(WorkerExit.USAGE)} {int(ExitCode.CORRUPTION)}"]
    assert values(STORE_UNIT, "TimeoutStopSec") == [f"{STOP_TIMEOUT_S:g}"]
    for line in ("Type=notify", "NotifyAccess=main", "User=@USER@", "Slice=pyengine.slice", "StateDirectory=pyengine/%i", "Restart=always",
                 "StateDirectoryMode=0700", "RestartSec=200ms", "EnvironmentFile=-/etc/pyengine/%i.env",
                 "TimeoutAbortSec=5", "LimitMEMLOCK=infinity", "LimitNOFILE=1048576", "OOMScoreAdjust=-500"):
        key, _, value = line.partition("=")
        assert [values(unit, key) for unit in (STORE_UNIT, "pyengine-writer@.service")] == [[value]] * 2, line
    assert values(STORE_UNIT, "WatchdogSec") == ["30"]
    assert values(STORE_UNIT, "TimeoutStartSec") == ["infinity"] and values(STORE_UNIT, "ExecReload") == ["kill -HUP $MAINPID"]


def test_the_memory_of_a_dead_engine_does_not_say_which_kinds_run(make_engine, monkeypatch):
    engine = make_engine()
    engine.start()
    monkeypatch.setenv("PYENGINE_TRANSIENT_STORE_POOL_ENABLE", "true")
    assert not unit_files.runs("committer", engine.root)
    engine.kill_all()
    monkeypatch.setattr(unit_files, "living_kinds", lambda *_: {native.SUPERVISOR})  # it recovers the store
    eventually(lambda: unit_files.runs("committer", engine.root), "the dead supervisor has ended")  # its locks end a moment earlier


def test_a_kind_of_one_mode_is_run_only_there(tmp_path, monkeypatch):
    assert not unit_files.runs("committer", tmp_path)
    assert unit_files.runs("writer", tmp_path)
    monkeypatch.setenv("PYENGINE_TRANSIENT_STORE_POOL_ENABLE", "true")
    assert unit_files.runs("committer", tmp_path)
    assert not unit_files.runs("replicator", tmp_path)
    monkeypatch.setenv("PYENGINE_BROKER_ROLE", "SYNC_MASTER")
    assert unit_files.runs("replicator", tmp_path)
    assert not unit_files.runs("gateway", tmp_path)
    monkeypatch.setenv("PYENGINE_GATEWAY_ENABLE", "true")
    assert unit_files.runs("gateway", tmp_path)


def test_a_kind_that_runs_is_restarted_whatever_the_settings_say_by_now(make_engine, monkeypatch):
    engine = make_engine("pool")
    engine.start()
    config_path(engine.root).write_text("flush_disk_typ = 1\n")
    monkeypatch.setenv("PYENGINE_GATEWAY_ENABLE", "true")
    assert unit_files.runs("committer", engine.root) and not unit_files.runs("gateway", engine.root)


def test_a_start_waits_for_each_part_and_then_says_what_is_not_up():
    [after] = values(UP_UNIT, "After")
    for name in [STORE_UNIT, *WORKER_UNITS]:
        assert name.replace("@.", "@%i.") in after.split()
        [seconds] = values(name, "JobRunningTimeoutSec")
        assert 0 < int(seconds) <= 600
    up = UP_UNIT.replace("@.", "@%i.")
    assert values("pyengine@.target", "Requires") == values("pyengine@.target", "After") == [up], "and binds no part to it"


def test_each_part_that_is_not_up_is_named_with_what_it_said_last(make_engine, tmp_path, monkeypatch):
    manager = tmp_path / "bin" / "systemctl"
    manager.parent.mkdir()
    manager.write_text('#!/bin/sh\necho "cannot start: the reason of $4"\n')
    manager.chmod(0o755)
    monkeypatch.setenv("PATH", f"{manager.parent}:{os.environ['PATH']}")
    engine = make_engine()
    store = "pyengine-store@demo.service is not up: cannot start: the reason of pyengine-store@demo.service"
    assert unit_files.why_not_up("demo", engine.root) == [store]
    engine.start()
    assert unit_files.why_not_up("demo", engine.root) == []
    engine.kill("supervisor", signal.SIGSTOP)
    engine.kill("cleaner")
    eventually(lambda: unit_files.why_not_up("demo", engine.root) == [store.replace("-store", "-cleaner")], "the cleaner is named")
    engine.kill("supervisor", signal.SIGCONT)
    eventually(lambda: unit_files.why_not_up("demo", engine.root) == [], "it is started again")
    engine.stop()
    manager.unlink()
    monkeypatch.setenv("PATH", str(manager.parent))
    assert unit_files.why_not_up("demo", engine.root) == [f"{unit} is not up: journalctl -u {unit}" for unit in [store.split()[0]]]


def install(folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([INSTALL, "--units", folder, *more], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(SOURCES), **environment})


def test_installing_fills_in_python_and_user_and_uninstalling_removes_all(tmp_path, tmp_path_factory):
    user = pwd.getpwuid(os.getuid()).pw_name
    python = tmp_path_factory.mktemp("odd") / "a python, 50% \\ &c"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    escaped = str(python).replace("%", "%%").replace("\\", "\\x5c").replace(" ", "\\x20").replace("&", "\\x26")
    (tmp_path / "other.service").write_text("not ours\n")
    (tmp_path / "pyengine-own.service").write_text("not ours either\n")
    (tmp_path / "pyengine-former@.service").write_text(
        "# Made by `python -m pyengine.engine.unit_files systemd` from pyengine/engine/kinds.py: change it there.\n")
    for name, unit in (("multi-user.target.wants", "pyengine@demo.target"),
                       ("pyengine@demo.target.wants", "pyengine-metrics@demo.service")):
        (tmp_path / name).mkdir()
        (tmp_path / name / unit).symlink_to(tmp_path / unit.replace("@demo", "@"))
    done = install(tmp_path, "--python", python, "--user", user, "--force")  # the odd one is below a temporary folder
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "pyengine-former@.service").exists(), "of an earlier version"
    text = (tmp_path / "pyengine-writer@.service").read_text()
    assert f"ExecStart={escaped} -P -m pyengine.workers.writer /var/lib/pyengine/%i" in text and f"User={user}" in text
    assert not [path for path in tmp_path.glob("pyengine*[!s]") if "@PYTHON@" in path.read_text() or "@USER@" in path.read_text()]
    done = install(tmp_path, "--uninstall")
    assert done.returncode == 0, done.stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["multi-user.target.wants", "other.service", "pyengine-own.service"]
    assert not list((tmp_path / "multi-user.target.wants").iterdir())


@pytest.mark.parametrize(("arguments", "code", "sentence"), [
    (("--nonsense",), 2, "scripts/install-systemd.sh"),
    (("--python", "/opt/py$thon"), 1, "dollar sign"),
    (("--python", "bin/python"), 1, "absolute path"),
    (("--python", "/bin/true"), 0, None),
    (("--python", "/no/such/python"), 1, "is not a program"),
    (("--python", "/bin"), 1, "is not a program"),
    (("--python", "/bin/false"), 1, "cannot import pyengine"),
    (("--python", "/bin/true", "--user", "-r"), 1, "is no name of a system user"),
    (("--python", "/bin/true", "--units", "units"), 1, "units: give an absolute path"),
])
def test_wrong_arguments_of_the_installer(tmp_path, arguments, code, sentence):
    done = install(tmp_path, "--user", pwd.getpwuid(os.getuid()).pw_name, *arguments)
    assert done.returncode == code, done.stderr
    if sentence:
        assert sentence in done.stderr
        assert list(tmp_path.iterdir()) == []


def python_in(folder: Path) -> Path:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} \"$@\"\n")
    python.chmod(0o755)
    return python


def test_a_python_that_private_temporary_folders_hide_is_refused(tmp_path):
    """PrivateTmp=yes: every unit would end with 203/EXEC, again and again."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        arguments = ("--python", python_in(Path(folder)), "--user", pwd.getpwuid(os.getuid()).pw_name)
        done = install(tmp_path, *arguments)
        assert done.returncode == 1 and "PrivateTmp=yes" in done.stderr and "/opt/pyengine" in done.stderr
        assert list(tmp_path.iterdir()) == []
        done = install(tmp_path, *arguments, "--force")
        assert done.returncode == 0 and "warning: the units cannot see" in done.stderr


@pytest.mark.root
def test_a_python_in_a_folder_that_is_closed_to_the_user_is_refused(tmp_path):
    with tempfile.TemporaryDirectory(dir="/run") as folder:  # mode 0700, as a home may be
        arguments = ("--python", python_in(Path(folder)), "--user", "nobody")
        assert install(tmp_path, *arguments).returncode == 1 and list(tmp_path.iterdir()) == []
        assert f"{folder}/ is closed to that user" in install(tmp_path, *arguments, "--force").stderr


@pytest.mark.root
def test_the_installer_never_runs_the_python_of_another_user_as_root(tmp_path):
    """Its owner could do anything then; and with root's terminal it could type commands into it."""
    with tempfile.TemporaryDirectory(dir="/run") as folder:
        os.chmod(folder, 0o755)
        ran = Path(folder) / "ran"
        ran.touch()
        os.chmod(ran, 0o666)
        python = Path(folder) / "python"
        python.write_text(f"#!/bin/sh\nid -u >> {ran}\ntest -t 0 && echo terminal >> {ran}\nexec {sys.executable} \"$@\"\n")
        python.chmod(0o755)
        install(tmp_path, "--python", python, "--user", "nobody", "--force")
        assert set(ran.read_text().split()) == {str(pwd.getpwnam("nobody").pw_uid)}


@pytest.mark.root
@pytest.mark.parametrize("owner, mode", [(65534, 0o755), (0, 0o777)])
def test_units_are_not_installed_where_another_user_can_write(tmp_path, owner, mode):
    os.chmod(tmp_path, mode)
    os.chown(tmp_path, owner, owner)
    done = install(tmp_path, "--user", "root", "--python", sys.executable)
    assert done.returncode == 1 and "give a directory that only you may write in" in done.stderr and list(tmp_path.iterdir()) == []


def test_an_installed_unit_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "units").mkdir()
    (tmp_path / "file").write_text("mine")
    for name in ("pyengine.slice", "pyengine.slice.new"):
        (tmp_path / "units" / name).symlink_to(tmp_path / "file")
    done = install(tmp_path / "units", "--user", pwd.getpwuid(os.getuid()).pw_name, "--python", sys.executable, "--force")
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "mine" and not (tmp_path / "units/pyengine.slice").is_symlink()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze not found")
def test_systemd_rates_the_hardening_well(tmp_path):
    assert install(tmp_path, "--python", sys.executable, "--user", pwd.getpwuid(65534).pw_name, "--force").returncode == 0
    for unit in [STORE_UNIT, METRICS_UNIT, *WORKER_UNITS]:
        path = tmp_path / unit.replace("@.", "@demo.")
        (tmp_path / unit).rename(path)
        rated = subprocess.run(["systemd-analyze", "security", "--offline=yes", "--no-pager", path], capture_output=True,
                               text=True)
        if "Unknown" in rated.stderr or "unrecognized option" in rated.stderr:
            pytest.skip("this systemd-analyze cannot rate a file")
        found = re.search(r"Overall exposure level for .*: ([\d.]+)", rated.stdout)
        assert found and float(found[1]) <= EXPOSURE_MAX, rated.stdout[-2000:] + rated.stderr


def test_the_commands_of_the_page_are_those_that_the_guests_run():
    page = (SOURCES / "docs" / "systemd.md").read_text(encoding="utf-8")
    guests = "".join(path.read_text(encoding="utf-8") for path in HERE.glob("*.sh"))
    lines = [line.split(" #")[0].strip() for block in re.findall(r"^```bash\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
             for line in block.splitlines()]
    commands = [line for line in lines if line and not line.startswith(("sudo ", "journalctl ", "scripts/"))]
    assert len(commands) >= 4
    for command in commands:
        assert command in guests, command


SAY = """
import sys
from pathlib import Path
from pyengine.engine import log_file
from pyengine.events import Event
log_file.JOURNAL = sys.argv[1]
log_file.log_event(1, Path("/a store"), Event.START_FAILED, "first\\nsecond")
log_file.log_event(3, None, Event.PUTS_TAKEN, "third")
"""


def say(tmp_path: Path, *, is_journal: bool) -> str:
    """Return what reached the stderr of a process that says two things; `is_journal`: it is told that its stderr is the journal."""
    path = tmp_path / f"stderr-{is_journal}"
    with path.open("wb") as stderr:
        status = os.fstat(stderr.fileno())
        subprocess.run([sys.executable, "-c", SAY, str(tmp_path / "journal")], stderr=stderr, check=True,
                       env={**os.environ, "PYTHONPATH": str(SOURCES),
                            "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + (not is_journal)}"})
    return path.read_text()


def fields_of(record: bytes) -> dict[str, str]:
    """Return the fields of a journal record, in which each value may follow its length."""
    fields = {}
    while record:
        name, record = record.split(b"\n", 1)
        (size,) = struct.unpack_from("<Q", record)
        fields[name.decode()] = record[8:8 + size].decode()
        assert record[8 + size:9 + size] == b"\n"
        record = record[9 + size:]
    return fields


def test_lines_of_workers_become_journal_records_with_fields(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.setblocking(False)
        assert say(tmp_path, is_journal=True) == ""
        first, second = fields_of(journal.recv(65536)), fields_of(journal.recv(65536))
        assert first == {"MESSAGE": "first\nsecond", "PRIORITY": "3", "SYSLOG_IDENTIFIER": "pyengine-writer",
                         "EVENT": "START_FAILED", "WORKER": "writer", "STORE": "/a store"}
        assert second == {"MESSAGE": "third", "PRIORITY": "6", "SYSLOG_IDENTIFIER": "pyengine-flusher",
                          "EVENT": "PUTS_TAKEN", "WORKER": "flusher"}
        said = say(tmp_path, is_journal=False)  # elsewhere a line says when, who and which event
        assert re.fullmatch(r"\S+Z writer\[\d+\] START_FAILED first\nsecond\n\S+Z flusher\[\d+\] PUTS_TAKEN third\n", said)


def test_lines_reach_a_journal_that_takes_no_records_with_their_level(tmp_path):
    assert say(tmp_path, is_journal=True) == "<3>first\n<3>second\n<6>third\n"


# ---- a real systemd ----------------------------------------------------------


def boot(tmp_path: Path, script: str, *options: str, limit_s: int = 240, **variables: str) -> str:
    """Run a guest script in a booted systemd; what it printed. All of its facts must hold."""
    everywhere = list(kinds_for(native.MODE_MAPPED, False))
    names = " ".join(kind.name for kind in everywhere)
    order = " ".join(kind.name for kind in sorted(everywhere, key=lambda kind: kind.stop_rank))
    settings = {"PYTHON": sys.executable, "SOURCES": str(SOURCES), "KINDS": names, "ORDER": order, **variables}
    whole = tmp_path / script
    whole.write_text("".join(["#!/bin/bash\n", *(f"{name}='{value}'\n" for name, value in settings.items()),
                              (HERE / "prelude.sh").read_text(), (HERE / script).read_text()]))
    out = tmp_path / f"{script}.out"
    out.mkdir()
    base = Path(sys.executable).resolve()
    run = subprocess.run([HERE / "boot.sh", "-t", str(limit_s), "-r", str(SOURCES), "-r", sys.executable, "-r", str(base),
                          *options, out, whole], capture_output=True, text=True, timeout=limit_s + 60)
    told = run.stdout + run.stderr
    if run.returncode:
        journal = (out / "journal.txt").read_text() if (out / "journal.txt").exists() else ""
        raise AssertionError(told + (out / "console.txt").read_text()[-2000:] + journal[-20000:])
    assert "FAILED" not in told and told.count("ok ") > 2, told
    return told


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(400)
def test_an_engine_of_units_is_started_killed_hung_stopped_upgraded_and_removed(tmp_path):
    boot(tmp_path, "lifecycle.sh")


@pytest.mark.long
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(400)
def test_stores_side_by_side_and_limits_that_are_too_low(tmp_path):
    told = boot(tmp_path, "limits.sh")
    exposures = dict(re.findall(r"^exposure (\w+) ([\d.]+)$", told, re.MULTILINE))
    assert len(exposures) == len(KINDS) + 2 and all(float(value) <= EXPOSURE_MAX for value in exposures.values()), exposures


@pytest.mark.long
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(700)
def test_deaths_in_a_row_a_store_that_is_busy_and_odd_places_are_got_over(tmp_path):
    boot(tmp_path, "persistent.sh", limit_s=600)


@pytest.mark.ci
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [pytest.param("orderly", marks=pytest.mark.long), "cut"])
def test_a_reboot_keeps_what_was_acknowledged(tmp_path, how):
    stores = tmp_path / "stores"
    stores.mkdir()
    shared = ("-v", f"{stores}:/var/lib/pyengine")
    boot(tmp_path, "before_reboot.sh", *shared, HOW=how)
    boot(tmp_path, "after_reboot.sh", *shared, HOW=how)


@pytest.mark.long
@pytest.mark.root
@pytest.mark.systemd
@pytest.mark.timeout(1000)
def test_the_drills_use_installed_units_and_leave_nothing(tmp_path):
    boot(tmp_path, "drills.sh", limit_s=900)
