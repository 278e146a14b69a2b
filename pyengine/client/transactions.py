"""Transactions: a message that no consumer sees until its producer says so.

    prepared = producer.put_prepared("orders", b"paid", keys="order-17")
    ...                                             # the producer's own work
    producer.end_transaction(prepared.msg_id, "commit")     # or "rollback"

In the log stand three kinds of record, told apart by two bits of sysFlag (docs/formats.md
section 4). *Prepared*: queue offset 0, in no queue, but found by its keys. *Commit*: the
message itself, in its queue, in the index, with the prepared record's offset in it.
*Rollback*: the prepared record's head without its body, in no queue and not in the index.

Nothing asks back: a prepared message that is never ended stays invisible. RocketMQ:
EndTransactionProcessor.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

from pyengine import arguments
from pyengine.client import outgoing
from pyengine.client.outgoing import PutRefusedError, RawMessage
from pyengine.errors import EngineError, FormatError, UsageError
from pyengine.formats.constants import (
    NAME_VALUE_SEPARATOR,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_SEPARATOR,
    PROPERTY_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_MASK,
    SYS_FLAG_TRANSACTION_PREPARED,
    SYS_FLAG_TRANSACTION_ROLLBACK,
)
from pyengine.formats.record import Message, decode_message_id, encode_properties, hash_map_order
from pyengine.ipc.live_reader import LiveStoreReader
from pyengine.results import PutResult, PutStatus, ReadLevel

Outcome = Literal["commit", "rollback"]
DEFAULT_GROUP = "pyengine"
ENDED_MAX = 10_000     # transactions whose end a producer remembers
COMMITTED_WAIT_S = 5.0  # a record in a pool buffer becomes readable within commit_interval_commit_log_ms
COMMITTED_STEP_S = 0.002
_KINDS = {"commit": SYS_FLAG_TRANSACTION_COMMIT, "rollback": SYS_FLAG_TRANSACTION_ROLLBACK}


class Transactions:
    """The transactions of one producer, which does the puts and owns this object. Thread-safe: one is ended at a time.

    `put_raw(message, timeout_s)` is the producer's.
    """

    def __init__(self, put_raw: Callable[[RawMessage, float | None], PutResult], root: Path) -> None:
        self._put_raw = put_raw
        self._root = root
        self._reader: LiveStoreReader | None = None
        self._lock = threading.Lock()
        self._ended: OrderedDict[int, tuple[str, PutResult]] = OrderedDict()

    def prepare(self, topic: str, body: bytes, *, queue_id: int = 0, tags: str | None = None,
                keys: str | Iterable[str] | None = None, properties: Mapping[str, str] | None = None, flag: int = 0,
                group: str = DEFAULT_GROUP, unique_key: str | None = None, wait: bool = True,
                timeout_s: float | None = None) -> PutResult:
        """Store a prepared message; see Producer.put_prepared."""
        try:
            arguments.text(group, "group")
            pieces = [outgoing.properties_text(tags, keys, properties, unique_key or uuid.uuid4().hex.upper())]
            for name, value in ((PROPERTY_TRANSACTION_PREPARED, "true"), (PROPERTY_PRODUCER_GROUP, group)):
                pieces.append(f"{name}{NAME_VALUE_SEPARATOR}{outgoing.property_value(value, name)}")
            data = outgoing.body_bytes(body)
        except PutRefusedError as refused:
            return PutResult(refused.status, topic=str(topic), queue_id=queue_id, reason=refused.reason)
        return self._put_raw(RawMessage(
            topic, data, queue_id=queue_id, properties_text=PROPERTY_SEPARATOR.join(pieces), flag=flag,
            sys_flag=SYS_FLAG_TRANSACTION_PREPARED, born_timestamp_ms=time.time_ns() // 1_000_000,
            wait_store_msg_ok=wait), timeout_s)

    def end(self, msg_id: str, outcome: Outcome, *, wait: bool = True, timeout_s: float | None = None) -> PutResult:
        """Commit or roll back; see Producer.end_transaction."""
        arguments.text(msg_id, "msg_id")
        if outcome not in _KINDS:
            raise UsageError(f"{outcome!r} ends no transaction: give 'commit' or 'rollback'")
        with self._lock:
            return self._end(msg_id, outcome, wait, timeout_s)

    def _end(self, msg_id: str, outcome: Outcome, wait: bool, timeout_s: float | None) -> PutResult:
        try:
            prepared = self._prepared(msg_id)
            done, result = self._ended.get(prepared.physical_offset) or self._found_committed(prepared)
            if result is not None:
                if done == outcome:
                    return result
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL,
                              f"the transaction of {msg_id} has ended by {done} already, at offset {result.physical_offset}")
        except PutRefusedError as refused:
            return PutResult(refused.status, reason=refused.reason)
        except EngineError as error:  # a store that cannot be read now
            return PutResult(PutStatus.SERVICE_NOT_AVAILABLE, reason=str(error))
        result = self._put_end(prepared, outcome, wait, timeout_s)
        if result.physical_offset >= 0:
            self._ended[prepared.physical_offset] = outcome, result
            if len(self._ended) > ENDED_MAX:
                self._ended.popitem(last=False)
        return result

    def close(self) -> None:
        """Close the store's files."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _put_end(self, prepared: Message, outcome: Outcome, wait: bool, timeout_s: float | None) -> PutResult:
        """The second record: its property text is RocketMQ's, made anew from a map that lost TRAN_MSG."""
        properties = prepared.properties
        names = [name for name in hash_map_order(properties) if name != PROPERTY_TRANSACTION_PREPARED]
        return self._put_raw(RawMessage(
            prepared.topic, prepared.body if outcome == "commit" else b"", queue_id=prepared.queue_id,
            properties_text=encode_properties({name: properties[name] for name in names}), flag=prepared.flag,
            sys_flag=prepared.sys_flag & ~SYS_FLAG_TRANSACTION_MASK | _KINDS[outcome],
            born_timestamp_ms=prepared.born_timestamp_ms, born_host=prepared.born_host, store_host=prepared.store_host,
            reconsume_times=prepared.reconsume_times, prepared_transaction_offset=prepared.physical_offset,
            wait_store_msg_ok=wait), timeout_s)

    # ---- the log ----------------------------------------------------------------

    def _open_reader(self) -> LiveStoreReader:
        if self._reader is None:
            self._reader = LiveStoreReader(self._root)
        return self._reader

    def _prepared(self, msg_id: str) -> Message:
        """The prepared message of this id, or PutRefusedError."""
        try:
            _, offset = decode_message_id(msg_id)
        except FormatError as error:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"{msg_id!r} is no message id: {error}") from None
        reader = self._open_reader()
        deadline_s = time.monotonic() + COMMITTED_WAIT_S
        while True:
            is_readable = offset < reader.max_physical_offset(ReadLevel.COMMITTED)  # before the look: it may become so meanwhile
            message = reader.message(msg_id, ReadLevel.COMMITTED)
            if message is not None:
                break
            if is_readable or time.monotonic() >= deadline_s:
                raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"the store has no message {msg_id}")
            time.sleep(COMMITTED_STEP_S)
        if message.sys_flag & SYS_FLAG_TRANSACTION_MASK != SYS_FLAG_TRANSACTION_PREPARED:
            raise PutRefusedError(PutStatus.MESSAGE_ILLEGAL, f"{msg_id} is not a prepared message")
        return message

    def _found_committed(self, prepared: Message) -> tuple[str, PutResult | None]:
        """The commit record that the index knows, of whatever producer put it. (Rollbacks are in no index.)"""
        if prepared.uniq_key:
            for found in self._open_reader().query_message(prepared.topic, prepared.uniq_key, level=ReadLevel.COMMITTED):
                if (found.sys_flag & SYS_FLAG_TRANSACTION_MASK == SYS_FLAG_TRANSACTION_COMMIT
                        and found.prepared_transaction_offset == prepared.physical_offset):
                    return "commit", PutResult(PutStatus.PUT_OK, found.msg_id, found.queue_offset, found.physical_offset,
                                               found.size_bytes, found.store_timestamp_ms, found.topic, found.queue_id)
        return "", None
