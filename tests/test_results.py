"""PutResult: a tuple underneath, a value by its names."""

from __future__ import annotations

import copy
import pickle

import pytest

from pyengine.results import (
    PutIndeterminateError,
    PutManyResult,
    PutNotDurableError,
    PutRefusedError,
    PutResult,
    PutStatus,
)

HOST = bytes([127, 0, 0, 1, 0, 0, 42, 159])


def answered(queue_offset: int = 3, *, sequence: int = 7, size_bytes: int = 200) -> PutResult:
    return PutResult._of_answer((sequence, 100, size_bytes, queue_offset, 1_700_000_000_000, 0, 0, 1, 100), "T", 2, HOST)


RESULT = answered()


def test_results_are_equal_by_their_names_whatever_else_the_answer_says():
    other = answered(sequence=8, size_bytes=999)
    assert RESULT == other and not RESULT != other and hash(RESULT) == hash(other)


def test_results_differ_by_a_name_and_from_tuples():
    other = answered(4)
    assert RESULT != other and not RESULT == other
    assert RESULT != RESULT._values() and not RESULT == RESULT._values()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, *(
    lambda result, protocol=protocol: pickle.loads(pickle.dumps(result, protocol)) for protocol in range(6))])
def test_a_copy_is_equal_and_says_the_same(copied):
    refused = PutResult(PutStatus.MESSAGE_ILLEGAL, topic="T", reason="too long")
    for result in (RESULT, refused):
        again = copied(result)
        assert type(again) is PutResult and again == result and repr(again) == repr(result)


STORED_STATUSES = {PutStatus.PUT_OK, PutStatus.FLUSH_DISK_TIMEOUT, PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE}


def results_of(status: PutStatus, **more):
    """A put's and a put_many's result with this status, as the producer makes them."""
    offset = 100 if status in STORED_STATUSES else -1
    return (PutResult(status, queue_offset=offset, physical_offset=offset, topic="T", **more),
            PutManyResult(status, int(offset >= 0), offset, offset, topic="T", **more))


@pytest.mark.parametrize("status", PutStatus)
def test_a_result_is_true_only_when_all_that_was_asked_for_is_kept(status):
    for result in results_of(status):
        assert bool(result) is result.ok is (status is PutStatus.PUT_OK)
        assert result.stored is (status in STORED_STATUSES)
        assert result.count == (1 if status in STORED_STATUSES else 0)


@pytest.mark.parametrize("status", PutStatus)
def test_raise_for_status_gives_the_result_or_raises_with_it(status):
    for result in results_of(status, reason="the reason"):
        if result:
            assert result.raise_for_status() is result
            continue
        kind = PutNotDurableError if status in STORED_STATUSES else PutRefusedError
        with pytest.raises(kind, match=f"{status.name}: the reason") as raised:
            result.raise_for_status()
        assert raised.value.result is result
        again = pickle.loads(pickle.dumps(raised.value))
        assert (type(again), str(again), again.result) == (type(raised.value), str(raised.value), result)


def test_an_indeterminate_put_raises_an_error_of_its_own():
    for result in results_of(PutStatus.UNKNOWN_ERROR, reason="no answer", indeterminate=True):
        with pytest.raises(PutIndeterminateError, match="no answer.*put it again"):
            result.raise_for_status()
