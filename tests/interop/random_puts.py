"""Random puts of every kind, the same for the same seed: what RocketMQ writes for them, we must write too.

The generator follows the log's position, so that it can place records that leave exactly 7, 8, 9 ...
bytes free at the end of a segment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from pyengine.formats.record import BatchMember, decode_batch, encode_batch, encode_host, encode_properties
from replay import Expected, Put

FIXED_BYTES = 75  # of a record, without hosts, body, topic and properties
BLANK_BYTES = 8
EDGES = (0, 1, 7, 8, 9, 15, 16, 100)
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC
TAGS = ("TagA", "TagB", "polygenelubricants", "", None, "标签", "a||b")
PROPERTY_NAMES = ("shop", "région", "n" * 40)
UNKNOWN = Expected("?")


def random_settings(rng: random.Random) -> dict[str, str]:
    """Small files, so that everything rolls, under RocketMQ's names."""
    return {
        "mappedFileSizeCommitLog": str(rng.choice((4, 16, 64)) << 10),
        "mappedFileSizeConsumeQueue": str(rng.choice((60, 400, 1000))),
        "maxHashSlotNum": str(rng.choice((1, 8, 64))),
        "maxIndexNum": str(rng.choice((400, 4000))),
    }


def random_puts(rng: random.Random, count: int, segment_bytes: int) -> list[Put]:
    """`count` puts, about one in eight a batch and one in six placed at a segment's edge; `expected` is unknown."""
    maker = _Maker(rng, segment_bytes)
    return [maker.put() for _ in range(count)]


def expecting(put: Put, answer: dict[str, Any]) -> Put:
    """The put with RocketMQ's answer, as the judge gives it."""
    if "append" not in answer:
        return replace(put, expected=Expected(answer["status"]))
    expected = Expected(
        answer["status"], answer["phy"], answer["size"], answer["queueOffset"], answer["storeTs"], answer["msgId"],
        answer["msgNum"]
    )
    return replace(put, expected=expected)


@dataclass
class _Maker:
    rng: random.Random
    segment_bytes: int
    clock_ms: int = 1_700_000_000_000
    position: int = 0
    number: int = -1

    def put(self) -> Put:
        self.number += 1
        self.clock_ms += self.rng.choice((0, 0, 1, 7, 900, 5000))
        put = self.batch() if self.rng.random() < 1 / 8 else self.single()
        self.advance(put)
        return put

    def single(self) -> Put:
        transaction = self.rng.choice((0, 0, 0, 0, PREPARED, COMMIT, ROLLBACK))
        put = self.blank_put(encode_properties(self.properties()), transaction)
        if self.rng.random() < 1 / 6:
            room = self.segment_bytes - self.position % self.segment_bytes - self.rng.choice(EDGES) - self.size(put, b"")
            if 0 <= room <= self.longest_body(put):
                return replace(put, body=self.rng.randbytes(room), has_body=True)
        length = self.rng.choice((0, 1, self.rng.randrange(300), self.rng.randrange(min(1500, self.longest_body(put)))))
        if length == 0 and self.rng.random() < 0.5:
            return put
        return replace(put, body=self.rng.randbytes(length), has_body=True)

    def batch(self) -> Put:
        members, batch_text = [], self.rng.choice(("", "TRACE\x01on\x02CLUSTER\x01c"))
        put = replace(self.blank_put(batch_text, 0), is_batch=True, prepared_transaction_offset=0, flag=0)
        room = self.segment_bytes - BLANK_BYTES
        for _ in range(self.rng.randrange(1, 12)):
            member = BatchMember(self.rng.randbytes(self.rng.randrange(200)), self.rng.randrange(3),
                                 encode_properties(self.properties()))
            room -= self.member_bytes(put, member, batch_text)
            if room < 0:
                break
            members.append(member)
        return replace(put, body=encode_batch(members), has_body=True)

    def blank_put(self, properties: str, transaction: int) -> Put:
        rng = self.rng
        return Put(
            number=self.number,
            is_batch=False,
            topic=rng.choice(("T", "Other-topic", "主题-ü", "%RETRY%g")),
            queue_id=rng.randrange(3),
            has_body=False,
            properties_text=properties,
            flag=rng.choice((0, 1, -1, rng.randrange(-(2**31), 2**31))),
            sys_flag=transaction | rng.choice((0, 0, 1, 2)),
            born_timestamp_ms=self.clock_ms - rng.randrange(50),
            born_host=rng.choice((f"10.1.0.{rng.randrange(256)}:{rng.randrange(65536)}",
                                  f"[2001:db8::{rng.randrange(1, 9999):x}]:2000")),
            store_host=rng.choice(("10.2.0.9:10911", "10.2.0.9:10911", "[fd00::beef]:10911")),
            reconsume_times=rng.choice((0, 0, 3)),
            prepared_transaction_offset=rng.randrange(10**9) if transaction else 0,
            wait_store_msg_ok=True,
            delay_level=0,
            clock_ms=self.clock_ms,
            expected=UNKNOWN,
        )

    def properties(self) -> dict[str, str | None]:
        rng = self.rng
        pairs: list[tuple[str, str | None]] = [
            ("TAGS", rng.choice(TAGS)),
            ("KEYS", rng.choice((None, f"k{rng.randrange(20)}", f"k{rng.randrange(9)} order-{rng.randrange(9)}", " lead  two ",
                                 "ключ"))),
            ("UNIQ_KEY", rng.choice((None, f"{rng.getrandbits(128):032X}"))),
        ]
        pairs += [(name, rng.choice((None, f"值-{rng.randrange(5)}"))) for name in PROPERTY_NAMES]
        rng.shuffle(pairs)
        return dict(pairs)

    def longest_body(self, put: Put) -> int:
        return self.segment_bytes - BLANK_BYTES - self.size(put, b"")

    def size(self, put: Put, body: bytes) -> int:
        hosts = len(encode_host(put.born_host)) + len(encode_host(put.store_host))
        return FIXED_BYTES + hosts + len(body) + len(put.topic.encode()) + len(put.properties_text.encode())

    def member_bytes(self, put: Put, member: BatchMember, batch_text: str) -> int:
        joined = len(member.properties_text.encode()) + (1 if member.properties_text and batch_text else 0)
        return self.size(put, member.body) + joined

    def advance(self, put: Put) -> None:
        """Moves the position as the writer does: a record that would leave fewer than 8 bytes goes to the next segment."""
        if put.is_batch:
            size = sum(self.member_bytes(put, member, put.properties_text) for member in decode_batch(put.body))
        else:
            size = self.size(put, put.body)
        free = self.segment_bytes - self.position % self.segment_bytes
        if size + BLANK_BYTES > free:
            self.position += free
        self.position += size
