"""One setting or option: its name, unit, default, range and meaning, and how its text is read.

`Setting` is a row of the tables that `pyengine.engine_config.EngineConfig` and `pyengine.spark.options.ReadOptions` are made
of; documentation, error sentences, `config explain` and the parsing of text all
follow them. Nothing here knows where a value comes from.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pyengine.arguments import INT32_MAX
from pyengine.errors import ConfigError

Value = bool | int | str

_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# Unit of a number -> what may stand behind it, in any case, and how many of the unit that is, if "" is 1 of it.
UNITS: dict[str, dict[str, int]] = {
    "bytes": {"": 1, "b": 1, **_BINARY, **{f"{letter}ib": factor for letter, factor in _BINARY.items()}},
    "ms": {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000},
}
UNITS["h"] = UNITS["ms"] | {"": UNITS["ms"]["h"]}  # in ms, of which the number is to be a multiple
_EXAMPLES = {"bytes": ", as 64m", "ms": ", as 30s", "h": ", as 90d: whole hours"}
TRUTH = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}

_UNIT_OF_NAME = {"bytes": "bytes", "ms": "ms", "hours": "h", "ratio": "percent"}  # by the last word of a name
_MOST = {"ms": UNITS["ms"]["d"], "percent": 100}
_NUMBER_WITH_UNIT = re.compile(r"([+-]?\d[\d_]{0,30})\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of a table of settings or options.

    `name` is in snake_case with the unit appended, `key` the name that RocketMQ or Spark has for it ("" where there is none).
    `kind` is bool, int or str. `unit` is one of bytes, ms, us, h, percent or "", by default what the name ends with; `units` are
    what a number may end in. `low` and `high` bound a number, both inclusive, by default 1 and a day, 100 % or the largest int of
    Java; `multiple_of` rounds it up, as RocketMQ does for queue files. `words` have a meaning of their own, without a range the
    only ones; `parse` reads a text of another form. `sentence` says what is allowed where the range does not.
    `fixed` marks a size that files depend on. `live` says for whom a change takes effect while an engine runs, "" where
    it needs a restart. `default_text` is the default as a person gives it.
    """

    name: str
    default: Any
    meaning: str
    kind: type
    key: str = ""
    unit: str = ""
    units: Mapping[str, int] = dataclasses.field(default_factory=dict)
    low: int = 1
    high: int = INT32_MAX
    multiple_of: int = 1
    words: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    parse: Callable[[str], Any] | None = None
    sentence: str = ""
    fixed: bool = False
    live: str = ""
    group: str = ""
    default_text: str = ""

    def read(self, value: object, where: str) -> Value:
        """The typed, checked value of what a source says; ConfigError names `where` and what is allowed."""
        try:
            found: Value = self.value_of(value)
        except ValueError as error:
            raise ConfigError(f"{self.name} = {value!s} ({where}) is not allowed: {error}") from None
        return found

    def value_of(self, given: object) -> Any:
        """The typed, checked value of a text or of a value from a program; ValueError says what is allowed."""
        if self.kind is bool and isinstance(given, bool):
            return given
        if isinstance(given, bool) or not isinstance(given, (str, int)):
            raise self._refusal()
        text = str(given).strip()
        for word, meant in self.words.items():
            if text.casefold() == word.casefold():
                return meant
        if self.kind is int:
            return self._number(text)
        if self.parse is not None:
            return self.parse(str(given))
        if self.words:
            raise self._refusal()
        return text

    def allowed(self) -> str:
        """What may be given, in words: `1,024 to 2,147,483,647 bytes`."""
        if self.sentence:
            return self.sentence
        words = ["true", "false"] if self.kind is bool else list(self.words)
        if self.kind is int:
            return ", ".join([*words, f"{self.low:,} to {self.high:,}{f' {self.unit}' if self.unit else ''}"])
        return " or ".join((", ".join(words[:-1]), words[-1])) if words else "text"

    def show(self, value: object) -> str:
        """The text that reads back as `value`."""
        return next((word for word, meant in self.words.items() if meant == value), "" if value is None else str(value))

    def _refusal(self) -> ValueError:
        return ValueError(f"give {self.allowed()}{'' if self.sentence else _EXAMPLES.get(self.unit, '')}")

    def _number(self, text: str) -> int:
        """The number in a text, which may end in a unit."""
        found = _NUMBER_WITH_UNIT.fullmatch(text)
        factor = self.units.get(found[2].lower()) if found else None
        if found is not None and factor is not None:
            number, rest = divmod(int(found[1].replace("_", "")) * factor, self.units.get("", 1))
            if not rest and (self.low <= number <= self.high or number in self.words.values()):
                return -(-number // self.multiple_of) * self.multiple_of
        raise self._refusal()


def split_address(text: str) -> tuple[str, int]:
    """Host and port of host:port, as in 10.0.0.1:10912 or [::1]:10912; ValueError for what is no such text."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (bare and port.isascii() and port.isdecimal() and int(port) <= 65_535):
        raise ValueError(f"{text} is not host:port")
    return bare, int(port)


def join_address(host: str, port: int | str) -> str:
    """The text that split_address() reads: an address of IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def setting(default: Any, meaning: str, **row: object) -> Any:
    """A dataclass field that carries its Setting, of which `settings_of` fills in what the field's name and default say."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **row})


def of_rocketmq(default: Value, meaning: str, **row: object) -> Any:
    """A setting that RocketMQ has too, by the same name unless the row has a `key`."""
    return setting(default, meaning, **{"key": None, **row})


def settings_of(config_class: type) -> dict[str, Setting]:
    """The table of a class made of `setting` fields, by name, in the order of the class. A row without a group is of the last one's."""
    found: dict[str, Setting] = {}
    group = ""
    for field in dataclasses.fields(config_class):
        if "meaning" in field.metadata:
            row: dict[str, Any] = {"unit": _UNIT_OF_NAME.get(field.name.rpartition("_")[2], ""), "group": group, **field.metadata}
            unit, choices = row["unit"], row.pop("choices", ())
            if row.get("key", "") is None:
                row["key"] = _key(field.name)
            kind = next((kind for kind in (bool, int) if isinstance(field.default, kind)), str)
            words = TRUTH if kind is bool else {word: word for word in choices}
            found[field.name] = Setting(field.name, field.default, **{
                "kind": kind, "units": UNITS.get(unit, {"": 1, unit: 1}), "high": _MOST.get(unit, INT32_MAX), "words": words, **row})
            group = row["group"]
    return found


def _key(name: str) -> str:
    """RocketMQ's key of a setting, which has no unit: flush_interval_commit_log_ms -> flushIntervalCommitLog."""
    first, *words = re.sub("_(bytes|ms|hours)$", "", name).split("_")
    return first + "".join(map(str.capitalize, words))
