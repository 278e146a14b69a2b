"""The file system of a store: whether it copies on write or is shared between hosts, its use, and the space kept free.

A file system that is not in these tables of magic numbers (statfs) counts as a local one that writes in place, as ext4, xfs and tmpfs
do. If that is wrong, the first store into a mapping for which it has no space shows it (csrc/session_guard.cdef.h).

Queues and index are written after the log. If the log filled the disk to the last byte, acknowledged messages would be invisible to
consumers, and after a crash recovery could not finish. So a new segment is created only if space remains for the queues and index of
the log up to its end, estimated as a share of the log. If the estimate is too low no message is lost; queues wait until there is space.

A process of an engine holds its store's folder open (HeldStore) and reaches every file through that descriptor: what it writes is
in that folder, also after the folder was renamed, covered by a mount, or replaced by another at the same path.

Root may work in a folder of another user, who can put a link into it at any moment: root follows only links that root made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pyengine.errors import DiskError, DiskFullError, UsageError, disk_errors, show_as, shown
from pyengine.formats.paths import LOCK_NAME, LogFolders, log_folders, recorded_log_folders, use_log_folders
from pyengine.formats.small_file import closed_on_error, opened, path_stamp

# On these an overwrite takes new blocks: on a full disk a store into a mapping raises SIGBUS.
# An overlay does not tell the kind of the file system below it.
COPIES_ON_WRITE = {0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0xCA451A4E: "bcachefs", 0x3434: "nilfs2", 0x794C7630: "overlay"}
# More than one host can mount these; a lock may be lost with a connection, or may only be visible on one host.
SHARED = {
    0x6969: "NFS", 0x517B: "SMB", 0xFF534D42: "SMB (cifs)", 0xFE534D42: "SMB (cifs)", 0x01021997: "9p", 0x00C36400: "CephFS",
    0x5346414F: "AFS", 0x6B414653: "AFS", 0x73757245: "Coda", 0x0BD00BD0: "Lustre", 0x01161970: "GFS2", 0x7461636F: "OCFS2",
    0x47504653: "GPFS", 0x19830326: "BeeGFS",
}


def _magic(descriptor: int) -> int:
    from pyengine.native.flush import file_system  # here, so that reading a store's settings does not load the C module

    return file_system(descriptor)


def copies_on_write(descriptor: int) -> bool:
    """Whether an overwrite of allocated blocks needs new blocks."""
    try:
        return _magic(descriptor) in COPIES_ON_WRITE
    except OSError:
        return False


def refuse_shared(root: str | os.PathLike[str]) -> None:
    """Raise UsageError if another host may have mounted the store (existing or new): two engines could write to it."""
    folder = Path(root).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with disk_errors("find the file system of", root), opened(os.open(folder, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        found = SHARED.get(_magic(descriptor))
    if found is not None:
        raise UsageError(
            f"{root} is on {found}, which several hosts can mount: its locks do not keep an engine of another host from "
            "writing too; put the store on a local disk (ext4, xfs), and let others read it, or replicate to them")


def refuse_inside(root: str | os.PathLike[str], dest: str | os.PathLike[str]) -> None:
    """Raise UsageError for a destination inside a store, with which it would be lost."""
    if Path(dest).resolve().is_relative_to(Path(root).resolve()):
        raise UsageError(f"{dest} is inside the store {root}, which must not contain other folders: give another folder")


LINKS_MAX = 40  # in a path, as for the kernel
TREE_DEPTH = 6


def open_folder(path: str | os.PathLike[str], *, make_mode: int | None = None) -> int:
    """Open a folder and return its descriptor; as root, follow no link in its path that another user made. DiskError.

    With `make_mode`, missing folders are created with this mode, durably. Each step begins at the descriptor of the one before it,
    so that it does not matter what is renamed meanwhile.
    """
    with disk_errors("open", path):
        parts, links = [*reversed(Path(path).absolute().parts)], 0
        start = "/"
        if parts[:-5:-1] == ["/", "proc", "self", "fd"] and len(parts) > 4:  # a held folder, whatever its name is now
            start = f"/proc/self/fd/{parts[-5]}"
            del parts[-5:]
        here = os.open(start, os.O_PATH | os.O_CLOEXEC)
        try:
            while parts:
                part = parts.pop()
                try:
                    found = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                except FileNotFoundError:
                    if make_mode is None:
                        raise
                    make_folder_in(here, part, make_mode)
                    parts.append(part)
                    continue
                status = os.fstat(found)
                if stat.S_ISLNK(status.st_mode):
                    with opened(found):
                        refuse_link(status, f"{path}: {part}")
                        links += 1
                        if links > LINKS_MAX:
                            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                        parts += reversed(Path(os.readlink("", dir_fd=found)).parts)
                else:
                    here, found = found, here
                    os.close(found)  # last: a signal handler may raise after it
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)


@contextlib.contextmanager
def path_of(descriptor: int, name: Path) -> Iterator[Path]:
    """Yield a path that leads to this open folder during the block, whatever its name becomes; texts for people have `name`."""
    held = Path(f"/proc/self/fd/{descriptor}")
    show_as(str(held), str(name))
    try:
        yield held if held.exists() else name  # without /proc
    finally:
        show_as(str(held), "")


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    """Create a folder if it does not exist, and yield a path that leads to it during the block, as path_of(). DiskError.

    As root, refuse one in which another user can put a link: root writes files of many names there. A new one that the block leaves
    empty is removed.
    """
    exists = folder.exists()
    descriptor = open_folder(folder, make_mode=0o755)
    try:
        if os.geteuid() == 0:
            _refuse_writable_by_others(os.fstat(descriptor), folder)
        with path_of(descriptor, folder) as held:
            yield held
    finally:
        os.close(descriptor)
        if not exists:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def refuse_path_of_others(folder: str | os.PathLike[str]) -> None:
    """As root, refuse a folder in whose path, or in which, another user can put a link. It and its parents may not exist yet. DiskError.

    For libraries and processes that open files by the path again and again.
    """
    if os.geteuid():
        return
    named, real = Path(folder).absolute(), Path(os.path.realpath(folder))
    for one in dict.fromkeys((*reversed(named.parents), named, *reversed(real.parents), real)):
        try:
            descriptor = open_folder(one)
        except DiskError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return
            raise
        with opened(descriptor):
            status = os.fstat(descriptor)
            if one in (named, real) or not status.st_mode & stat.S_ISVTX:  # a sticky folder: others cannot rename what root has in it
                _refuse_writable_by_others(status, one)


def _refuse_writable_by_others(status: os.stat_result, folder: Path) -> None:
    if status.st_uid or status.st_mode & stat.S_IWOTH:
        whose = f"belongs to the user {status.st_uid}" if status.st_uid else "can be written by every user"
        raise DiskError(f"{folder} {whose}, and root writes nothing where another user can put a link: run the command as that user, "
                        "or name another folder", errno=errno.EPERM)


def _place_of(path: str | os.PathLike[str]) -> tuple[int, str]:
    """Return (open folder, name in it) of the file to which a path leads, which need not exist; as root through no link of another user.

    DiskError or OSError.
    """
    given = Path(path).absolute()
    folder, name = open_folder(given.parent), given.name
    for _ in range(LINKS_MAX):
        with closed_on_error(folder):
            try:
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except FileNotFoundError:
                return folder, name
            with opened(found):
                status = os.fstat(found)
                if not stat.S_ISLNK(status.st_mode) or os.readlink(f"/proc/self/fd/{folder}").startswith("/proc/"):  # /dev/stdout
                    return folder, name
                refuse_link(status, str(path))
                target = Path(f"/proc/self/fd/{folder}", os.readlink("", dir_fd=found))
                inside = open_folder(target.parent)
        os.close(folder)
        folder, name = inside, target.name
    os.close(folder)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def open_output(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file that a user named, to write to it; as root through no link of another user. OSError or DiskError.

    `flags` truncate nothing, since a hard link to another user's file is refused after it was opened.
    """
    if os.geteuid():
        return os.open(path, flags | os.O_CLOEXEC, mode)
    folder, name = _place_of(path)
    with opened(folder):
        in_proc = os.readlink(f"/proc/self/fd/{folder}").startswith("/proc/")
        with closed_on_error(os.open(name, flags | (0 if in_proc else os.O_NOFOLLOW) | os.O_CLOEXEC, mode, dir_fd=folder)) as descriptor:
            _refuse_hard_link(descriptor, folder, path)
            return descriptor


