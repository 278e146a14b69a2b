"""SQL92 conditions on a message's properties, as RocketMQ's brokers evaluate them (rocketmq-filter: SelectorParser).

The rules of comparison are those of RocketMQ's Java code. A property is text or absent. Text is converted to a number only
if it is compared with one; a comparison that fails (`'abc' > 5`) makes the whole condition false, not only its part. A
comparison with an absent property is neither true nor false. Several threads may use one SqlFilter.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pyengine import arguments
from pyengine.arguments import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from pyengine.errors import UsageError
from pyengine.formats.record import java_trim

TEXT_MAX_CHARS = 64 * 1024
VALUES_MAX = 4096  # outside of IN: a comparison takes a KB
DEPTH_MAX = 50     # nested brackets, NOT and signs; each takes some frames of the interpreter's stack
CHAINED_MAX = 100  # comparisons of a comparison, as in `a = b = c`, in one condition

_LONG_DIGITS = 19  # checked first, because int() raises an error for thousands of digits

_TOKENS = re.compile(
    r"""(?P<skip>[ \t\n\r\f]+ | --[^\r\n]*(?:\r\n|\n|\r) | /\*[^*]*\*(?:\*|[^*/][^*]*\*)*/)
      | (?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)? | \.[0-9]+(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+)
      | (?P<decimal>0 | [1-9][0-9]*[lL]?)
      | (?P<text>'(?:''|[^'])*')
      | (?P<name>[a-zA-Z_$][a-zA-Z0-9_$]*)
      | (?P<symbol><>|<=|>=|[=<>(),+-])""",
    re.VERBOSE,
)
_KEYWORDS = frozenset(("NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"))
_TEXT_TESTS: Mapping[str, Callable[[str, str], bool]] = {  # RocketMQ 5's; for 4.9 no condition can have them
    "CONTAINS": str.__contains__, "STARTSWITH": str.startswith, "ENDSWITH": str.endswith}
_END = ("end", "the end")

# Numbers keep Java's classes: `5` is an Integer, `5000000000` and `-3000000000` are Longs, `5.0` is a Double.
_JAVA_INT = re.compile(r"[+-]?\d+")
_JAVA_DOUBLE = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?"
    r"|0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+[fFdD]?)"
)


class _Int(int):
    """Java's Integer. A plain int is a Long."""


class _NoAnswerError(Exception):
    """RocketMQ throws here; the message does not match."""


Value = Any  # str, _Int, int (a Long), float (a Double), bool or None
Properties = Mapping[str, str]
_Evaluate = Callable[[Properties], Value]


class _Expression(NamedTuple):
    """A part of a condition: its evaluation, and what the grammar must know of it."""

    evaluate: _Evaluate
    is_boolean: bool = False
    is_constant: bool = False
    constant: Value = None
    property_name: str | None = None


class SqlFilter:
    """A condition such as `price > 5 AND region = 'eu'`; `matches()` tells whether a message's properties meet it.

    UsageError says what is wrong with the text and where. A broker reads the first whole condition and ignores the text
    after it; `ignores_rest` does the same, otherwise such a text raises UsageError.
    """

    def __init__(self, text: str, *, ignores_rest: bool = False) -> None:
        self.text = arguments.text(text, "sql")
        if len(text) > TEXT_MAX_CHARS:
            raise UsageError(f"the SQL condition has {len(text)} characters; at most {TEXT_MAX_CHARS} are read")
        self._evaluate = _Parser(text, ignores_rest).condition().evaluate

    def matches(self, properties: Properties) -> bool:
        """Return whether the condition is true for these properties: not false, not unknown, and without a failed comparison."""
        try:
            return self._evaluate(properties) is True
        except _NoAnswerError:
            return False

    def __repr__(self) -> str:
        return f"SqlFilter({self.text!r})"


