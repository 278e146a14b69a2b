"""Transactions of clients: the end of a half message, and the question to its producer when no end comes.

A client's transaction is stored as pyengine's own are (pyengine/client/half_messages.py): a half message, then what it
becomes and an op message. RocketMQ: EndTransactionProcessor, TransactionalMessageCheckService.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from pyengine.client.half_messages import HalfMessages, PreparedCheck, real_place
from pyengine.errors import EngineError, PutError
from pyengine.formats.constants import (
    PROPERTY_PRODUCER_GROUP,
    SYS_FLAG_TRANSACTION_COMMIT,
    SYS_FLAG_TRANSACTION_NONE,
    SYS_FLAG_TRANSACTION_ROLLBACK,
    TRANSACTION_HALF_TOPIC,
)
from pyengine.formats.record import Message, encode_message
from pyengine.gateway import codes
from pyengine.gateway.connections import Answer, Handlers, Request
from pyengine.gateway.members import Members
from pyengine.gateway.names import Address
from pyengine.gateway.positions import LEVEL
from pyengine.gateway.sends import Puts
from pyengine.ipc.live_reader import LiveStoreReader

COMMITTED_WAIT_S = 5.0   # a half message in a pool buffer becomes readable within commit_interval_commit_log_ms
COMMITTED_STEP_S = 0.02
THREADS = 4              # of their own: what waits here must not hold up offsets and pulls
COMMIT_DISTANCE = 1 << 32  # an offset that far beyond the log's end is no commit
_OUTCOMES = {SYS_FLAG_TRANSACTION_COMMIT: "commit", SYS_FLAG_TRANSACTION_ROLLBACK: "rollback"}


class Ends:
    """The ends of transactions, and the rounds that ask for those that are missing."""

    def __init__(self, puts: Puts, reader: LiveStoreReader, members: Members, address: Address) -> None:
        config = reader.config
        self._puts = puts
        self._reader = reader
        self._members = members
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="ends")
        self._halves = HalfMessages(reader.root, lambda message, timeout_s: puts.open().put_raw(message, timeout_s=timeout_s),
                                    host=address.broker, timeout_ms=config.transaction_timeout_ms)
        self._check = PreparedCheck(self._halves, check_max=config.transaction_check_max,
                                    reserved_ms=config.file_reserved_time_hours * 3_600_000)
        self.interval_s = config.transaction_check_interval_ms / 1000  # between two rounds of ask_for_ends()
        self.handlers: Handlers = {codes.END_TRANSACTION: self.end}

    def prepare(self) -> None:
        """Have the half topic in topics.json; not in the loop's thread."""
        self._halves.enter(TRANSACTION_HALF_TOPIC)

    async def end(self, request: Request) -> Answer | None:
        """Commit or roll back, where group and offsets are those of the half message. UNKNOWN changes nothing."""
        kind = request.integer("commitOrRollback")
        group = request.text("producerGroup")
        queue_offset, offset = request.integer("tranStateTableOffset", bits=64), request.integer("commitLogOffset", bits=64)
        if kind == SYS_FLAG_TRANSACTION_NONE:
            return Answer()
        if kind not in _OUTCOMES:
            return Answer(codes.SYSTEM_ERROR, f"{kind} ends no transaction")
        try:
            half = await self._find(offset)
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, str(error))
        if half is None:
            return Answer(codes.SYSTEM_ERROR, "Find prepared transaction message failed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._end, _OUTCOMES[kind], group, queue_offset, half)

    def _end(self, outcome: str, group: str, queue_offset: int, half: Message) -> Answer:
        try:
            if half.properties.get(PROPERTY_PRODUCER_GROUP) != group:
                return Answer(codes.SYSTEM_ERROR, "The producer group wrong")
            if half.queue_offset != queue_offset:
                return Answer(codes.SYSTEM_ERROR, "The transaction state table offset wrong")
            result = self._halves.end(half, "commit" if outcome == "commit" else "rollback")
        except PutError as error:
            return Answer(codes.SYSTEM_ERROR, str(error))
        except EngineError as error:
            return Answer(codes.SERVICE_NOT_AVAILABLE, str(error))
        return Answer() if result.stored else Answer(codes.SYSTEM_ERROR, result.reason)

    async def _find(self, offset: int) -> Message | None:
        """The half message, waited for while what was acknowledged is not in its file yet. No thread waits for it."""
        deadline_s = time.monotonic() + COMMITTED_WAIT_S
        while True:
            end = self._reader.max_physical_offset(LEVEL)
            half = await asyncio.get_running_loop().run_in_executor(self._executor, self._halves.find, offset)
            if half is not None or time.monotonic() >= deadline_s or not 0 <= offset - end < COMMIT_DISTANCE:
                return half
            await asyncio.sleep(COMMITTED_STEP_S)

    # ---- asking -------------------------------------------------------------------

    async def ask_for_ends(self) -> None:
        """Look once for undecided transactions, and ask a producer of each one's group. What fails with one is raised at the end."""
        failed: Exception | None = None
        for half in await asyncio.get_running_loop().run_in_executor(self._executor, self._check.round, self._can_ask):
            try:
                self._ask(half)
            except Exception as error:  # noqa: BLE001 - the others are asked all the same
                failed = error
        if failed is not None:
            raise failed

    def _can_ask(self, group: str) -> bool:
        return group in self._members.producers

    def _ask(self, half: Message) -> None:
        """Tell one producer of the group; its answer is an END_TRANSACTION."""
        clients = self._members.producers.get(half.properties.get(PROPERTY_PRODUCER_GROUP, ""))
        if not clients:
            return  # it has gone since: the next round asks another
        topic, queue_id = real_place(half)
        unique = half.uniq_key or ""
        next(iter(clients)).tell(codes.CHECK_TRANSACTION_STATE, {
            "commitLogOffset": str(half.physical_offset), "msgId": unique, "offsetMsgId": half.msg_id,
            "tranStateTableOffset": str(half.queue_offset), "transactionId": unique,
        }, encode_message(replace(half, topic=topic, queue_id=queue_id)))

    def close(self) -> None:
        """Wait for the ends under way and close the store's files."""
        self._executor.shutdown(wait=True)
        self._halves.close()