def _refuse_hard_link(descriptor: int, folder: int, what: object) -> None:
    """As root, refuse a hard link that the folder's user may have made to a file of another user."""
    status = os.fstat(descriptor)
    if os.geteuid() == 0 and stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and status.st_uid != os.fstat(folder).st_uid:
        raise DiskError(f"{what} is a hard link to a file of the user {status.st_uid}: replace it by a copy", errno=errno.EMLINK)


def make_folder_in(folder: int, name: str, mode: int) -> None:
    """Create a folder in an open folder, durably; another process may have just created it. OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=folder)
    with opened(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)) as parent:
        sync_open_folder(parent)


def sync_open_folder(folder: int) -> None:
    """Make the names in an open folder durable. OSError."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync directories
            raise


def refuse_link(status: os.stat_result, what: str) -> None:
    """Raise DiskError if root would follow a link of another user."""
    if os.geteuid() == 0 and status.st_uid and stat.S_ISLNK(status.st_mode):
        raise DiskError(f"{what} is a link that the user {status.st_uid} made, and root does not follow it: run the command as that user, "
                        "or replace the link by what it leads to", errno=errno.ELOOP)


def open_file_in(folder: int, name: str, what: object) -> int:
    """Open a regular file of an open folder for reading, without waiting, and never through a link. OSError or DiskError.

    As root, refuse a hard link that the folder's user may have made to a file of another user.
    """
    with closed_on_error(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)) as descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DiskError(f"{what} is not a regular file: remove it", errno=errno.EINVAL)
        _refuse_hard_link(descriptor, folder, what)
        return descriptor


