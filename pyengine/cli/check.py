"""`pyengine check`: is everything there, whole, and found where it should be?"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.config import load_config
from pyengine.errors import StoreBusyError

if TYPE_CHECKING:
    from pyengine.config import EngineConfig
    from pyengine.storage.check_report import CheckProgress, CheckReport

CHECK_TRIES = 20
HOLD_WAIT_S = 5.0
HOLD_STEP_S = 0.05


@click.command()
@store_command
@click.option("--acked", type=click.Path(path_type=Path, exists=True, dir_okay=False), default=None, metavar="FILE",
              help="Acknowledged messages that must be there, as JSON lines: topic, queue_id, queue_offset, "
                   "physical_offset (or null), body_sha256; as `ingest --acked` writes it.")
def check(store: Path, settings: dict[str, str], as_json: bool, acked: Path | None) -> int:
    """Check a whole store: log chain, CRCs, queues, index, checkpoint. Changes nothing.

    Beside a running engine everything that is dispatched is checked. Each finding has a
    grade, and says what to do: a notice needs nothing, what is repairable is still wholly in
    the log, a loss is a message that is gone, damaged or out of reach in this copy. An error
    (exit code 3) breaks a promise of the store; a warning is what recovery settles, or what
    RocketMQ leaves that way; an info is worth knowing.

    \b
    Examples:
      pyengine check STORE
      pyengine check STORE --acked acks.jsonl --json
    """
    existing_store(store)
    config = load_config(store, settings)
    with byte_bar("check", None) as show:
        report = check_now(store, config, acked, show)
    if as_json:
        output.write_json(report.to_dict())
    else:
        print_report(report)
    return report.exit_code


def check_now(root: Path, config: EngineConfig, acked: Path | None, show: CheckProgress) -> CheckReport:
    """Check the store as it is; again when the engine's cleaner deletes a file that was just going to be looked at."""
    from pyengine.storage.check import check as check_store

    limit = dispatched_end(root)
    if limit is None:
        return check_store(root, config.geometry, acked=acked, message_index_enable=config.message_index_enable, progress=show)
    with log_held(root) as first_offset:
        for _ in range(CHECK_TRIES):
            before = first_offset()
            with contextlib.suppress(FileNotFoundError):
                report = check_store(root, config.geometry, acked=acked, limit=dispatched_end(root),
                                     message_index_enable=config.message_index_enable, progress=show)
                if first_offset() == before:
                    return report
    raise StoreBusyError(f"files of {root} are being deleted faster than they can be checked: try again")


@contextlib.contextmanager
def log_held(root: Path) -> Iterator[Callable[[], int]]:
    """Keep the running engine from deleting any segment: it goes from the oldest on, so the oldest is held.

    Gives a function that tells where the log begins. A segment whose turn has come already
    cannot be held: it is waited for, within HOLD_WAIT_S.
    """
    from pyengine.ipc.live_reader import open_store

    with open_store(root) as store, contextlib.ExitStack() as stack:
        deadline_s = time.monotonic() + HOLD_WAIT_S
        while store.min_physical_offset >= 0 and not stack.enter_context(store.hold(store.min_physical_offset)):
            if time.monotonic() >= deadline_s:
                break
            time.sleep(HOLD_STEP_S)
        yield lambda: store.min_physical_offset


def dispatched_end(root: Path) -> int | None:
    """`reput_from` of the engine that runs on the store; None if nobody has it open.

    StoreBusyError while it is being recovered or open in another program: what is
    half done there would look like damage.
    """
    from pyengine.errors import EngineUnavailableError
    from pyengine.ipc.control_block import EngineMemory
    from pyengine.ipc.shared_objects import find_folder
    from pyengine.ipc.store_lock import look
    from pyengine.native import control as native

    holder = look(root)
    if holder.kind == "nobody":
        return None
    if holder.kind != "engine":
        who = f"another program (pid {holder.pid})" if holder.kind == "foreign" else "its owner, which starts or recovers it"
        raise StoreBusyError(f"{root} is held by {who}: wait for it or stop it first")
    try:
        with EngineMemory.attach(find_folder(root), writable=False) as memory:
            return native.load_position(memory.control.reput_from)
    except EngineUnavailableError as error:
        raise StoreBusyError(f"{root} has an engine whose counters cannot be read: {error}") from error


def print_report(report: CheckReport) -> None:
    """Findings for people, worst first, and what was looked at."""
    if report.findings:
        output.write_table(("severity", "grade", "file", "offset", "what"), [
            (finding.severity.value, finding.grade.label, finding.file, finding.offset, finding.text)
            for finding in report.findings])
        print()
        for advice in dict.fromkeys(finding.advice for finding in report.findings if finding.advice):
            print(f"to do: {output.printable(advice)}")
    if report.left_out:
        print(f"{report.left_out:,} findings of the same kinds are not shown")
    print(report.sentence)
    output.write_facts([
        ("grade", report.grade.label), ("log", f"{report.min_offset:,} to {report.end_offset:,}"), ("messages", report.messages),
        ("queues", f"{report.queues:,} with {report.queue_entries:,} entries"),
        ("index", f"{report.index_files:,} files with {report.index_keys:,} keys"),
        *([("acknowledged", f"{report.acked:,} looked for, {report.acked_missing:,} missing")] if report.acked else []),
        ("read", f"{output.size_text(report.bytes)} in {report.seconds:.2f} s")])
