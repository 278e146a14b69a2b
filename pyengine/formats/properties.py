"""The property text of a record: name 0x01 value, joined by 0x02 (section 6), and the hashes that Java makes of such text.

String.hashCode, the codes that the store derives from it, and the order of a HashMap.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from pyengine.formats.constants import (
    INDEX_KEY_SEPARATOR,
    KEY_SEPARATOR,
    NAME_VALUE_SEPARATOR,
    PROPERTY_KEYS,
    PROPERTY_SEPARATOR,
    PROPERTY_UNIQ_KEY,
    PROPERTY_WAIT,
)


def encode_properties(properties: Mapping[str, str | None]) -> str:
    """The text in the mapping's own order, no separator at the end; a None value is left out."""
    return PROPERTY_SEPARATOR.join(
        f"{name}{NAME_VALUE_SEPARATOR}{value}" for name, value in properties.items() if value is not None
    )


def decode_properties(text: str) -> dict[str, str]:
    """Name -> value as MessageDecoder.string2messageProperties reads them.

    A piece without 0x01, with an empty name or an empty value is ignored; the first
    0x01 splits; the last of equal names wins. A separator at the end (4.9.0) is accepted.
    """
    found: dict[str, str] = {}
    for piece in text.split(PROPERTY_SEPARATOR):
        name, _, value = piece.partition(NAME_VALUE_SEPARATOR)
        if name and value:
            found[name] = value
    return found


def split_keys(keys: str | None) -> list[str]:
    """The words of KEYS: split at single spaces, empty words skipped."""
    return [word for word in keys.split(KEY_SEPARATOR) if word] if keys else []


def index_keys(properties: Mapping[str, str]) -> list[str]:
    """What the index holds for a record, in its order: UNIQ_KEY first, then each word of KEYS."""
    uniq_key = properties.get(PROPERTY_UNIQ_KEY)
    words = split_keys(properties.get(PROPERTY_KEYS))
    return [uniq_key, *words] if uniq_key else words


def is_wait_store_ok(properties: Mapping[str, str]) -> bool:
    """Message.isWaitStoreMsgOK: True when WAIT is absent or `true` in any case."""
    return properties.get(PROPERTY_WAIT, "true").lower() == "true"


_INT_MIN = -0x80000000
_HASH_MAP_BUCKETS_MIN = 16


def string_hash(text: str) -> int:
    """`String.hashCode`: h = 31 h + c over UTF-16 units, wrapped to a signed 32-bit number."""
    value = 0
    units: Iterable[int]
    if text.isascii():
        units = text.encode("ascii")
    else:
        # surrogatepass: a Java string may hold a lone surrogate, and hashes it as it is.
        wide = text.encode("utf-16-be", "surrogatepass")
        units = [wide[i] << 8 | wide[i + 1] for i in range(0, len(wide), 2)]
    for unit in units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - 0x1_0000_0000 if value & 0x80000000 else value


def tags_code(tags: str | None) -> int:
    """The tags code of a queue entry (section 8.2): the text's hash, 0 for no tags."""
    return string_hash(tags) if tags else 0


def index_key_hash(topic: str, key: str) -> int:
    """The hash an index entry holds (IndexService.indexKeyHashMethod): |hash|, and 0 for the smallest int."""
    value = string_hash(f"{topic}{INDEX_KEY_SEPARATOR}{key}")
    return 0 if value == _INT_MIN else abs(value)


def hash_map_order(names: Iterable[str]) -> list[str]:
    """`names`, put into a new java.util.HashMap in this order, as its iteration gives them (all different).

    Where RocketMQ makes a property text anew out of a map, this is the order on disk:
    by bucket, in a bucket as they came. (A bucket of more than eight would be a tree.)
    """
    names = list(names)
    buckets = _HASH_MAP_BUCKETS_MIN
    while len(names) > buckets * 3 // 4:
        buckets *= 2

    return sorted(names, key=lambda name: (_known_hash if len(name) <= _KNOWN_CHARS_MAX else _spread_hash)(name) & (buckets - 1))


def _spread_hash(name: str) -> int:
    """HashMap.hash."""
    value = string_hash(name) & 0xFFFFFFFF
    return value ^ value >> 16


_KNOWN_CHARS_MAX = 64
_known_hash = functools.lru_cache(maxsize=1024)(_spread_hash)  # names of properties are mostly the same few
