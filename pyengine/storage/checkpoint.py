"""What says how a store ended: the files `checkpoint` and `abort` (docs/formats.md sections 11 and 13).

`checkpoint` has three store times, none of them ahead of what is on the disk. Abnormal recovery starts at the newest
segment whose first record is older than these times. A time that is ahead loses queue entries; one that lags costs a
longer scan. So the caller syncs first and writes the time afterwards, and the time it writes is one it read before the
sync. The file is written in place: 24 bytes of one sector, as RocketMQ's mapping does it.

`abort` is there while the store is open. RocketMQ removes it only after an orderly stop with nothing left to dispatch;
found at load it means the abnormal recovery path.
"""

from __future__ import annotations

import os

from pyengine.errors import DiskError, FlushError, disk_error, disk_errors
from pyengine.formats.checkpoint import Checkpoint, pack_checkpoint, unpack_checkpoint
from pyengine.formats.constants import CHECKPOINT_BYTES
from pyengine.formats.paths import Root, StorePaths
from pyengine.formats.small_file import read_small_file
from pyengine.native.failpoint import failpoint
from pyengine.storage.new_file import sync_folder, write_config


def read_checkpoint(root: Root) -> Checkpoint:
    """The three times; zeros where there is no file or it is too short, as RocketMQ's mapping would read it."""
    path = StorePaths(root).checkpoint
    try:
        content = read_small_file(path)
    except FileNotFoundError:
        return Checkpoint()
    except OSError as error:
        raise disk_error(error, "read", path) from error
    return unpack_checkpoint(content[:CHECKPOINT_BYTES].ljust(CHECKPOINT_BYTES, b"\0"))


def write_checkpoint(root: Root, checkpoint: Checkpoint) -> None:
    """Write the three times, durable before this returns. Whatever they speak of must be durable already.

    Raises FlushError when the sync failed, DiskError when the file cannot be written.
    """
    path = StorePaths(root).checkpoint
    content = pack_checkpoint(checkpoint)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        write_config(path, content, keep_backup=False)
        return
    except OSError as error:
        raise disk_error(error, "open", path) from error
    try:
        if os.fstat(descriptor).st_size != CHECKPOINT_BYTES:
            write_config(path, content, keep_backup=False)
            return
        with disk_errors("write", path):
            written = os.pwrite(descriptor, content, 0)
        if written != len(content):
            raise DiskError(f"short write to {path}", path=str(path))
        failpoint("checkpoint_written")
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            raise FlushError(f"fdatasync of {path} failed: {error.strerror}",
                             errno=error.errno or 0, path=str(path)) from error
        failpoint("checkpoint_synced")
    finally:
        os.close(descriptor)


def abort_file_exists(root: Root) -> bool:
    """True when the store was not stopped in an orderly way, or is open now."""
    return StorePaths(root).abort.exists()


def create_abort_file(root: Root) -> None:
    """Leave an empty `abort`, durable before this returns; an existing one stays as it is."""
    path = StorePaths(root).abort
    with disk_errors("create", path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644))
    failpoint("abort_created")
    sync_folder(path.parent)


def remove_abort_file(root: Root) -> None:
    """Remove `abort`, the last step of an orderly stop; its absence is durable before this returns."""
    path = StorePaths(root).abort
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error(error, "remove", path) from error
    failpoint("abort_removed")
    sync_folder(path.parent)