class _Parser:
    """Parses one text by recursive descent with one token of lookahead and one method for each level of precedence."""

    def __init__(self, text: str, ignores_rest: bool) -> None:
        self._text = text
        self._ignores_rest = ignores_rest
        self._position = 0
        self._token_start = 0
        self._depth = 0
        self._chained = 0
        self._values = 0
        self._kind, self._token = _END
        self._advance()

    def condition(self) -> _Expression:
        """Parse the whole text."""
        whole = self._boolean(self._or())
        if self._kind != "end" and not self._ignores_rest:
            raise self._error(f"{self._token!r} cannot follow a whole condition")
        return whole

    # -- tokens -------------------------------------------------------------------

    def _advance(self) -> None:
        while self._position < len(self._text):
            found = _TOKENS.match(self._text, self._position)
            self._token_start = self._position
            if found is None:
                raise self._error(f"{self._text[self._position]!r} is not part of SQL92 here")
            self._position = found.end()
            if found.lastgroup == "skip":
                continue
            self._kind, self._token = str(found.lastgroup), found.group()
            if self._kind == "name" and self._token.upper() in _KEYWORDS:
                self._kind, self._token = "symbol", self._token.upper()
            return
        self._token_start = len(self._text)
        self._kind, self._token = _END

    def _is(self, *symbols: str) -> bool:
        return self._kind == "symbol" and self._token in symbols

    def _take(self, *symbols: str) -> str | None:
        if not self._is(*symbols):
            return None
        taken = self._token
        self._advance()
        return taken

    def _take_text_test(self) -> str | None:
        word = self._token.upper()
        if self._kind != "name" or word not in _TEXT_TESTS:
            return None
        self._advance()
        return word

    def _expect(self, symbol: str) -> None:
        if not self._take(symbol):
            raise self._error(f"{symbol} is expected, not {self._token!r}")

    def _error(self, problem: str) -> UsageError:
        return UsageError(f"SQL condition {self._text!r}, character {self._token_start + 1}: {problem}")

    # -- grammar ------------------------------------------------------------------

    def _or(self) -> _Expression:
        parts = [self._and()]
        while self._take("OR"):
            parts.append(self._and())
        return parts[0] if len(parts) == 1 else _junction([self._boolean(part) for part in parts], decisive=True)

    def _and(self) -> _Expression:
        parts = [self._equality()]
        while self._take("AND"):
            parts.append(self._equality())
        return parts[0] if len(parts) == 1 else _junction([self._boolean(part) for part in parts], decisive=False)

    def _count_chained(self, of_comparison: bool) -> None:
        self._chained += of_comparison
        if self._chained > CHAINED_MAX:
            raise self._error(f"more than {CHAINED_MAX} comparisons of comparisons")

    def _equality(self) -> _Expression:
        left = self._comparison()
        while symbol := self._take("=", "<>", "IS"):
            self._count_chained(left.is_boolean)
            if symbol == "IS":
                is_not = self._take("NOT")
                self._expect("NULL")
                left = _is_null(left)
                left = _not(left) if is_not else left
                continue
            right = self._comparison()
            if any(side.is_constant and side.constant is None for side in (left, right)):
                raise self._error("nothing is equal to NULL: write IS NULL or IS NOT NULL")
            if left.is_constant and right.is_constant and left.is_boolean and not right.is_boolean:
                raise self._error("TRUE and FALSE cannot be compared with a number or a text")
            left = _compared(left, right, "=")
            left = _not(left) if symbol == "<>" else left
        return left

    def _comparison(self) -> _Expression:
        left = self._unary()
        while symbol := self._take(">", ">=", "<", "<=", "BETWEEN", "NOT", "IN") or self._take_text_test():
            self._count_chained(left.is_boolean)
            if symbol in (">", ">=", "<", "<="):
                left = self._ordered(left, self._unary(), symbol)
                continue
            negated = symbol == "NOT"
            if negated and not (symbol := self._take("BETWEEN", "IN") or self._take_text_test() or ""):
                raise self._error(f"BETWEEN or IN is expected after NOT, not {self._token!r}")
            if symbol in _TEXT_TESTS:
                left = _tested(left, _TEXT_TESTS[symbol], self._text_literal(), negated)
            else:
                left = self._between(left, negated) if symbol == "BETWEEN" else self._in(left, negated)
        return left

    def _between(self, value: _Expression, negated: bool) -> _Expression:
        low = self._unary()
        self._expect("AND")
        high = self._unary()
        if negated:
            return _junction([self._ordered(value, low, "<"), self._ordered(value, high, ">")], decisive=True)
        both = _junction([self._ordered(value, low, ">="), self._ordered(value, high, "<=")], decisive=False)
        if low.is_constant and high.is_constant and _compare(high.constant, low.constant) < 0:
            raise self._error(f"BETWEEN {low.constant} AND {high.constant} is empty: the smaller value comes first")
        return both

    def _in(self, left: _Expression, negated: bool) -> _Expression:
        self._expect("(")
        texts = [self._text_literal()]
        while self._take(","):
            texts.append(self._text_literal())
        self._expect(")")
        if left.property_name is None:
            raise self._error("IN needs the name of a property on its left")
        return _one_of(left, frozenset(texts), negated)

    def _unary(self) -> _Expression:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._error(f"more than {DEPTH_MAX} brackets, NOT and signs within each other")
        try:
            sign = self._take("+", "-", "NOT")
            if sign is None:
                return self._primary()
            operand = self._unary()
            if sign == "NOT":
                return _not(self._boolean(operand))
            return _negative(operand) if sign == "-" else operand
        finally:
            self._depth -= 1

    def _primary(self) -> _Expression:
        if self._take("("):
            inner = self._or()
            self._expect(")")
            return inner
        self._values += 1
        if self._values > VALUES_MAX:
            raise self._error(f"more than {VALUES_MAX} names and values outside of IN")
        kind, token = self._kind, self._token
        if kind == "text":
            return _constant(self._text_literal())
        if self._is("TRUE", "FALSE", "NULL"):
            self._advance()
            return _constant({"TRUE": True, "FALSE": False, "NULL": None}[token], is_boolean=True)
        if kind in ("decimal", "float"):
            return _constant(self._number())
        if kind == "name":
            self._advance()
            return _Expression(lambda properties: properties.get(token), property_name=token)
        raise self._error(f"a property, a text or a number is expected, not {token!r}")

    def _text_literal(self) -> str:
        if self._kind != "text":
            raise self._error(f"a text in single quotes is expected, not {self._token!r}")
        text = self._token[1:-1].replace("''", "'")
        self._advance()
        return text

    def _number(self) -> int | float:
        kind, token = self._kind, self._token
        digits = token.rstrip("lL")
        number: int | float = float(token) if kind == "float" else int(digits) if len(digits) <= _LONG_DIGITS else INT64_MAX + 1
        if kind == "float" and not 0 < number < math.inf:
            raise self._error(f"{token} is not a number that RocketMQ takes: write 0 without a point")
        if kind == "decimal" and number > INT64_MAX:
            raise self._error(f"{digits[:32]} is more than {INT64_MAX}")
        self._advance()
        return _Int(number) if kind == "decimal" and number <= INT32_MAX else number

    # -- what may follow what -------------------------------------------------------

    def _boolean(self, part: _Expression) -> _Expression:
        if part.is_boolean:
            return part
        if part.property_name is not None:
            return _cast(part)
        raise self._error("a condition is expected, such as `price > 5`, not a value alone")

    def _ordered(self, left: _Expression, right: _Expression, symbol: str) -> _Expression:
        for side in (left, right):
            if side.is_boolean or (side.is_constant and isinstance(side.constant, str)):
                raise self._error(f"{symbol} compares numbers: a text, TRUE, FALSE, NULL or a condition cannot be compared with it")
        return _compared(left, right, symbol)