def refuse_links(root: str | os.PathLike[str], folders: Iterable[str] = (), trees: Iterable[str] = ()) -> None:
    """As root, refuse a folder of another user in whose path, or in which, a user made a link; so for these folders and trees in it.

    It finds what is there now. What is written later has its own protection.
    """
    if os.geteuid():
        return
    try:
        descriptor = open_folder(root)
    except DiskError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return
        raise
    if os.fstat(descriptor).st_uid == 0:
        os.close(descriptor)
        return
    _refuse_links_in(descriptor, Path(root), depth=0)
    for names, depth in ((folders, 0), (trees, TREE_DEPTH)):
        for name in names:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                _refuse_links_in(os.open(Path(root, name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), Path(root, name), depth)


def _refuse_links_in(descriptor: int, folder: Path, depth: int) -> None:
    """Refuse links in an open folder, which is closed, and in those below it down to `depth`."""
    with opened(descriptor), disk_errors("list", folder), os.scandir(descriptor) as entries:
        for entry in entries:
            if entry.is_symlink():
                refuse_link(entry.stat(follow_symlinks=False), f"{folder / entry.name}")
            elif depth and entry.is_dir(follow_symlinks=False):
                _refuse_links_in(os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor),
                                 folder / entry.name, depth - 1)


def refuse_folders_of_others(root: str | os.PathLike[str], folders: Iterable[Path]) -> None:
    """As root, refuse folders that the settings of another user's store name and that are not that user's."""
    with contextlib.suppress(FileNotFoundError):
        owner = os.stat(root).st_uid
        if os.geteuid() or not owner:
            return
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(folder).st_uid
                if found != owner:
                    raise DiskError(f"{folder}, which the settings of {root} name, belongs to the user {found}, and the store to {owner}: "
                                    "root does not use it; run the command as the store's user", errno=errno.EPERM)


