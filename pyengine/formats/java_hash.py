"""Java's String.hashCode, the codes that the store derives from it, and the order of a HashMap."""

from __future__ import annotations

from collections.abc import Iterable

from pyengine.formats.constants import INDEX_KEY_SEPARATOR

_INT_MIN = -0x80000000
_HASH_MAP_BUCKETS_MIN = 16


def string_hash(text: str) -> int:
    """`String.hashCode`: h = 31 h + c over UTF-16 units, wrapped to a signed 32-bit number."""
    value = 0
    if text.isascii():
        units = text.encode("ascii")
    else:
        # surrogatepass: a Java string may hold a lone surrogate, and hashes it as it is.
        wide = text.encode("utf-16-be", "surrogatepass")
        units = memoryview(wide).cast("B")
        units = [units[i] << 8 | units[i + 1] for i in range(0, len(wide), 2)]
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

    def bucket(name: str) -> int:
        value = string_hash(name) & 0xFFFFFFFF
        return (value ^ value >> 16) & (buckets - 1)

    return sorted(names, key=bucket)
