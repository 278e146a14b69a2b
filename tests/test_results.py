"""PutResult: a tuple underneath, a value by its names."""

from __future__ import annotations

import copy
import pickle

import pytest

from pyengine.results import PutResult, PutStatus

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])
RESULT = PutResult.of_answer((7, 100, 200, 3, 1_700_000_000_000, 0, 0, 1, 100), "T", 2, HOST)


def test_results_are_equal_by_their_names_whatever_else_the_answer_says():
    other = PutResult.of_answer((8, 100, 999, 3, 1_700_000_000_000, 0, 0, 1, 100), "T", 2, HOST)
    assert RESULT == other and not RESULT != other and hash(RESULT) == hash(other)


def test_results_differ_by_a_name_and_from_tuples():
    other = PutResult.of_answer((7, 100, 200, 4, 1_700_000_000_000, 0, 0, 1, 100), "T", 2, HOST)
    assert RESULT != other and not RESULT == other
    assert RESULT != tuple(RESULT) and not RESULT == tuple(RESULT)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, *(
    lambda result, protocol=protocol: pickle.loads(pickle.dumps(result, protocol)) for protocol in range(6))])
def test_a_copy_is_equal_and_says_the_same(copied):
    refused = PutResult(PutStatus.MESSAGE_ILLEGAL, topic="T", reason="too long")
    for result in (RESULT, refused):
        again = copied(result)
        assert type(again) is PutResult and again == result and repr(again) == repr(result)
