"""read_queue and read_records of pyengine._front: they give what decode_record and a plain walk give, whatever the bytes are."""

from __future__ import annotations

import copy
import dataclasses
import gc
import mmap
import os
import pickle
import signal
import struct
import sys
import weakref

import pytest

from pyengine._front import read_queue, read_records, use_message
from pyengine.errors import FormatError
from pyengine.formats.constants import CQ_ENTRY_BYTES, CQ_EXT_ADDRESS_MAX, CQ_FILLER_SIZE
from pyengine.formats.consume_queue import ENTRY, belongs_to, is_ext_address
from pyengine.formats.record import Message, decode_host, decode_record, string_hash
from pyengine.results import GetStatus
from record_bytes import encode_record

SEGMENT_BYTES = 1 << 14
ALL = (1 << 40, 1 << 40, 1 << 40, 1 << 30, 1 << 40, 1 << 30)


class Log:
    """Segments in memory, and entries that lead to their records."""

    def __init__(self) -> None:
        self.segments: dict[int, bytearray | None] = {}
        self.entries = bytearray()
        self.end = 0

    def put(self, topic: str = "T", queue_id: int = 0, body: bytes = b"body", properties: str = "", tags_code: int | None = None,
            **fields: object) -> None:
        record = encode_record(topic=topic, body=body, queue_id=queue_id, properties=properties, physical_offset=self.end,
                               queue_offset=len(self.entries) // CQ_ENTRY_BYTES, **fields)
        if self.end % SEGMENT_BYTES + len(record) > SEGMENT_BYTES:
            self.end += SEGMENT_BYTES - self.end % SEGMENT_BYTES
            return self.put(topic, queue_id, body, properties, tags_code, **fields)
        base = self.end - self.end % SEGMENT_BYTES
        segment = self.segments.setdefault(base, bytearray(SEGMENT_BYTES))
        segment[self.end - base : self.end - base + len(record)] = record
        tags = dict(piece.split("\x01", 1) for piece in properties.split("\x02") if "\x01" in piece).get("TAGS", "")
        code = string_hash(tags) if tags_code is None else tags_code
        self.entries += ENTRY.pack(self.end, len(record), code)
        self.end += len(record)

    def find_segment(self, offset: int) -> tuple[int, int, bytes | None]:
        base = offset - offset % SEGMENT_BYTES
        segment = self.segments.get(base)
        # A copy of its own: a read beyond its end is seen by the address sanitizer.
        return base, min(base + SEGMENT_BYTES, (1 << 63) - 1), None if segment is None else bytes(segment)


def read(log: Log, messages_max: int = 1 << 20, tags: frozenset[str] | None = None, limits: tuple[int, ...] = ALL,
         find_code=lambda address: None, topic: str = "T", queue_id: int = 0):
    codes = struct.pack(f"={len(tags or ())}i", *map(string_hash, tags or ()))
    status, messages, numbers, passed = read_queue(
        bytes(log.entries), 0, len(log.entries), 0, messages_max, topic, queue_id, limits, codes, tags, log.find_segment, find_code,
        belongs_to)
    return GetStatus(status), messages, numbers, passed


def records(log: Log, messages_max: int, tags: frozenset[str] | None, limits: tuple[int, ...], find_code):
    codes = struct.pack(f"={len(tags or ())}i", *map(string_hash, tags or ()))
    return read_records(bytes(log.entries), 0, len(log.entries), 0, messages_max, "T", 0, limits, codes, tags, log.find_segment, find_code,
                        belongs_to)


def walk(log: Log, messages_max: int, tags: frozenset[str] | None, limits: tuple[int, ...], find_code):
    """The same in plain Python."""
    log_end, in_memory, *both = limits
    status, messages, numbers, total, gone, at = GetStatus.NO_MATCHED_MESSAGE, [], [], 0, range(0), 0
    codes = {string_hash(tag) for tag in tags or ()}
    for at in range(0, len(log.entries), CQ_ENTRY_BYTES):
        offset, size, code = ENTRY.unpack_from(log.entries, at)
        if offset in gone:
            continue
        if messages:
            bytes_max, count_max = both[2:] if log_end - offset > in_memory else both[:2]
            if len(messages) >= messages_max or len(messages) >= count_max or total + size > bytes_max:
                break
        if tags is not None:
            known = find_code(code) if is_ext_address(code) else code
            if known is not None and (known + (1 << 31)) % (1 << 32) - (1 << 31) not in codes:
                status = status if messages else GetStatus.NO_MATCHED_MESSAGE
                continue
        base, end, view = (0, -1, None) if offset < 0 else log.find_segment(offset)
        try:
            message = None if view is None else decode_record(view, offset - base)
        except FormatError:
            message = None
        if message is None or (message.physical_offset, message.size_bytes) != (offset, size) or not belongs_to(message, "T", 0):
            status = status if messages else GetStatus.MESSAGE_WAS_REMOVING
            if offset >= 0 and view is None and size != CQ_FILLER_SIZE:
                gone = range(base, end)
            continue
        if tags is not None and message.tags not in tags:
            status = status if messages else GetStatus.NO_MATCHED_MESSAGE
            continue
        messages.append(message)
        numbers.append(at // CQ_ENTRY_BYTES)
        total += size
        status = GetStatus.FOUND
    else:
        at = len(log.entries)
    return status, messages, numbers, at // CQ_ENTRY_BYTES


PROPERTY_TEXTS = ("", "TAGS\x01a\x02", "TAGS\x01b", "TAGS\x01\x02KEYS\x01k", "\x01x\x02TAGS\x01a\x02TAGS\x01b", "x\x02\x02y\x01z\x01w\x02",
                  "ä\x01€\x02TAGS\x01ü", "INNER_MULTI_DISPATCH\x01T,U\x02INNER_MULTI_QUEUE_OFFSET\x013,4")
HOSTS = ("1.2.3.4:10911", "255.255.255.255:2147483647", "[2001:db8::1]:1", "[::]:0")


def random_log(rng, count: int) -> Log:
    log = Log()
    for _ in range(count):
        log.put(topic=rng.choice(["T", "T", "T", "U", "Tä"]), queue_id=rng.choice([0, 0, 0, 1]), body=rng.randbytes(rng.randrange(300)),
                properties=rng.choice(PROPERTY_TEXTS), flag=rng.randrange(-9, 9), sys_flag=rng.choice([0, 1, 4, 8, 12]),
                born_host=rng.choice(HOSTS), store_host=rng.choice(HOSTS), born_timestamp_ms=rng.getrandbits(62),
                store_timestamp_ms=rng.getrandbits(62), reconsume_times=rng.randrange(5), prepared_transaction_offset=rng.getrandbits(62),
                tags_code=rng.choice([None, None, None, CQ_EXT_ADDRESS_MAX - rng.randrange(3), rng.getrandbits(40)]))
    return log


def damage(log: Log, rng) -> None:
    """Change bytes of records and entries, mostly where lengths are; take segments away."""
    for segment in filter(None, log.segments.values()):
        for _ in range(rng.randrange(30)):
            at = rng.choice([ENTRY.unpack_from(log.entries, rng.randrange(0, len(log.entries), CQ_ENTRY_BYTES))[0] % SEGMENT_BYTES
                             + rng.randrange(100), rng.randrange(SEGMENT_BYTES)]) % SEGMENT_BYTES
            data = rng.choice([b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", rng.randbytes(2)])
            segment[at : at + len(data)] = data
            del segment[SEGMENT_BYTES:]
    for _ in range(rng.randrange(10)):
        at = rng.randrange(0, len(log.entries), CQ_ENTRY_BYTES)
        log.entries[at : at + CQ_ENTRY_BYTES] = rng.choice([
            ENTRY.pack(0, CQ_FILLER_SIZE, 0), ENTRY.pack(rng.randrange(-10, 1 << 17), rng.randrange(-10, 400), 0),
            ENTRY.pack(-(1 << 63), -(1 << 31), -(1 << 63)), ENTRY.pack((1 << 63) - 1, (1 << 31) - 1, (1 << 63) - 1), bytes(20)])
    if rng.random() < 0.3:
        log.segments[rng.choice(list(log.segments))] = None
    if rng.random() < 0.3:
        base = rng.choice(list(log.segments))
        log.segments[base] = bytearray((log.segments[base] or b"")[: rng.randrange(SEGMENT_BYTES)])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_it_agrees_with_a_plain_walk(rng, is_damaged):
    for _ in range(60):
        log = random_log(rng, rng.randrange(1, 250))
        if is_damaged:
            damage(log, rng)
        tags = rng.choice([None, None, frozenset({"a"}), frozenset({"a", "ü", "nothing"})])
        limits = rng.choice([ALL, (1 << 20, rng.randrange(1 << 16), *(rng.randrange(1, 3000), rng.randrange(1, 40)) * 2)])
        unit_codes = {CQ_EXT_ADDRESS_MAX: string_hash("a"), CQ_EXT_ADDRESS_MAX - 1: string_hash("c") + (1 << 40)}
        count = rng.choice([1, 7, 1000])
        found, expected = read(log, count, tags, limits, unit_codes.get), walk(log, count, tags, limits, unit_codes.get)
        assert found == expected
        stored = [bytes(log.segments[(at := message.physical_offset) - at % SEGMENT_BYTES])[at % SEGMENT_BYTES:][:message.size_bytes]
                  for message in found[1]]
        assert records(log, count, tags, limits, unit_codes.get) == (
            found[0], b"".join(stored), len(stored), found[3], found[1][0].physical_offset if stored else -1)
        for message, reference in zip(found[1], expected[1]):
            assert dataclasses.astuple(message)[:-1] == dataclasses.astuple(reference)[:-1]
            assert (message.properties, message.tags, message.keys, message.transaction_type) == (
                reference.properties, reference.tags, reference.keys, reference.transaction_type)
            assert is_damaged or message.msg_id == reference.msg_id


@pytest.fixture
def message() -> Message:
    return read_one()


def read_one() -> Message:
    log = Log()
    log.put(body=b"whole", properties="TAGS\x01a\x02KEYS\x01k", store_host="[2001:db8::1]:1")
    return read(log)[1][0]


def test_it_is_a_message_like_any_other(message):
    plain = decode_record(bytes_of(message), 0)
    assert isinstance(message, Message) and message.__class__ is Message and dataclasses.is_dataclass(message)
    assert message == plain and plain == message and hash(message) == hash(plain) and {message: 1}[plain] == 1
    assert message != dataclasses.replace(plain, flag=3) and message != "T"
    assert repr(message) == repr(plain) and str(message).startswith("Message(topic='T', body=b'whole'")
    moved = dataclasses.replace(message, queue_id=7)
    assert (type(moved), moved.queue_id, moved.body) == (Message, 7, b"whole")
    assert type(message)(**{field.name: getattr(message, field.name) for field in dataclasses.fields(message) if field.init}) == plain
    match message:
        case Message(topic, body, queue_id=0):
            assert (topic, body) == ("T", b"whole")
        case _:
            pytest.fail("no match")


def bytes_of(message: Message) -> bytes:
    made = ("size_bytes", "raw_properties", "body_crc")
    names = [field.name for field in dataclasses.fields(Message) if field.init and field.name not in made]
    return encode_record(properties=message.raw_properties, **{name: getattr(message, name) for name in names})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, *(
    lambda message, protocol=protocol: pickle.loads(pickle.dumps(message, protocol)) for protocol in range(6))])
def test_a_copy_is_equal(message, copied):
    again = copied(message)
    assert again == message and again.properties == message.properties and type(again) is Message


@pytest.mark.parametrize("name", ["topic", "body", "queue_id", "born_host", "properties", "tags", "msg_id", "anything"])
def test_it_cannot_be_changed(message, name):
    for one in (message, decode_record(bytes_of(message))):
        with pytest.raises((AttributeError, TypeError)):  # some versions of Python have TypeError where it is not a field
            setattr(one, name, 1)
        with pytest.raises((AttributeError, TypeError)):
            delattr(one, name)


def test_a_message_keeps_its_decoded_fields(message):
    assert message.properties is message.properties
    assert message.body is message.body and message.topic is message.topic


def test_a_later_change_of_the_log_does_not_change_a_message():
    log = Log()
    log.put(body=b"as it was", properties="TAGS\x01a")
    view = memoryview(log.segments[0])
    found = read_queue(bytes(log.entries), 0, len(log.entries), 5, 1, "T", 0, ALL, b"", None, lambda offset: (0, SEGMENT_BYTES, view),
                       lambda address: None, belongs_to)[1][0]
    view[:] = bytes(SEGMENT_BYTES)
    assert (found.body, found.tags, found.queue_offset, found.store_host) == (b"as it was", "a", 0, "127.0.0.1:10911")


def test_numbers_are_counted_from_the_first_entry():
    log = Log()
    for _ in range(4):
        log.put()
    found = read_queue(log.entries, CQ_ENTRY_BYTES, 3 * CQ_ENTRY_BYTES, 1_000_000_000_001, 9, "T", 0, ALL, b"", None, log.find_segment,
                       lambda address: None, belongs_to)
    assert (found[2], found[3]) == ([1_000_000_000_001, 1_000_000_000_002], 2)


def test_errors_of_what_it_calls_come_out(rng):
    log = random_log(rng, 50)
    log.put(tags_code=CQ_EXT_ADDRESS_MAX)

    def fail(*_):
        raise OSError("here")

    for arguments in ({"find_segment": fail}, {"belongs": fail, "queue_id": 9}, {"find_code": fail, "tags": frozenset({"zzz"})},
                      {"find_segment": lambda offset: (0, 1)}, {"find_segment": lambda offset: (0, SEGMENT_BYTES, "text")},
                      {"find_code": lambda code: "x", "tags": frozenset({"zzz"})}):
        given = {"queue_id": 0, "tags": None, "find_segment": log.find_segment, "find_code": lambda code: None,
                 "belongs": belongs_to} | arguments
        codes = b"" if given["tags"] is None else struct.pack("=i", string_hash("zzz"))
        for read_entries in (read_queue, read_records):
            with pytest.raises((OSError, TypeError)):
                read_entries(bytes(log.entries), 0, len(log.entries), 0, 1 << 20, "T", given["queue_id"], ALL, codes, given["tags"],
                             given["find_segment"], given["find_code"], given["belongs"])


@pytest.mark.parametrize("span", [(-20, 20), (0, 40), (0, 21)])
def test_entries_outside_the_file_are_refused(span):
    log = Log()
    log.put()
    with pytest.raises(ValueError, match="do not lie in the file"):
        read_queue(log.entries, *span, 0, 1, "T", 0, ALL, b"", None, log.find_segment, lambda address: None, belongs_to)


def test_a_deleted_message_leaves_no_references():
    log = Log()
    for _ in range(50):
        log.put(topic="orders", properties="TAGS\x01a")
    topic, entries = "".join(["ord", "ers"]), bytes(log.entries)  # not "T", which all of Python shares

    def ask() -> list[Message]:
        return read_queue(entries, 0, len(entries), 0, 50, topic, 0, ALL, b"", None, log.find_segment, lambda address: None, belongs_to)[1]

    before = sys.getrefcount(topic), sys.getrefcount(type(ask()[0])), sys.getrefcount(entries)
    for message in ask():
        assert message.properties and message.born_host and not pickle.loads(pickle.dumps(message)).flag
    del message
    assert (sys.getrefcount(topic), sys.getrefcount(type(ask()[0])), sys.getrefcount(entries)) == before


def test_a_table_that_names_its_own_message_is_collected(message):
    class Marker:
        """Dies with the message."""

    marker = Marker()
    dead = weakref.ref(marker)
    message.properties["message"], message.properties["marker"] = message, marker
    del marker
    gc.collect()
    assert dead() is message.properties["marker"]
    table = message.properties
    table["message"] = [Message("T", b"", 0, 0, 0, 0), read_one()]
    table["message"][1].properties.update(itself=table["message"][1], marker=table.pop("marker"))
    del table["message"]
    gc.collect()
    assert dead() is None


def test_the_class_is_chosen_once():
    with pytest.raises(RuntimeError):
        use_message(Message, decode_host)


def test_texts_are_sound_while_another_process_changes_the_file():
    """CPython finds out whether bytes are ASCII, then copies them: a text of bytes that changed in between would be damaged."""
    with mmap.mmap(-1, 1 << 20) as segment:
        record = encode_record(topic="T", body=b"", properties="k\x01" + "v" * 32000)
        segment[: len(record)] = record
        entry = ENTRY.pack(0, len(record), 0)
        child = os.fork()
        while child == 0:
            segment[len(record) - 1] = 0xE9
            segment[len(record) - 1] = ord("v")
        try:
            for _ in range(20000):
                _, (message,), _, _ = read_queue(entry, 0, len(entry), 0, 1, "T", 0, ALL, b"", None,
                                                 lambda offset: (0, 1 << 20, segment), None, None)
                assert not message.raw_properties.isascii() or message.raw_properties[-1] == "v"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
