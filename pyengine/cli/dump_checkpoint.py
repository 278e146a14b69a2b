"""`pyengine dump STORE checkpoint`: the three times of the checkpoint file (docs/formats.md section 11)."""

from __future__ import annotations

from pathlib import Path

from pyengine.cli import output
from pyengine.errors import DiskError, EngineError
from pyengine.formats.checkpoint import unpack_checkpoint
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import read_small_file


def dump_checkpoint(store: Path, as_json: bool) -> None:
    """Print the checkpoint; EngineError if the store has none, FormatError if it is too short."""
    path = StorePaths(store).checkpoint
    try:
        data = read_small_file(path)
    except FileNotFoundError as error:
        raise EngineError(
            f"{store} has no checkpoint file; a store without one is recovered from its first segment") from error
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}", errno=error.errno or 0, path=str(path)) from error
    times = unpack_checkpoint(data)
    rows = [(name, getattr(times, name)) for name in (
        "physic_msg_timestamp_ms", "logics_msg_timestamp_ms", "index_msg_timestamp_ms",
        "min_timestamp_ms", "min_timestamp_index_ms")]
    if as_json:
        output.write_json({**dict(rows), "file_bytes": len(data)})
        return
    output.write_table(("field", "value", "time"), [(name, str(value), output.time_text(value)) for name, value in rows])