# -- what the parts give ------------------------------------------------------------


def _constant(value: Value, *, is_boolean: bool = False) -> _Expression:
    return _Expression(lambda properties: value, is_boolean=is_boolean, is_constant=True, constant=value)


def _junction(parts: list[_Expression], *, decisive: bool) -> _Expression:
    """Evaluate parts up to the first one that is `decisive`; without one return unknown if a part is, else the other value."""
    asked = [part.evaluate for part in parts]

    def evaluate(properties: Properties) -> Value:
        is_unknown = False
        for ask in asked:
            value = ask(properties)
            if value is decisive:
                return decisive
            is_unknown = is_unknown or value is None
        return None if is_unknown else not decisive

    return _Expression(evaluate, is_boolean=True)


def _not(part: _Expression) -> _Expression:
    def evaluate(properties: Properties) -> Value:
        value = part.evaluate(properties)
        return None if value is None else not value

    return _Expression(evaluate, is_boolean=True)


def _cast(part: _Expression) -> _Expression:
    """Convert a property alone to a condition: its value is text and never true, not even 'true'."""
    return _Expression(lambda properties: None if part.evaluate(properties) is None else False, is_boolean=True)


def _is_null(part: _Expression) -> _Expression:
    return _Expression(lambda properties: part.evaluate(properties) is None, is_boolean=True)


def _one_of(part: _Expression, texts: frozenset[str], negated: bool) -> _Expression:
    def evaluate(properties: Properties) -> Value:
        value = part.evaluate(properties)
        return None if value is None else (value in texts) != negated

    return _Expression(evaluate, is_boolean=True)


