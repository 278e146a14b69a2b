"""One setting: its name, unit, default, range and meaning, and how its text is read.

`Setting` is a row of the table that `pyengine.engine_config.EngineConfig` is made
of; documentation, error sentences, `config explain` and the parsing of text all
follow that one table. Nothing here knows where a value comes from.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, cast

from pyengine.errors import ConfigError

Value = bool | int | str

BYTE_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
MILLISECOND_UNITS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
TRUE_WORDS = frozenset(("true", "yes", "on", "1"))
FALSE_WORDS = frozenset(("false", "no", "off", "0"))

_NUMBER_WITH_UNIT = re.compile(r"([+-]?\d[\d_]{0,30})\s*([a-z]*)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table of settings.

    `name` is RocketMQ's in snake_case with the unit appended, `key` RocketMQ's own
    camelCase key ("" where RocketMQ has none). `unit` is one of bytes, ms, us, h,
    percent or "". `low` and `high` bound a number, both inclusive; `choices` bounds
    a word; `multiple_of` rounds a number up, as RocketMQ does for queue files.
    `fixed` marks a size that files depend on. `live` says for whom a change takes effect while an engine runs, "" where
    it needs a restart.
    """

    name: str
    default: Value
    meaning: str
    key: str = ""
    unit: str = ""
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()
    words: tuple[tuple[str, int], ...] = ()
    multiple_of: int = 1
    fixed: bool = False
    live: str = ""
    group: str = ""

    def read(self, value: object, where: str) -> Value:
        """The typed, checked value of what a source says; ConfigError names `where` and what is allowed."""
        if isinstance(self.default, bool):
            return self._read_bool(value, where)
        if isinstance(self.default, int):
            return self._read_int(value, where)
        return self._read_text(value, where)

    def check(self, value: object) -> None:
        """Refuse a value of the wrong type or out of range; the check of values given in Python."""
        self.read(value, "argument")

    def allowed(self) -> str:
        """What may be given, in words: `1,024 to 2,147,483,647 bytes`."""
        if isinstance(self.default, bool):
            return "true or false"
        if isinstance(self.default, int):
            words = "".join(f"{word}, " for word, _ in self.words)
            unit = f" {self.unit}" if self.unit else ""
            if self.high is None:
                return f"{words}{self.low or 0:,} or more{unit}"
            return f"{words}{self.low or 0:,} to {self.high:,}{unit}"
        if self.choices:
            return " or ".join((", ".join(self.choices[:-1]), self.choices[-1]))
        return "text"

    def show(self, value: Value) -> str:
        """The text that reads back as `value`."""
        if isinstance(value, bool):
            return "true" if value else "false"
        for word, number in self.words:
            if value == number:
                return word
        return str(value)

    def _refuse(self, value: object, where: str) -> ConfigError:
        return ConfigError(f"{self.name} = {value!s} ({where}) is not allowed: give {self.allowed()}")

    def _read_bool(self, value: object, where: str) -> bool:
        if isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in TRUE_WORDS:
            return True
        if word in FALSE_WORDS:
            return False
        raise self._refuse(value, where)

    def _read_int(self, value: object, where: str) -> int:
        number = self._number(value, where)
        if number in (meant for _, meant in self.words):
            return number
        if self.low is not None and number < self.low or self.high is not None and number > self.high:
            raise self._refuse(value, where)
        return -(-number // self.multiple_of) * self.multiple_of

    def _number(self, value: object, where: str) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
        if not isinstance(value, str):
            raise self._refuse(value, where)
        text = value.strip()
        for word, meant in self.words:
            if text.lower() == word:
                return meant
        match = _NUMBER_WITH_UNIT.fullmatch(text)
        if match is None:
            raise self._refuse(value, where)
        factor = self._factor(match[2].lower())
        if factor is None:
            raise self._refuse(value, where)
        return int(match[1].replace("_", "")) * factor

    def _factor(self, unit: str) -> int | None:
        if self.unit == "bytes":
            return BYTE_UNITS.get(unit.removesuffix("ib") if len(unit) == 3 else unit)
        if self.unit == "ms":
            return MILLISECOND_UNITS.get(unit)
        return 1 if unit in ("", self.unit) else None

    def _read_text(self, value: object, where: str) -> str:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self._refuse(value, where)
        text = str(value).strip()
        if not self.choices:
            return text
        for choice in self.choices:
            if text.upper() == choice.upper():
                return choice
        raise self._refuse(value, where)


def split_address(text: str) -> tuple[str, int]:
    """Host and port of host:port, as in 10.0.0.1:10912 or [::1]:10912; ValueError for what is no such text."""
    host, _, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not (bare and port.isascii() and port.isdecimal() and int(port) <= 65_535):
        raise ValueError(f"{text} is not host:port")
    return bare, int(port)


def setting(default: Value, meaning: str, **row: object) -> Any:
    """A dataclass field that carries its Setting; the field's own name is filled in by `settings_of`."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, **row})


def settings_of(config_class: type) -> dict[str, Setting]:
    """The table of a class made of `setting` fields, by name, in the order of the class."""
    return {
        field.name: Setting(name=field.name, default=cast("Value", field.default), **field.metadata)
        for field in dataclasses.fields(config_class)
        if "meaning" in field.metadata
    }