UNKNOWN_PERCENT = -1
MOUNTS = "/proc/self/mountinfo"


def mount_of(descriptor: int) -> tuple[bytes, list[bytes]]:
    """Return the type of an open file's file system and the options of its mount; (b"", []) if /proc does not list it.

    So it is in a chroot whose root is not a mount point. Names of mount points are bytes of any encoding.
    """
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", "rb") as facts, open(MOUNTS, "rb") as mounts:
        number = next((line.split()[1] for line in facts if line.startswith(b"mnt_id:")), b"")
        for line in mounts:
            if line.startswith(number + b" "):
                kind, *_, options = line.split(b" - ")[1].split()
                return kind, options.split(b",")
    return b"", []


def file_system_of(folder: Path | str) -> str:
    """Return the type of the folder's file system; "" if it is unknown."""
    with contextlib.suppress(OSError), opened(os.open(folder, os.O_PATH | os.O_CLOEXEC)) as descriptor:
        return mount_of(descriptor)[0].decode()
    return ""


class DiskUse(NamedTuple):
    """The use of one folder's file system.

    `used_percent` is RocketMQ's figure (UtilAll.getDiskPartitionSpaceUsedPercent): the used share of the space that this user
    can use, rounded up; UNKNOWN_PERCENT if it is unknown.
    """

    folder: str
    used_percent: int
    usable_bytes: int
    unwritable_reason: str = ""       # why the file system cannot be written, "" when it can
    inodes_left: bool = True

    @property
    def is_known(self) -> bool:
        return self.used_percent != UNKNOWN_PERCENT


