"""The part of the whole-store check that looks into config/: tables that a start needs and no log can give back.

RocketMQ and this engine use a table's `.bak`, what it said before its last change, where the file
itself cannot be used, and nothing where neither can: topics are unknown then, and groups begin anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyengine.errors import FormatError
from pyengine.formats.paths import StorePaths
from pyengine.formats.small_file import decode_config, read_small_file
from pyengine.storage.check.report import Findings
from pyengine.storage.consumer_offset import decode_offsets
from pyengine.storage.delay_offset import decode_delay_offsets
from pyengine.storage.topic_config import decode_topics

BACKUP = ".bak"
NOT_KEPT = frozenset(("engine-run.json",))  # where the last engine's memory was: never synced, and nothing after a boot


def check_config(root: Path, findings: Findings) -> None:
    """Every .json of config/ but NOT_KEPT, and each `.bak` whose own file is gone."""
    folder = StorePaths(root).config
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    tables = sorted({name.removesuffix(BACKUP) for name in names if name.removesuffix(BACKUP).endswith(".json")})
    for name in tables:
        if name in NOT_KEPT:
            continue
        file = f"config/{name}"
        why = _why_unusable(folder / name)
        if not why:
            if name + BACKUP in names and (old_why := _why_unusable(folder / (name + BACKUP))):
                findings.info("config backup", file + BACKUP, None, f"it {old_why}; the next change replaces it")
        elif _why_unusable(folder / (name + BACKUP)):
            findings.error("config lost", file, None, f"it {why}, and there is no {name}{BACKUP} that can be used: nothing of it is")
        else:
            findings.error("config", file, None, f"it {why}: {name}{BACKUP}, what it said before its last change, is used instead")


def _why_unusable(path: Path) -> str:
    """A verb and what follows; empty for a table that can be used."""
    decode: Callable[[bytes], Any] = _DECODERS.get(path.name.removesuffix(BACKUP), _decode_any)
    try:
        content = read_small_file(path)
        if not content.strip(b"\0 \t\r\n"):
            return "is empty"
        decode(content)
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        return "is no text"
    except FormatError as error:
        return f"is damaged ({error})"
    return ""


def _decode_any(content: bytes) -> None:
    """A broker's other tables: an object of JSON, whatever is in it."""
    if not isinstance(decode_config(content.decode()), dict):
        raise FormatError("it is no table")


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "topics.json": lambda content: decode_topics(content.decode()),
    "delayOffset.json": lambda content: decode_delay_offsets(content.decode()),
    "consumerOffset.json": decode_offsets,
}
