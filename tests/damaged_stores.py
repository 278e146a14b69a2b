"""Golden stores with random damage, and what each part of the engine says of their end."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fix_golden import load_manifest, load_verify, size_settings, unpack
from pyengine.cli.engine_status import engine_status
from pyengine.engine_config import Geometry
from pyengine.errors import CorruptionError, StoreRefusedError
from pyengine.ipc.live_reader import open_store
from pyengine.results import ReadLevel
from pyengine.spark.file_access import open_tree
from pyengine.spark.options import ARROW
from pyengine.spark.remote_store import RemoteStore
from pyengine.storage.check.check import check
from pyengine.storage.checkpoint import WATERMARK, DurableWatermark
from pyengine.storage.inspect import inspect
from pyengine.storage.message_store import MessageStore, discover
from pyengine.storage.recovery.recover import recover
from pyengine.storage.recovery.report import RecoveryState

RECIPES = ("abnormal-multi", "abnormal-torn", "basic", "batch", "cleaned", "pool-roll", "roll", "tx")
THEIRS, OURS = "theirs", "ours"


@dataclass
class DamagedStore:
    """A copy of a golden store after `told` was done to it."""

    name: str
    root: Path
    seed: str
    geometry: Geometry
    manifest: dict[str, Any]
    damages: list[str] = field(default_factory=list)

    @property
    def told(self) -> str:
        return f"{self.seed}: {', '.join(self.damages)}"


def damaged_stores(name: str, owner: str, seeds: Iterable[int], folder: Path) -> Iterator[DamagedStore]:
    """One store a seed, gone when the next one is asked for; `ours` has a watermark where the undamaged log ends, or below."""
    manifest = load_manifest(name)
    whole = folder / "whole"
    whole.mkdir(exist_ok=True)
    root = whole / name if (whole / name).exists() else unpack(name, whole)
    geometry = discover(root, size_settings(manifest["config"]))
    for number in seeds:
        seed = f"{name}-{owner}-{number}"
        rng = random.Random(seed)
        copy = folder / f"damaged-{number}"
        shutil.copytree(root, copy, symlinks=True)
        if owner == OURS:
            records = load_verify(name)["records"]
            flushed = rng.choice([records[-1], rng.choice(records)])
            WATERMARK.write(copy, DurableWatermark("00000000-0000-0000-0000-000000000000", 1, flushed["phy"] + flushed.get("size", 0)))
        store = DamagedStore(name, copy, seed, geometry, manifest)
        for _ in range(rng.choice((1, 1, 2))):
            store.damages.append(_damage(store, rng))
        yield store
        shutil.rmtree(copy)


def _damage(store: DamagedStore, rng: random.Random) -> str:
    kinds = (_flip, _flip, _zeros, _garbage, _torn_tail, _lose_segment, _lose_last_segment, _flip_queue, _flip_small, _toggle_abort)
    segments = sorted((store.root / "commitlog").iterdir())
    kind = rng.choice(kinds)
    return f"{kind.__name__[1:]} {kind(store, rng, segments)}" if segments else "nothing is left"


def _somewhere(store: DamagedStore, rng: random.Random, segments: list[Path]) -> tuple[Path, int]:
    """A byte of a record, more often than not of one of the last records."""
    records = [record for record in load_verify(store.name)["records"] if not record.get("unreadable")]
    size = store.geometry.mapped_file_size_commit_log_bytes
    record = rng.choice(records[-10:] if rng.random() < 0.3 else records)
    at = record["phy"] + rng.choice((0, 4, 28, 88, rng.randrange(max(1, record["size"]))))
    path = store.root / "commitlog" / f"{at - at % size:020d}"
    return (path, at % size) if path in segments else (segments[-1], rng.randrange(size))


def _poke(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        length = path.stat().st_size
        file.seek(at)
        file.write(data[: length - at])


def _flip(store, rng, segments):
    path, at = _somewhere(store, rng, segments)
    _poke(path, at, bytes([path.read_bytes()[at] ^ 1 << rng.randrange(8)]))
    return f"{path.name}+{at}"


def _zeros(store, rng, segments):
    path, at = _somewhere(store, rng, segments)
    count = rng.choice((8, 100, 512, 4096))
    _poke(path, at, bytes(count))
    return f"{path.name}+{at} {count}"


def _garbage(store, rng, segments):
    path, at = _somewhere(store, rng, segments)
    count = rng.choice((4, 64, 1000))
    _poke(path, at, rng.randbytes(count))
    return f"{path.name}+{at} {count}"


def _torn_tail(store, rng, segments):
    path, at = _somewhere(store, rng, segments)
    _poke(path, at, bytes(path.stat().st_size))
    return f"{path.name}+{at}"


def _lose_segment(store, rng, segments):
    path = rng.choice(segments)
    path.unlink()
    return path.name


def _lose_last_segment(store, rng, segments):
    segments[-1].unlink()
    return segments[-1].name


def _flip_queue(store, rng, segments):
    files = sorted(path for path in (store.root / "consumequeue").rglob("*") if path.is_file())
    if not files:
        return "none"
    path = rng.choice(files)
    at = rng.randrange(max(1, len(path.read_bytes().rstrip(b"\0"))))
    _poke(path, at, bytes([path.read_bytes()[at] ^ 1 << rng.randrange(8)]))
    return f"{path.relative_to(store.root)}+{at}"


def _flip_small(store, rng, segments):
    path = store.root / "checkpoint"
    at = rng.randrange(24)
    _poke(path, at, bytes([path.read_bytes()[at] ^ 1 << rng.randrange(8)]))
    return f"checkpoint+{at}"


def _toggle_abort(store, rng, segments):
    path = store.root / "abort"
    if path.exists():
        path.unlink()
    else:
        path.touch()
    return str(path.exists())


def recover_accepting(store: DamagedStore) -> tuple[int, bool] | None:
    """(where recovery ends the log, whether a loss had to be accepted for that); None where RocketMQ refuses a file too."""
    try:
        report = recover(MessageStore(store.root, store.geometry))
        if report.state is RecoveryState.RECOVERED:
            return report.end_offset, False
    except StoreRefusedError:
        return None
    except CorruptionError:
        pass
    return recover(MessageStore(store.root, store.geometry), accept_loss=True).end_offset, True


def ends_of(store: DamagedStore) -> dict[str, int]:
    """Return where readers, `inspect`, `check`, `status` and Spark, here and by ranges, say that the log ends."""
    sizes = size_settings(store.manifest["config"])
    with open_store(store.root, **sizes) as reader:
        reads = reader.max_physical_offset(ReadLevel.COMMITTED)
    with RemoteStore(open_tree(str(store.root), ARROW), sizes) as remote:
        ranges = remote.max_physical_offset(ReadLevel.COMMITTED)
    return {
        "reader": reads,
        "inspect": inspect(store.root, store.manifest["config"])["facts"]["maxPhy"],
        "check": check(MessageStore(store.root, store.geometry)).end_offset,
        "status": engine_status(store.root, store.manifest["config"])["positions"]["wrote"],
        "spark": ranges,
    }


def tree(root: Path) -> dict[str, bytes]:
    """Every file and what it holds."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
