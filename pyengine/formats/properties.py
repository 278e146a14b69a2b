"""The property text of a record: name 0x01 value, joined by 0x02 (section 6)."""

from __future__ import annotations

from collections.abc import Mapping

from pyengine.formats.constants import (
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
