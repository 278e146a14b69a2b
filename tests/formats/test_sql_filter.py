"""SQL92 conditions: a table of verdicts, and what is refused. tests/interop/test_sql_filter.py asks RocketMQ itself."""

from __future__ import annotations

import pytest

from pyengine.errors import UsageError
from pyengine.formats.sql_filter import CHAINED_MAX, DEPTH_MAX, TEXT_MAX_CHARS, VALUES_MAX, SqlFilter

ORDER = {"price": "12", "weight": "0.5", "region": "eu", "note": "it's", "big": "3000000000", "flag": "true", "TAGS": "paid"}

MATCHES = [
    "price > 5 AND region = 'eu'", "price = 12", "price >= 12.0", "12 = price", "-price IS NULL", "price <> 13",
    "region IN ('us', 'eu')", "region NOT IN ('us')", "nosuch IS NULL", "region IS NOT NULL", "note = 'it''s'",
    "weight BETWEEN 0.1 AND 1.0", "price NOT BETWEEN 1 AND 11", "NOT (price < 5)", "price > 5 OR nosuch > 1",
    "nosuch > 1 or PRICE is null", "flag = TRUE", "price > -1", "weight > .25 -- half\n AND price /* pieces */ < 1E2", "TAGS = 'paid'",
    "price > weight", "TRUE", "big = 3000000000", "price = +12",
]
DOES_NOT_MATCH = [
    "price > 12", "nosuch > 1", "NOT (nosuch > 1)", "nosuch = 'x'", "nosuch <> 'x'", "region > 5", "region > 5 OR price = 12", "flag",
    "NULL", "weight = 1", "weight > 1", "price = 12.5", "big > 5", "FALSE", "weight BETWEEN 0.1 AND 1", "Region = 'eu'",
    "nosuch IN ('a')", "nosuch NOT IN ('a')", "(price > 5) = 'x'", "weight > 0", "region > weight",
]
REFUSED = {
    "": "a property, a text or a number is expected",
    "price >": "character 8: a property, a text or a number is expected, not 'the end'",
    "price > 5 garbage": "'garbage' cannot follow a whole condition",
    "5": "a condition is expected, such as `price > 5`",
    "price = NULL": "write IS NULL",
    "region > 'a'": "compares numbers",
    "price BETWEEN 9 AND 1": "the smaller value comes first",
    "5 IN ('a')": "IN needs the name of a property",
    "price IN (1)": "a text in single quotes is expected",
    "price NOT 5": "BETWEEN or IN is expected after NOT",
    "price IS 5": "NULL is expected",
    "TRUE = 5": "cannot be compared with a number",
    "price > 9223372036854775808": "is more than 9223372036854775807",
    "price > 0.0": "write 0 without a point",
    "a || b": "'|' is not part of SQL92",
    "(" * (DEPTH_MAX + 1) + "a = 1" + ")" * (DEPTH_MAX + 1): "within each other",
    "a = '" + "x" * TEXT_MAX_CHARS + "'": "characters; at most",
    " OR ".join(["a>1"] * (VALUES_MAX // 2 + 1)): "names and values outside of IN",
    "a > " + "9" * 5000: "is more than 9223372036854775807",
    "a = 1" + " = TRUE" * (CHAINED_MAX + 1): "comparisons of comparisons",
}


OF_5_MATCHES = ["region CONTAINS 'u'", "note contains 't''s'", "region STARTSWITH 'e' AND region ENDSWITH 'u'", "region NOT CONTAINS 'us'",
                "region NOT STARTSWITH 'u'", "NOT (region ENDSWITH 'e')", "contains IS NULL", "NOT (nosuch CONTAINS 'a')"]
OF_5_DOES_NOT_MATCH = ["region CONTAINS 'us'", "region NOT CONTAINS 'u'", "nosuch CONTAINS 'a'", "nosuch NOT CONTAINS 'a'",
                       "region CONTAINS ''", "region NOT ENDSWITH ''", "5 CONTAINS '5'"]


@pytest.mark.parametrize("sql", MATCHES + OF_5_MATCHES)
def test_a_condition_that_is_true_matches(sql):
    assert SqlFilter(sql).matches(ORDER)


@pytest.mark.parametrize("sql", DOES_NOT_MATCH + OF_5_DOES_NOT_MATCH)
def test_false_unknown_and_incomparable_conditions_do_not_match(sql):
    assert not SqlFilter(sql).matches(ORDER)


OF_5_REFUSED = dict.fromkeys(("region CONTAINS region", "region STARTSWITH"), "a text in single quotes is expected")


@pytest.mark.parametrize(("sql", "problem"), [*REFUSED.items(), *OF_5_REFUSED.items()], ids=range(len(REFUSED) + len(OF_5_REFUSED)))
def test_a_text_that_is_no_condition_is_refused_with_its_place(sql, problem):
    with pytest.raises(UsageError) as refused:
        SqlFilter(sql)
    assert problem in str(refused.value)


def test_long_conditions_take_no_stack():
    sql = " OR ".join(f"n = '{number}' AND n <> 'x'" for number in range(500))
    assert SqlFilter(sql).matches({"n": "499"}) and not SqlFilter(sql).matches({"n": "500"})
    deep = "(" * (DEPTH_MAX - 1) + "n = 1" + " = TRUE" * CHAINED_MAX + ")" * (DEPTH_MAX - 1)
    assert SqlFilter(deep).matches({"n": "1"})


@pytest.mark.timeout(60)  # a second; a minute if each comparison took the time of a search
def test_the_longest_condition_and_the_longest_property_take_a_short_time():
    whole = SqlFilter(" OR ".join(["n > 1"] * (VALUES_MAX // 2)))
    for _ in range(5):
        assert not whole.matches({"n": "0" * 32_000})
    texts = SqlFilter("n IN ({})".format(",".join(f"'{number:x}'" for number in range(9_000))))
    assert texts.matches({"n": "100"}) and not texts.matches({"n": "0" * 32_000})


def test_a_number_of_thousands_of_digits_does_not_match():
    assert not SqlFilter("n > 5").matches({"n": "9" * 5000})
    assert SqlFilter("n > 5").matches({"n": "0" * 5000 + "6"})


@pytest.mark.timeout(20)  # milliseconds, or half an hour if the time grew with the square
@pytest.mark.parametrize("text", ["1" * 200_000, "." + "1" * 200_000, "1." + "1" * 200_000, "1e" + "1" * 200_000, "0x" + "1" * 200_000])
def test_a_long_text_that_is_almost_a_number_is_read_once(text):
    assert not SqlFilter("n > 5.5").matches({"n": text + "x"})


def test_the_rest_of_a_text_is_ignored_only_where_that_is_asked_for():
    lenient = SqlFilter("price > 5 garbage here", ignores_rest=True)
    assert lenient.matches({"price": "6"}) and not lenient.matches({"price": "4"})


@pytest.mark.parametrize(
    ("text", "matches"),
    [("NaN", True), (" 1e3 ", True), ("7d", True), ("0x1p4", True), ("1_0", False), ("٣", False), ("5.", False), ("", False)],
)
def test_a_text_is_a_double_as_java_reads_it(text, matches):
    assert SqlFilter("n > 5.5").matches({"n": text}) is matches


@pytest.mark.parametrize(
    ("text", "matches"), [("+6", True), ("٦", True), ("6.0", False), (" 6", False), ("6_0", False), ("2147483648", False)]
)
def test_a_text_is_an_integer_as_java_reads_it(text, matches):
    assert SqlFilter("n > 5").matches({"n": text}) is matches