def used_percent(total_blocks: int, free_blocks: int, usable_blocks: int) -> int:
    """Return the used share of used + usable blocks, in percent, rounded up; UNKNOWN_PERCENT for a file system without blocks."""
    used = total_blocks - free_blocks
    entire = used + usable_blocks
    if total_blocks <= 0 or entire <= 0:
        return UNKNOWN_PERCENT
    return -(-used * 100 // entire)


def used_ratio(folder: str | os.PathLike[str]) -> float | None:
    """Return the used share of the file system of `folder`, 0 to 1, as `df` counts; None if there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    used = found.f_blocks - found.f_bfree
    return used / (used + found.f_bavail) if used + found.f_bavail else None


def measure(folder: str | os.PathLike[str]) -> DiskUse:
    """Measure the file system of `folder`, or of its nearest existing parent. Writes nothing, never raises."""
    path = os.path.abspath(os.fspath(folder))
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:  # for example a network file system that does not answer
        return DiskUse(path, UNKNOWN_PERCENT, 0)
    unwritable_reason = ""
    if status.f_flag & os.ST_RDONLY:
        unwritable_reason = f"the file system of {path} is mounted read-only"
    elif not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        unwritable_reason = f"this user has no right to make files in {path}"
    return DiskUse(path, used_percent(status.f_blocks, status.f_bfree, status.f_bavail),
                   status.f_bavail * status.f_frsize, unwritable_reason,
                   inodes_left=status.f_favail > 0 or status.f_files == 0)


SHARE_OF_LOG = 4               # 1/4 of the log that is not dispatched yet
SMALL_FILES_BYTES = 128 << 10  # first blocks of queue files, checkpoint, watermark, marker


def derived_room_bytes(log_bytes: int) -> int:
    """Return the space that queues and index of this many undispatched bytes of log may need."""
    return log_bytes // SHARE_OF_LOG + SMALL_FILES_BYTES


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """Return the bytes that a process without privileges can still use on this file system."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize if status.f_blocks else sys.maxsize  # a tmpfs of size=0 has no limit


def reserve_dispatch_space(folder: Path, wanted_bytes: int, undispatched_bytes: int, index_bytes: int) -> None:
    """Raise DiskFullError if `wanted_bytes` more on `folder`'s file system leave too little space for dispatch.

    `index_bytes`: what the first index file will take.
    """
    free, kept = free_bytes(folder), derived_room_bytes(undispatched_bytes) + index_bytes
    if wanted_bytes + kept > free:
        raise DiskFullError(
            f"a segment of {wanted_bytes:,} bytes and {kept:,} more for its queues and index have no room in {folder}: "
            f"{free:,} are free", errno=errno.ENOSPC, path=str(folder))


# ---- a store's folder held open ----------------------------------------------------


class Loss(NamedTuple):
    """What happened to the folder of a held store.

    `is_whole`: its files are still together in the held folder. `is_taken`: it has the identity and the lock of another store,
    so another engine may be using the files.
    """

    sentence: str
    is_whole: bool
    is_taken: bool


class HeldStore:
    """A store's folder that this process holds open: paths below `root` lead into that folder, whatever happens to its name.

    `root` is /proc/self/fd/N, which the kernel resolves to the open folder itself. Texts for people have `name` in its place
    (errors.shown). close() it only when nothing uses `root` any more: the kernel gives the number to the next file.
    """

    def __init__(self, name: str | os.PathLike[str], descriptor: int = -1) -> None:
        """Open the folder, or take the `descriptor` that another process of the engine opened. OSError, or DiskError without /proc."""
        self.name = Path(shown(str(Path(name).absolute())))
        self._opened: list[int] = []
        self.descriptor = self._hold(Path(name)) if descriptor < 0 else descriptor
        self.root = Path(f"/proc/self/fd/{self.descriptor}")
        if not self.root.exists():
            _release(self._opened)
            raise DiskError(f"{self.name} cannot be used: /proc is not mounted here, by which pyengine reaches a folder whatever its name "
                            "becomes: mount it (mount -t proc proc /proc)", errno=errno.ENOENT)
        self._settings, self._stamp = f"{self.root}/config/engine.toml", 0
        self._recorded: LogFolders | None = None  # by the settings at the last watch()
        self._parents: dict[Path, int] = {}  # folders with a folder of the log, held open like the store
        self._finalizer = weakref.finalize(self, _release, self._opened)
        self._finalizer.atexit = False
        self._watched: list[tuple[Path, Path, tuple[int, int]]] = []  # path below a held folder, its name, its identity
        self._lock_lost_s = 0.0  # when `lock` was seen to be another file or none; 0: it was not
        show_as(str(self.root), str(self.name))
        _stores.add(self)

    def watch(self, *files: str) -> None:
        """Note the identity of `lock`, these files and the log's folders for loss(), and hold the log's folders that are elsewhere."""
        folders = log_folders(self.root)
        held = {folder: self._held(folder) for folder in folders.all}
        use_log_folders(self.root, self._all_held(folders))
        self._recorded = folders if folders == recorded_log_folders(self.root) else None
        names = {self.root / name: self.name / name for name in (LOCK_NAME, *files)}
        names |= {held[folder]: self.name / folder.relative_to(self.root) if folder == held[folder] else folder for folder in folders.all
                  if folder != held[folder] or folder.is_relative_to(self.root)}
        self._watched = [(path, name, seen) for path, name in names.items() if (seen := _identity(path)) is not None]

    def follow_settings(self, follow: Callable[[LogFolders], bool]) -> None:
        """If the settings name other folders of the log than at the last watch(), and `follow` accepts them, watch() them.

        It does not follow them from given ones.
        """
        stamp = path_stamp(self._settings)
        if stamp == self._stamp or self._recorded is None or (recorded := recorded_log_folders(self.root)) == self._recorded:
            self._stamp = stamp
        elif follow(self._all_held(recorded)):
            use_log_folders(self.root, None)
            self.watch()

    def _all_held(self, folders: LogFolders) -> LogFolders:
        return LogFolders(tuple(map(self._held, folders.writable)), tuple(map(self._held, folders.read_only)))

    def _held(self, folder: Path) -> Path:
        """Return the path of a folder of the log below a held folder; the folder itself if it is in the store or does not exist."""
        if folder.is_relative_to(self.root) or not folder.is_dir():
            return folder
        if folder.parent not in self._parents:
            self._parents[folder.parent] = descriptor = self._hold(folder.parent)
            show_as(f"/proc/self/fd/{descriptor}", str(folder.parent))
        return Path(f"/proc/self/fd/{self._parents[folder.parent]}") / folder.name

    def loss(self) -> Loss | None:
        """Return what happened to the store's folder since watch(): it was moved, removed, replaced or covered; None if nothing did.

        `lock` alone may be away for LOCK_AWAY_S: while the log and the identity are in place, no second engine starts beside this one.
        """
        missing = self._missing()
        if [path for path, _, _ in missing] == [self.root / LOCK_NAME]:
            self._lock_lost_s = self._lock_lost_s or time.monotonic()
            if time.monotonic() < self._lock_lost_s + LOCK_AWAY_S:
                return None
        else:
            self._lock_lost_s = 0.0
        if missing:
            return Loss(_sentence(missing), False, len(missing) > 1 and all(now for *_, now in missing))
        for path, name, seen in self._watched:
            if _identity(name) not in (seen, _UNKNOWN):
                name, place = (name.parent, path.parent) if name.name == LOCK_NAME else (name, path)
                return Loss(f"{name} does not lead to this store's files any more, which are in {os.path.realpath(place)}: the folder was "
                            "moved, or another one is at that path now", True, False)
        return None

    def names(self) -> list[str]:
        """Return the paths and names of what watch() has noted: while each leads to the same file, loss() finds none."""
        return [str(each) for path, name, _ in self._watched for each in (path, name)]

    @property
    def is_lock_away(self) -> bool:
        """Whether the last loss() has not found `lock`, and waits for it."""
        return self._lock_lost_s != 0.0

    def broken(self) -> str:
        """Return which of the watched files, except `lock` alone, is gone from the held folder, or was replaced there; "" if none."""
        missing = self._missing()
        return "" if [path for path, *_ in missing] == [self.root / LOCK_NAME] else _sentence(missing)

    def _missing(self) -> list[tuple[Path, Path, tuple[int, int] | None]]:
        """Return each watched file that is not in the held folder any more: its path there, its name, what has its place."""
        found = [(path, name, seen, _identity(path)) for path, name, seen in self._watched]
        return [(path, name, now) for path, name, seen, now in found if now not in (seen, _UNKNOWN)]

    def contains(self, path: Path) -> bool:
        """Whether a path leads below this store's folder, or below a held folder of its log."""
        return path.is_relative_to(self.root) or any(path.is_relative_to(f"/proc/self/fd/{held}") for held in self._parents.values())

    def close(self) -> None:
        """Close what this object has opened. Paths below `root` must not be used afterwards."""
        _stores.discard(self)
        self._finalizer()

    def _hold(self, folder: Path) -> int:
        descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._opened.append(descriptor)
        return descriptor


_stores: weakref.WeakSet[HeldStore] = weakref.WeakSet()
_UNKNOWN = (-1, -1)
LOCK_AWAY_S = 5.0


def require_held(path: Path | str) -> None:
    """Raise DiskError for a path in a held store whose files were removed or replaced: nothing more may be made there."""
    for store in list(_stores):
        if store.contains(Path(path)) and (broken := store.broken()):
            raise DiskError(f"{shown(str(path))} is not made: {broken}", path=str(path))


def _sentence(missing: list[tuple[Path, Path, tuple[int, int] | None]]) -> str:
    return f"{missing[0][1]} was {'replaced' if missing[0][2] else 'removed'} while the engine ran" if missing else ""


def _release(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        held = f"/proc/self/fd/{descriptor}"
        use_log_folders(held, None)
        show_as(held, "")
        os.close(descriptor)
    descriptors.clear()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode; None if there is no such file, _UNKNOWN if the system does not tell now."""
    try:
        status = os.stat(path)
    except OSError as error:
        return None if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) else _UNKNOWN
    return status.st_dev, status.st_ino
