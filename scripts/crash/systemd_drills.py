"""Drills under systemd: each does to an engine of units what can happen to it, under producers; then an audit.

    python -m crash.systemd_drills [--drill NAME]... [--rounds 1] [--seed N] [--mode async|pool|sync] [--json] [--list]

Each drill has a store of its own, pyengine@drill-....target, with the units that scripts/install-systemd.sh has installed, and two
producers that list what was acknowledged. It prints what it does and sees. Then it stops the units in order, looks for every
message of the lists by `pyengine check --acked` and a reader, and removes the store, its settings and its drop-ins.

Exit 0: every drill held. 1: one did not; its store is kept and named. 2: no units are installed.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from crash.audit import read_acked
from crash.disk_full_rounds import take_room
from crash.report import INTERRUPTED, Summary, crash_parser, ended_in_order, finish, tell
from crash.rounds import CrashRun
from pyengine.cli.torture import HangError, kill, remove_memory, state_of, wait_for
from pyengine.engine.kinds import kinds_for
from pyengine.engine.unit_files import STORE_UNIT
from pyengine.errors import EngineError, ExitCode
from pyengine.ipc.control_block import MODE_NUMBERS

STORES = Path("/var/lib/pyengine")
SETTINGS = Path("/etc/pyengine")
DROP_INS = Path("/run/systemd/system")  # a reboot removes them
SHARED_MEMORY = Path("/dev/shm")
RUN = Path("/run")
GUEST = "PYENGINE_DRILLS_IN_GUEST"  # set if this systemd runs for the drills only
BACK_S = 90.0
STOP_S = 120.0
COMMAND_S = 120.0
STORE_KIND = "store"
WATCHDOG_S = 2
# Less than any Python process needs, so that the kernel kills it.
MEMORY_MAX = "4M"
DISK_BYTES = 1 << 30
SMALL_MEMORY_BYTES = 64 << 20
BACKED_UP_MIN = 1000


def systemctl(*words: str, check: bool = True) -> str:
    """Return what systemctl prints; EngineError with its message if it fails."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, timeout=STOP_S)
    if check and done.returncode:
        raise EngineError(f"systemctl {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def unit_user() -> str:
    """Return the user of the installed units; EngineError if there are none."""
    user = systemctl("show", "-P", "User", STORE_UNIT.replace("@.", "@any."))
    if not user:
        raise EngineError("the units are not installed: scripts/install-systemd.sh --python PYTHON")
    return user


class Drill(CrashRun):
    """One store of units. A subclass has NAME and DOES, its name and description, and does in strike() what they say."""

    NAME: ClassVar[str]
    DOES: ClassVar[str]
    MODE: ClassVar[str | None] = None  # the only flush mode that keeps its promise in this drill

    def __init__(self, scratch: Path, mode: str, seed: int) -> None:
        mode = self.MODE or mode
        self.instance = f"drill-{self.NAME}-{secrets.token_hex(3)}"
        super().__init__(STORES / self.instance, scratch, self.NAME, mode, seed)
        self.user = unit_user()
        self.kinds = [STORE_KIND, *(kind.name for kind in kinds_for(MODE_NUMBERS[mode], False))]
        self._drop_ins: list[Path] = []
        self._has_units = False

    # -- units

    def unit(self, kind: str) -> str:
        return f"pyengine-{kind}@{self.instance}.service"

    @property
    def units(self) -> list[str]:
        return [self.unit(kind) for kind in self.kinds]

    @property
    def target(self) -> str:
        return f"pyengine@{self.instance}.target"

    def shown(self, kind: str, name: str) -> str:
        return systemctl("show", "-P", name, self.unit(kind))

    def pid(self, kind: str) -> int:
        return int(self.shown(kind, "MainPID"))

    def pids(self) -> dict[str, int]:
        return {kind: self.pid(kind) for kind in self.kinds}

    def is_active(self, kind: str) -> bool:
        return self.shown(kind, "ActiveState") == "active"

    def wait_back(self, kind: str, pid: int) -> None:
        """Wait until another process than `pid` is ready."""
        wait_for(f"{self.unit(kind)} is back", lambda: self.pid(kind) not in (0, pid) and self.is_active(kind), BACK_S)

    def wait_all_active(self) -> None:
        """Wait until all units are ready and producers get answers."""
        wait_for(f"all units of {self.instance} are active", lambda: all(map(self.is_active, self.kinds)), BACK_S)
        self.make_producers()
        self.wait_for_acks()

    def kill_units(self) -> None:
        """Kill all units at once."""
        for kind in self.rng.sample(self.kinds, len(self.kinds)):
            systemctl("kill", "-s", "KILL", self.unit(kind))
            self.summary.kills += 1

    def wait_all_back(self, before: dict[str, int]) -> None:
        for kind, pid in before.items():
            self.wait_back(kind, pid)

    def drop_in(self, kind: str, *lines: str) -> Path:
        """Add lines to [Service] of one unit, until forget() or the end of the drill."""
        path = DROP_INS / f"{self.unit(kind)}.d" / "drill.conf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[Service]\n" + "".join(f"{line}\n" for line in lines))
        self._drop_ins.append(path)
        systemctl("daemon-reload")
        return path

    def forget(self, path: Path) -> None:
        """Remove a drop-in."""
        shutil.rmtree(path.parent)
        self._drop_ins.remove(path)
        systemctl("daemon-reload")

    def as_user(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run `pyengine WORDS...` as the units' user."""
        entry = pwd.getpwnam(self.user)
        command = [sys.executable, "-P", "-m", "pyengine", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, cwd="/", user=entry.pw_uid,
                              group=entry.pw_gid, extra_groups=[])

    def status(self) -> dict:
        return json.loads(self.as_user("status", self.store, "--json").stdout)

    def last_words(self, kind: str) -> str:
        """Return the last warning or error of the unit's process."""
        command = ["journalctl", f"_SYSTEMD_UNIT={self.unit(kind)}", "-p", "warning", "-o", "cat", "-n", "1", "--no-pager"]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S).stdout.strip()

    def wait_for_words(self, *expected: str) -> str:
        """Return the reason why the store unit does not start, once it has one of these words."""
        def said() -> str:
            words = self.last_words(STORE_KIND)
            return words if any(one in words for one in expected) else ""

        try:
            return wait_for(f"the start names {' or '.join(expected)}", said, BACK_S)
        except HangError:
            self.fail(f"the start does not name the reason: {self.last_words(STORE_KIND)}")
            return ""

    def fail(self, sentence: str) -> None:
        tell(f"  FAILED: {sentence}")
        self.failures.append(sentence)

    # -- the engine, as KillRounds has it

    def prepare(self) -> None:
        """Called before the first start."""

    def start_engine(self) -> dict:
        if not self._has_units:
            self.prepare()
            self._has_units = True
        SETTINGS.mkdir(exist_ok=True)
        values = {f"PYENGINE_{name.upper()}": value for name, value in self.settings.items()}
        if GUEST in os.environ:
            values["PYTHONPATH"] = os.environ["PYTHONPATH"]
        (SETTINGS / f"{self.instance}.env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
        systemctl("start", self.target)
        return {}

    def stop_engine(self) -> None:
        systemctl("stop", self.target, self.unit(STORE_KIND))
        if (self.store / "abort").exists():
            self.fail(f"{self.store}/abort is there after an orderly stop")

    def settle(self) -> None:
        super().settle()
        tell(f"  all units are stopped in order, and {self.acked_messages():,} acknowledged messages are looked for")

    def end_round(self) -> None:
        self.wait_all_active()
        super().end_round()

    def wait_for_acks(self) -> None:
        self.ack_timeout_s = BACK_S
        super().wait_for_acks()

    def kill_remaining(self) -> None:
        """Kill all units, also those of an interrupted run, without an orderly stop."""
        if self._has_units:
            systemctl("stop", "--no-block", self.target, *self.units, check=False)
            systemctl("kill", "-s", "KILL", *self.units, check=False)
            wait_for("no unit is left", lambda: not systemctl(
                "list-units", "--plain", "--no-legend", "--state=active,activating,deactivating", self.target, *self.units, check=False))
            systemctl("reset-failed", self.target, self.unit("up"), *self.units, check=False)
        for path in list(self._drop_ins):
            self.forget(path)

    def leave(self, *, held: bool) -> None:
        (SETTINGS / f"{self.instance}.env").unlink(missing_ok=True)
        if self.store.exists():
            if held:
                shutil.rmtree(self.store)
            else:
                shutil.move(self.store, self.scratch / "store")


class Killed(Drill):
    NAME = "kill"
    DOES = "SIGKILL to each part, then to all of them at once"

    def strike(self) -> None:
        for kind in self.rng.sample(self.kinds, len(self.kinds)):
            before = self.pids()
            kill(before[kind])
            self.summary.kills += 1
            self.wait_back(kind, before[kind])
            others = {other: pid for other, pid in self.pids().items() if other != kind}
            if others != {other: pid for other, pid in before.items() if other != kind}:
                self.fail(f"with the {kind} others were replaced: {before} became {self.pids()}")
            self.wait_for_acks()
            tell(f"  {kind} {before[kind]} killed: replaced by {self.pid(kind)}, the others were left alone, puts go on")
        before, epoch = self.pids(), self.status()["epoch"]
        self.kill_units()
        self.wait_all_back(before)
        self.wait_for_acks()
        tell(f"  all {len(before)} killed at once: recovered, epoch {epoch} became {self.status()['epoch']}, puts go on")


class Terminated(Drill):
    NAME = "term"
    DOES = "SIGTERM to each part, as an operator or another program might send it"

    def strike(self) -> None:
        for kind in self.rng.sample(self.kinds, len(self.kinds)):
            before = self.pids()
            os.kill(before[kind], signal.SIGTERM)
            self.summary.kills += 1
            self.wait_back(kind, before[kind])
            self.make_producers()
            self.wait_for_acks()
            replaced = [other for other, pid in self.pids().items() if pid != before[other]]
            tell(f"  {kind} {before[kind]} ended: replaced {', '.join(replaced)}, puts go on")
            self.wait_all_active()


class Stopped(Drill):
    NAME = "stop"
    DOES = f"SIGSTOP to each part: resumed, then left so until the watchdog ({WATCHDOG_S} s here) replaces it"

    def prepare(self) -> None:
        for kind in self.kinds:
            self.drop_in(kind, f"WatchdogSec={WATCHDOG_S}", "TimeoutAbortSec=1")

    def strike(self) -> None:
        for kind in self.rng.sample(self.kinds, len(self.kinds)):
            pid = self.pid(kind)
            os.kill(pid, signal.SIGSTOP)
            wait_for(f"the {kind} is stopped", lambda pid=pid: state_of(pid) == "T")
            os.kill(pid, signal.SIGCONT)
            self.wait_for_acks()
            os.kill(pid, signal.SIGSTOP)
            wait_for(f"the {kind} is stopped", lambda pid=pid: state_of(pid) == "T")
            self.summary.kills += 1
            self.wait_back(kind, pid)
            self.wait_for_acks()
            tell(f"  {kind} {pid} stopped: resumed, it goes on; left stopped, the watchdog replaced it by {self.pid(kind)}")


class OutOfMemory(Drill):
    NAME = "oom"
    DOES = f"a memory limit of {MEMORY_MAX} on each part, for which the kernel kills it until the limit is gone"

    def strike(self) -> None:
        for kind in self.rng.sample(self.kinds, len(self.kinds)):
            before, killed = self.pid(kind), oom_kills()
            limit = self.drop_in(kind, f"MemoryMax={MEMORY_MAX}", f"MemoryLimit={MEMORY_MAX}")
            kill(before)
            self.summary.kills += 1
            wait_for(f"the kernel kills the {kind}", lambda killed=killed: oom_kills() >= killed + 2, BACK_S)
            if self.is_active(kind):
                self.fail(f"the {kind} is active with {MEMORY_MAX} of memory")
            self.forget(limit)
            self.wait_back(kind, before)
            self.wait_for_acks()
            self.summary.kills += (times := oom_kills() - killed)
            tell(f"  {kind}: killed {times} times for want of memory; without the limit it is back, puts go on")


def oom_kills() -> int:
    """Return the number of processes that this kernel has killed for lack of memory."""
    return int(dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())["oom_kill"])