def _tested(part: _Expression, test: Callable[[str, str], bool], text: str, negated: bool) -> _Expression:
    """Test a text; with an empty one, or for what is absent or no text, it is false, negated or not."""
    def evaluate(properties: Properties) -> Value:
        value = part.evaluate(properties)
        return isinstance(value, str) and text != "" and test(value, text) != negated

    return _Expression(evaluate, is_boolean=True)


def _negative(part: _Expression) -> _Expression:
    def evaluate(properties: Properties) -> Value:
        value = part.evaluate(properties)
        if isinstance(value, _Int):
            return _Int(_wrapped(-value, INT32_MIN, INT32_MAX))
        if isinstance(value, float):
            return -value
        if isinstance(value, int) and not isinstance(value, bool):
            return _wrapped(-value, INT64_MIN, INT64_MAX)
        return None

    return _Expression(evaluate)


def _wrapped(number: int, low: int, high: int) -> int:
    return low if number == high + 1 else number


_MEETS: Mapping[str, Callable[[int], bool]] = {
    "=": lambda order: order == 0,
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
}


def _compared(left: _Expression, right: _Expression, symbol: str) -> _Expression:
    meets, is_equality = _MEETS[symbol], symbol == "="

    def evaluate(properties: Properties) -> Value:
        first = left.evaluate(properties)
        if first is None and not is_equality:
            return None
        second = right.evaluate(properties)
        if first is None or second is None:
            if not is_equality or (first is None) != (second is None):
                return False if is_equality and first is not None else None
            return True
        if isinstance(first, str) and isinstance(second, str) and not is_equality:
            first, second = _java_double(first), _java_double(second)
        return meets(_compare(first, second))

    return _Expression(evaluate, is_boolean=True)


def _compare(first: Value, second: Value) -> int:
    """Compare as Java's compareTo after RocketMQ's conversions; return a number below, equal to or above 0."""
    if isinstance(first, bool) or isinstance(second, bool):
        if isinstance(first, str):
            first = first.lower() == "true"
        elif isinstance(first, bool) and isinstance(second, str):
            raise _NoAnswerError  # a ClassCastException there
        elif not (isinstance(first, bool) and isinstance(second, bool)):
            return -1
    elif isinstance(first, str) and not isinstance(second, str):
        first = _like(first, second)
    elif isinstance(second, str) and not isinstance(first, str):
        second = _like(second, first)
    if isinstance(first, str):
        return int(first > second) - int(first < second)
    if isinstance(first, float) or isinstance(second, float):
        return _order_of_doubles(float(first), float(second))
    return int(first > second) - int(first < second)


def _like(text: str, number: int | float) -> int | float:
    """Convert text to a number of the other side's class."""
    if isinstance(number, float):
        return _java_double(text)
    return _java_integer(text, INT32_MIN, INT32_MAX) if isinstance(number, _Int) else _java_integer(text, INT64_MIN, INT64_MAX)


@functools.lru_cache(maxsize=16)  # a condition may compare one long text thousands of times
def _java_integer(text: str, low: int, high: int) -> int:
    if not _JAVA_INT.fullmatch(text) or max(text) > "\uffff":
        raise _NoAnswerError
    sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
    digits = digits.lstrip("0") or "0"
    if len(digits) > _LONG_DIGITS or not low <= (value := int(sign + digits)) <= high:
        raise _NoAnswerError
    return value


@functools.lru_cache(maxsize=16)
def _java_double(text: str) -> float:
    text = java_trim(text)
    if not _JAVA_DOUBLE.fullmatch(text):
        raise _NoAnswerError
    digits = text if text[-1:] in "yN" else text.rstrip("fFdD") if "x" not in text.lower() else re.sub(r"[fFdD]$", "", text)
    if "x" in digits.lower():
        try:
            return float.fromhex(digits)
        except OverflowError:
            return -math.inf if digits.startswith("-") else math.inf
    return float(digits)


def _order_of_doubles(first: float, second: float) -> int:
    """Compare as Double.compareTo: -0.0 is less than 0.0; NaN equals itself and is greater than all others."""
    if math.isnan(first) or math.isnan(second):
        return int(math.isnan(first)) - int(math.isnan(second))
    if first == second == 0:
        return int(math.copysign(1, first) - math.copysign(1, second))
    return (first > second) - (first < second)
