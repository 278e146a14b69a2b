"""`pyengine quarantine`: what recovery put into STORE/quarantine, what messages are in it, and putting them back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, raw_option, reading, store_command
from pyengine.errors import EngineError, ExitCode, StoreBusyError, UsageError
from pyengine.formats.constants import SYS_FLAG_TRANSACTION_MASK

if TYPE_CHECKING:
    from pyengine.client.pending_puts import PutFuture
    from pyengine.client.producer import Producer
    from pyengine.formats.record import Message
    from pyengine.ipc.live_reader import LiveStoreReader
    from pyengine.storage.recovery.quarantine import QuarantineEntry

UNDER_WAY_MAX = 256  # puts that are not answered yet
SETTLE_WAIT_S = 60.0  # until what a killed restore had submitted is executed
FLUSH_WAIT_S = 30.0   # until what was put is durable
FLUSH_STEP_S = 0.02


@click.command()
@store_command
@click.argument("action", type=click.Choice(["list", "show", "restore"]), default="list")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--max-messages", type=click.IntRange(min=0), default=32, show_default=True, help="Show at most so many messages.")
@raw_option
def quarantine(
    store: Path, settings: dict[str, str], as_json: bool, action: str, names: tuple[str, ...], max_messages: int, raw: bool,
) -> int:
    """List what recovery moved aside; show the messages in a piece, or put them into the store again.

    A piece NAME is a part of the log that recovery cut (commitlog-..., pool-...), or what was made
    from the log and replaced (queue-..., derived-..., rebuild-...), which `rebuild` makes again.
    `restore` needs a running engine: it puts every whole message of a piece as a new message at the end of its
    queue, with the properties, flags and times of its producer, and notes that in the piece.
    Interrupted, it can be run again: a message comes once. Prepared and rolled back records of
    transactions are left out. Delete the piece by hand when it is no longer wanted.

    \b
    Examples:
      pyengine quarantine STORE
      pyengine quarantine STORE show commitlog-00000000000000047869-512
      pyengine quarantine STORE restore commitlog-00000000000000047869-512
    """
    from pyengine.storage.recovery.quarantine import list_quarantine

    existing_store(store)
    entries = {entry.name: entry for entry in list_quarantine(store)}
    if action == "list":
        if names:
            raise UsageError("list takes no NAME: give show or restore before it")
        _list(list(entries.values()), as_json)
        return ExitCode.OK
    if not names:
        raise UsageError(f"{action} what? name a piece: pyengine quarantine {store} {action} NAME")
    for name in names:
        if name not in entries:
            raise UsageError(f"{store}/quarantine holds no {name}: `pyengine quarantine {store}` lists what it holds")
    if action == "show":
        return _show([entries[name] for name in names], max_messages, raw, as_json)
    restored = restore(store, [entries[name] for name in names], settings)
    if as_json:
        output.write_json({"restored": restored})
    else:
        for name, count in restored.items():
            print(f"{count:,} message{'' if count == 1 else 's'} of {name} put into the store again")
    return ExitCode.OK


def _document(entry: QuarantineEntry) -> dict[str, Any]:
    return asdict(entry) | {"path": str(entry.path)}


def _list(entries: list[QuarantineEntry], as_json: bool) -> None:
    if as_json:
        output.write_json({"pieces": [_document(entry) for entry in entries]})
    elif not entries:
        print("nothing is in quarantine")
    else:
        output.write_table(("piece", "from offset", "bytes", "since", "restored", "why"), [
            (entry.name, entry.physical_offset, entry.size_bytes, entry.at, entry.restored, entry.problem or entry.reason)
            for entry in entries])


def _show(entries: list[QuarantineEntry], max_messages: int, raw: bool, as_json: bool) -> int:
    """What each piece is and the messages in it; FAILED if copied bytes are no longer those that recovery copied."""
    from pyengine.storage.recovery.quarantine import changed_content
    from pyengine.storage.salvage.log import messages_in

    code, documents = ExitCode.OK, []
    for entry in entries:
        problem = entry.problem
        if changed_content(entry):
            problem = "its bytes are not those that recovery copied: the SHA-256 of its note differs"
        code = ExitCode.FAILED if problem else code
        found, count = [], 0
        for message in messages_in(entry):
            count += 1
            if count <= max_messages:
                found.append(message)
        if as_json:
            documents.append(_document(entry) | {"problem": problem, "message_count": count, "messages": [
                output.message_document(one, raw) for one in found]})
            continue
        output.write_facts([("piece", entry.name), ("from", entry.origin), ("from offset", entry.physical_offset),
                            ("bytes", entry.size_bytes), ("since", entry.at), ("why", entry.reason), ("restored", entry.restored),
                            ("whole messages", count), *([("problem", problem)] if problem else [])])
        if found:
            print()
            output.write_message_table(found, raw)
    if as_json:
        output.write_json({"pieces": documents})
    return code


# ---- restore ---------------------------------------------------------------------


def restore(store: Path, entries: list[QuarantineEntry], settings: dict[str, str]) -> dict[str, int]:
    """Put the messages of these pieces into the running store; how many of each piece are there now.

    UsageError for a piece that holds none or is restored already, StoreBusyError while another restore runs, EngineError
    where a put failed or is not durable within FLUSH_WAIT_S: the next restore goes on there.
    """
    from pyengine import connect
    from pyengine.ipc.session_client import CONNECT_TIMEOUT_S

    for entry in entries:
        if not entry.holds_messages:
            raise UsageError(f"{entry.name} holds nothing of the log: `pyengine rebuild` makes queues and index again")
        if entry.restored is not None:
            raise UsageError(f"{entry.name} is restored already: {entry.restored:,} messages")
        if entry.problem:
            raise UsageError(f"{entry.name} cannot be restored: {entry.problem}")
    with (_one_at_a_time(entries[0].path.parent), reading(store, settings) as reader,
          connect(store, ring_bytes=None, timeout_s=CONNECT_TIMEOUT_S, **settings) as producer):
        return {entry.name: _restore(entry, reader, producer) for entry in entries}


def _restore(entry: QuarantineEntry, reader: LiveStoreReader, producer: Producer) -> int:
    from pyengine.ipc.live_reader import settled_end
    from pyengine.storage.recovery.quarantine import note_restore
    from pyengine.storage.salvage.log import identity_of, is_put_again, messages_in

    there: Counter[tuple[object, ...]] = Counter()
    wanted = 0  # the end of all messages of the piece that are in the log
    if entry.restoring_from is None:  # after a power cut the log goes on below what is only written
        note_restore(entry, restoring_from=reader.max_physical_offset("flushed"))
    else:  # a restore was interrupted
        wanted = settled_end(reader.root, SETTLE_WAIT_S)
        there.update(identity_of(message) for message in _messages_from(reader, entry.restoring_from))
    count = 0
    under_way: deque[PutFuture] = deque()
    for message in messages_in(entry):
        if not is_put_again(message):
            continue
        count += 1
        if there[identity_of(message)]:
            there[identity_of(message)] -= 1
            continue
        under_way.append(_put(producer, message))
        if len(under_way) == UNDER_WAY_MAX:
            wanted = max(wanted, _stored_end(under_way.popleft(), entry))
    for future in under_way:
        wanted = max(wanted, _stored_end(future, entry))
    _wait_until_flushed(reader, wanted, entry)
    note_restore(entry, restored=count)
    return count


def _wait_until_flushed(reader: LiveStoreReader, wanted: int, entry: QuarantineEntry) -> None:
    deadline_s = time.monotonic() + FLUSH_WAIT_S
    while (flushed := reader.max_physical_offset("flushed")) < wanted:
        if not reader.is_live or time.monotonic() >= deadline_s:
            raise EngineError(f"{entry.name} is put, but not flushed yet: the log is durable up to {flushed:,}, and its messages end at "
                              f"{wanted:,}; run the command again, it puts nothing twice")
        time.sleep(FLUSH_STEP_S)


def _put(producer: Producer, message: Message) -> PutFuture:
    from pyengine.client.outgoing import RawMessage
    from pyengine.storage.salvage.log import properties_of_producer

    return producer.put_raw_async(RawMessage(
        message.topic, message.body, message.queue_id, properties_of_producer(message), message.flag,
        message.sys_flag & ~SYS_FLAG_TRANSACTION_MASK, message.born_timestamp_ms, message.born_host,
        reconsume_times=message.reconsume_times))


def _stored_end(future: PutFuture, entry: QuarantineEntry) -> int:
    """Where the message ends in the log; EngineError unless it is there."""
    result = future.result()
    if not result.stored:
        raise EngineError(f"{entry.name} is restored in part: a put was answered with {result.status.name}, {result.reason}; "
                          "run the command again, it goes on where this one ended")
    end: int = result.physical_offset + result.size_bytes
    return end


def _messages_from(reader: LiveStoreReader, offset: int) -> Iterator[Message]:
    """The log's messages from this offset on, as far as it is written now."""
    end, size_bytes = reader.max_physical_offset("written"), reader.commit_log.size_bytes
    offset = max(offset, reader.min_physical_offset)
    while offset < end:
        message = reader.message_at(offset, "written")
        if message is not None:
            yield message
        offset = offset + message.size_bytes if message is not None else (offset // size_bytes + 1) * size_bytes


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreBusyError(f"another `quarantine restore` works in {folder}: wait for it") from error
        yield
    finally:
        os.close(descriptor)