class ReadOnly(Drill):
    NAME = "read-only"
    DOES = "an ext4 that an error turns read-only under the store (errors=remount-ro), then a start on a read-only mount"
    MODE = "sync"  # unsynced bytes are lost with the kernel's pages, as in a power cut

    def prepare(self) -> None:
        self._image = self.scratch / "ext4"
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        run("mkfs.ext4", "-q", self._image)
        self.store.mkdir(parents=True)
        self._mount()
        entry = pwd.getpwnam(self.user)
        os.chown(self.store, entry.pw_uid, entry.pw_gid)
        self.store.chmod(0o700)
        (self.store / "lost+found").rmdir()

    def strike(self) -> None:
        device = Path(run("findmnt", "-n", "-o", "SOURCE", self.store)).name
        with sys_folder(self.scratch / "sys") as folder:
            (folder / "fs" / "ext4" / device / "trigger_fs_error").write_text("drill")
        told = wait_for("status says that the store is read-only", lambda: self._says("read_only"), BACK_S)
        tell(f"  {device} turned read-only: {told['summary']}")
        self.end_producers()
        systemctl("stop", self.target, *self.units, check=False)
        systemctl("reset-failed", self.target, *self.units, check=False)
        run("umount", self.store)
        run("e2fsck", "-fy", self._image, codes=(0, 1))
        self._mount()
        run("mount", "-o", "remount,ro", self.store)
        systemctl("start", "--no-block", self.target)
        words = self.wait_for_words("ead-only file system")
        tell(f"  repaired and mounted read-only, the start says: {words}")
        run("mount", "-o", "remount,rw", self.store)
        self.wait_all_active()
        tell("  mounted read-write: it came up by itself, puts go on")

    def _says(self, state: str) -> dict | None:
        found = self.status()
        return found if found["state"] == state else None

    def _mount(self) -> None:
        run("mount", "-o", "loop,errors=remount-ro", self._image, self.store)

    def leave(self, *, held: bool) -> None:
        try:
            if not held and self.store.is_mount():
                shutil.copytree(self.store, self.scratch / "store")
        finally:
            if self.store.is_mount():
                run("umount", "--lazy", self.store)
            shutil.rmtree(self.store, ignore_errors=True)
            super().leave(held=held)


