"""SQL92 conditions are accepted, refused and answered as RocketMQ's own filter does."""

from __future__ import annotations

import random

import pytest

from formats.test_sql_filter import DOES_NOT_MATCH, MATCHES, ORDER, REFUSED
from pyengine.errors import UsageError
from pyengine.formats.sql_filter import SqlFilter
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

NAMES = ("a", "b", "$c", "_d", "TAGS", "nosuch")
TEXTS = ("5", "-5", "+7", "5.5", "eu", "true", "TRUE", "", " 5 ", "NaN", "Infinity", "-0.0", "0", "1e3", "7d", "0x1p4", "2147483648",
         "-9223372036854775808", "9223372036854775808", "٣", "5_0", "it's", "a'b", "0.0", "1.", ".5", "5L")
LITERALS = ("5", "0", "7", "5.5", ".5", "1e3", "2147483647", "2147483648", "9223372036854775807", "5l", "'5'", "'eu'", "''",
            "'it''s'", "TRUE", "FALSE", "NULL", "true", "-5", "+5", "- -5", "-2147483648", "1.", "0.0", "05", "9223372036854775808")
ODD = ("--x\n", "/* c */", "--", "|", ";", "NOT", "AND", "x y", "(", ")", ",", "'", "IS", "\f", "<", "%")


def random_condition(rng: random.Random, depth: int = 0) -> str:
    if depth < 3 and rng.random() < 0.45:
        left, right = random_condition(rng, depth + 1), random_condition(rng, depth + 1)
        return rng.choice((f"{left} AND {right}", f"{left} or {right}", f"({left}) OR ({right})", f"NOT ({left})", f"NOT {left}",
                           f"({left}) = {right}"))
    name, value, other = rng.choice(NAMES), rng.choice(LITERALS + NAMES), rng.choice(LITERALS + NAMES)
    if rng.random() < 0.15:
        name = rng.choice(LITERALS)
    symbol = rng.choice(("=", "<>", "<", "<=", ">", ">=", "="))
    return rng.choice((
        f"{name} {symbol} {value}", f"{name}{symbol}{value}", f"{name} BETWEEN {value} AND {other}",
        f"{name} NOT BETWEEN {value} AND {other}", f"{name} IN ('5', 'eu')", f"{name} NOT IN ('true','a','b','c','d','5')",
        f"{name} IS NULL", f"{name} IS NOT NULL", f"-{name} {symbol} {value}", name, f"{name} {symbol} {value} {symbol} {other}"))


def spoilt(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text) + 1)
    return text[:place] + " " * rng.randrange(2) + rng.choice(ODD) + text[place:]


def verdicts(sql: str, sets: list[dict[str, str]]) -> list[bool] | None:
    try:
        condition = SqlFilter(sql, ignores_rest=True)
    except UsageError:
        return None
    return [condition.matches(each) for each in sets]


@pytest.mark.ci
def test_conditions_are_answered_as_rocketmq_answers_them(judge, rng):
    sets = [ORDER, {}] + [{name: rng.choice(TEXTS) for name in NAMES[:-1] if rng.random() < 0.8} for _ in range(12)]
    texts = [*MATCHES, *DOES_NOT_MATCH, *list(REFUSED)[:-5]]
    for _ in range(1500):
        text = random_condition(rng)
        texts.append(spoilt(rng, text) if rng.random() < 0.25 else text)
    theirs = judge.filter([(sql, sets) for sql in texts]).result(timeout=scaled_timeout_s(120))["verdicts"]
    different = [(sql, mine, his) for sql, his in zip(texts, theirs, strict=True) if (mine := verdicts(sql, sets)) != his]
    assert different == []
    assert any(each is None for each in theirs) and any(each and True in each for each in theirs)
