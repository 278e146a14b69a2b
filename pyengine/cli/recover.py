"""`pyengine recover`: make a store whole again without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.config import load_config
from pyengine.errors import ExitCode, StoreBusyError

if TYPE_CHECKING:
    from pyengine.config import EngineConfig
    from pyengine.storage.recovery.report import Progress, RecoveryReport


@click.command()
@store_command
@click.option("--accept-loss", is_flag=True,
              help="Go on although bytes that were durable are damaged: what follows the damage is given up.")
def recover(store: Path, settings: dict[str, str], as_json: bool, accept_loss: bool) -> int:
    """Recover a store: find its end, cut what is torn, bring queues and index up to it.

    What `start` does first, alone. It ends as RocketMQ's own recovery would, and
    whatever is removed goes to STORE/quarantine before. Bytes that only stand in the
    buffers of a dead engine are drained. Damage below what was durable is never cut:
    the store is refused and nothing changed, unless --accept-loss says so. Interrupted,
    it can be run again.

    Exit codes: 0 recovered, 4 something went to quarantine, 3 refused, 5 in use.

    \b
    Examples:
      pyengine recover STORE
      pyengine recover STORE --accept-loss --json
    """
    existing_store(store)
    config = load_config(store, settings)
    with byte_bar("recover", None) as show:
        report = recover_alone(store, config, progress=show, accept_loss=accept_loss)
    return output.print_report(report, as_json, print_report)


def recover_alone(
    root: Path, config: EngineConfig, *, progress: Progress | None = None, accept_loss: bool = False
) -> RecoveryReport:
    """Recover a store that nobody has open, drain what a dead engine left in memory, and leave the store stopped.

    StoreBusyError while any process has it open.
    """
    from pyengine.ipc.crashed_engine_memory import left_memory
    from pyengine.ipc.store_lock import Ownership, StoreLock
    from pyengine.storage.engine_id import raise_epoch, renew_copied_id
    from pyengine.storage.recovery.recover import RecoveryOptions
    from pyengine.storage.recovery.recover import recover as recover_store
    from pyengine.storage.recovery.report import RecoveryState

    with StoreLock(root, create=True) as lock:
        if lock.own() is Ownership.ADOPTED:
            raise StoreBusyError(f"{root} still has living workers, though no supervisor: `pyengine start {root}` takes "
                                 f"them over, `pyengine stop {root}` ends them")
        renew_copied_id(root)
        with left_memory(root) as left:
            left.require_dead()
            report = recover_store(root, config.geometry, progress=progress, accept_loss=accept_loss,
                                   shared=left.shared, options=RecoveryOptions.of(config))
            if report.state is RecoveryState.RECOVERED and left.discard():
                raise_epoch(root)
    return report


def print_report(report: RecoveryReport) -> None:
    """What a recovery did, for people."""
    if report.exit_code is not ExitCode.CORRUPTION:
        print(report.sentence)
    output.write_facts([
        ("path", report.path.value), ("end", report.end_offset), ("read from", report.scan_from),
        ("records read", report.records), ("bytes kept", report.kept_bytes), ("bytes cut", report.cut_bytes),
        ("bytes drained", report.drained_bytes), ("bytes dispatched", report.dispatched_bytes),
        ("queue entries removed", report.queue_entries_removed), ("index files removed", report.index_files_removed),
        ("shared memory", report.shared_state), ("seconds", report.seconds), ("GB/s", report.gigabytes_per_second)])
    if report.quarantined:
        print()
        output.write_table(("quarantined", "from offset", "bytes", "why"), [
            (str(piece.path), piece.physical_offset, piece.size_bytes, piece.reason) for piece in report.quarantined])
    for note in report.notes:
        print(f"note: {output.printable(note)}")