@contextmanager
def sys_folder(folder: Path) -> Iterator[Path]:
    """Mount a /sys that can be written to, since that of a guest cannot."""
    folder.mkdir(exist_ok=True)
    run("mount", "-t", "sysfs", "sysfs", folder)
    try:
        yield folder
    finally:
        run("umount", folder)


def run(*words: object, codes: Sequence[int] = (0,)) -> str:
    """Return what a command prints; EngineError with its message if it fails."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode not in codes:
        raise EngineError(f"{' '.join(map(str, words))} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


class MemoryFull(Drill):
    NAME = "shm-full"
    DOES = "/dev/shm full (with --here a tmpfs of its own, by shm_directory): puts, a killed worker, a new producer, all killed, a start"

    def __init__(self, scratch: Path, mode: str, seed: int) -> None:
        super().__init__(scratch, mode, seed)
        self._folder = SHARED_MEMORY if GUEST in os.environ else RUN / self.instance  # a unit has a /tmp of its own
        self._ballast = self._folder / f"pyengine-{self.instance}"

    def prepare(self) -> None:
        if GUEST in os.environ:
            run("mount", "-o", f"remount,size={SMALL_MEMORY_BYTES}", self._folder)
            return
        self._folder.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"mode=1777,size={SMALL_MEMORY_BYTES}", "tmpfs", self._folder)
        self.settings["shm_directory"] = self._folder
        for kind in self.kinds:
            self.drop_in(kind, f"ReadWritePaths={self._folder}")

    def strike(self) -> None:
        take_room(self._ballast)
        self.wait_for_acks()
        tell(f"  {self._folder} is full: puts of producers that are connected go on")
        kind = self.rng.choice([kind for kind in self.kinds if kind != STORE_KIND])
        before = self.pids()
        kill(before[kind])
        self.summary.kills += 1
        self.wait_back(kind, before[kind])
        self.wait_for_acks()
        tell(f"  {kind} killed: it is back without room")
        refused = self.as_user("put", self.store, "--topic", "crash-a", "refused")
        if refused.returncode == 0 or "Traceback" in refused.stderr:
            self.fail(f"a new producer without room for its ring ended with {refused.returncode}: {refused.stderr[-500:]}")
        tell(f"  a new producer is refused: {refused.stderr.strip()}")
        before = self.pids()
        self.kill_units()
        self.wait_all_back(before)
        self.wait_for_acks()
        tell("  all killed: they are back in the room that they had")
        self.end_producers()
        self.stop_engine()
        take_room(self._ballast)
        systemctl("start", "--no-block", self.target)
        words = self.wait_for_words("no room in", "No space left")
        tell(f"  all stopped, and no room at all: the start says: {words}")
        self._ballast.unlink()
        self.wait_all_active()
        tell("  with room again it came up by itself, puts go on")

    def kill_remaining(self) -> None:
        super().kill_remaining()
        self._ballast.unlink(missing_ok=True)

    def leave(self, *, held: bool) -> None:
        remove_memory(self.store)
        if GUEST in os.environ:
            run("mount", "-o", "remount,size=50%", self._folder)
        elif self._folder.exists():
            if self._folder.is_mount():
                run("umount", "--lazy", self._folder)
            self._folder.rmdir()
        super().leave(held=held)


class Neighbour(Drill):
    """The other store of two-stores, to which nothing is done."""

    NAME = "neighbour"
    DOES = "nothing"


class TwoStores(Drill):
    NAME = "two-stores"
    DOES = "two stores on one host: what is killed or stopped in one does not reach the other"

    def __init__(self, scratch: Path, mode: str, seed: int) -> None:
        super().__init__(scratch, mode, seed)
        (scratch / "neighbour").mkdir()
        self._other = Neighbour(scratch / "neighbour", mode, seed + 1)

    def prepare(self) -> None:
        self._other.start_engine()
        self._other.make_producers()
        self._other.wait_for_acks()

    def strike(self) -> None:
        other = self._other
        untouched, epoch = other.pids(), other.status()["epoch"]
        before = self.pids()
        for pid in before.values():
            os.kill(pid, signal.SIGSTOP)
        other.wait_for_acks()
        tell(f"  all {len(before)} processes of {self.instance} stopped: puts to {other.instance} go on")
        self.kill_units()
        other.wait_for_acks()
        self.wait_all_back(before)
        self.wait_for_acks()
        if (other.pids(), other.status()["epoch"]) != (untouched, epoch):
            self.fail(f"{other.instance} was not left alone: {untouched}, epoch {epoch}, became {other.pids()}")
        tell(f"  all of them killed: they are back, {other.instance} has the same processes and the same epoch")

    def settle(self) -> None:
        super().settle()
        self._other.settle()

    def stop_engine(self) -> None:
        self._other.stop_engine()
        super().stop_engine()

    def check_store(self, *, final: bool = False) -> None:
        self._other.check_store(final=final)
        super().check_store(final=final)
        ours, theirs = self.summary, self._other.summary
        ours.acknowledged += theirs.acknowledged
        ours.checked += theirs.checked
        ours.lost += theirs.lost
        ours.failures += theirs.failures

    def clean_up(self) -> None:
        self._other.clean_up()
        super().clean_up()

    def leave(self, *, held: bool) -> None:
        self._other.leave(held=held)
        super().leave(held=held)


class RestoreOver(Drill):
    NAME = "restore"
    DOES = "a backup beside producers, a restore over the running and the stopped store, which is refused, and one in its place"

    def strike(self) -> None:
        self.scratch.chmod(0o711)
        entry = pwd.getpwnam(self.user)
        backup = self.scratch / f"backup-{self.summary.rounds}"
        backup.mkdir(mode=0o700)
        os.chown(backup, entry.pw_uid, entry.pw_gid)
        wait_for(f"{BACKED_UP_MIN:,} messages are acknowledged", lambda: self.acked_messages() >= BACKED_UP_MIN, BACK_S)
        acknowledged = {path: path.stat().st_size for path in self.acked}
        made = self.as_user("backup", self.store, backup, "--json")
        if made.returncode:
            self.fail(f"the backup ended with {made.returncode}: {made.stderr[-500:]}")
            return
        tell(f"  beside producers: {json.loads(made.stdout)['sentence']}")
        before = self.pids()
        self._refused("the running store", self.as_user("restore", backup, self.store))
        self.wait_for_acks()
        if self.pids() != before:
            self.fail(f"the refused restore reached the running store: {before} became {self.pids()}")
        self.end_producers()
        self.stop_engine()
        self._refused("the stopped store", self.as_user("restore", backup, self.store))
        self.check_store()
        lost = self.store.with_name(f"{self.instance}-lost")
        self.store.rename(lost)
        self.store.mkdir(mode=0o700)
        os.chown(self.store, entry.pw_uid, entry.pw_gid)
        restored = self.as_user("restore", backup, self.store)
        shutil.rmtree(lost)
        if restored.returncode:
            self.fail(f"the restore ended with {restored.returncode}: {restored.stderr[-500:]}")
            return
        for path, size in acknowledged.items():  # what came after the backup is lost with the store
            os.truncate(path, size)
        systemctl("start", self.target)
        self.make_producers()
        self.wait_for_acks()
        tell(f"  the store deleted and restored: {sum(1 for _ in read_acked(acknowledged)):,} messages were acknowledged before the "
             "backup; units run on it, puts go on")

    def _refused(self, over: str, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode not in (ExitCode.USAGE, ExitCode.BUSY) or "Traceback" in done.stderr:
            self.fail(f"a restore over {over} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
        tell(f"  a restore over {over} is refused: {done.stderr.strip()}")


DRILLS: dict[str, type[Drill]] = {
    drill.NAME: drill for drill in (Killed, Terminated, Stopped, OutOfMemory, ReadOnly, MemoryFull, TwoStores, RestoreOver)}


@ended_in_order
def main() -> int:
    parser = crash_parser(__doc__, rounds=1, has_peer=False)
    parser.add_argument("--drill", action="append", choices=list(DRILLS), metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--list", action="store_true", help="say what each of them does, and do nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for name, drill in DRILLS.items():
            print(f"{name:<12}{drill.DOES}")
        return 0
    try:
        unit_user()
    except (EngineError, OSError) as error:
        print(f"{os.path.basename(sys.argv[0])}: no drill can be done here: {error}", file=sys.stderr)
        return 2
    summaries: list[Summary] = []
    for name in arguments.drill or DRILLS:
        tell(f"drill {name}: {DRILLS[name].DOES}")

        def make(store: Path, scratch: Path, drill: type[Drill] = DRILLS[name]) -> Drill:
            made = drill(scratch, arguments.mode, arguments.seed)
            summaries.append(made.summary)
            return made

        if finish(arguments, make, lambda run: run.run(arguments.rounds)) == INTERRUPTED:
            return INTERRUPTED
    broken = [summary.kind for summary in summaries if summary.failures]
    kills, acknowledged = (sum(getattr(one, field) for one in summaries) for field in ("kills", "acknowledged"))
    if broken:
        tell(f"{len(broken)} of {len(summaries)} drills did not hold: {', '.join(broken)}.")
        return 1
    every = f"All {len(summaries)} drills" if len(summaries) > 1 else "The drill"
    tell(f"{every} held: {kills:,} kills, and all {acknowledged:,} acknowledged messages are there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
