"""One end of the log for recovery, readers, `check`, `status` and Spark, whatever damage the files have.

Random damages to the golden stores, as they are (RocketMQ's) and with a watermark of ours. Before recovery all say
the same end; recovery keeps the log up to it; afterwards they say it again, and a second recovery changes nothing.
The real store opens the damaged store too (tests/interop/test_one_end_judged.py).
"""

from __future__ import annotations

from itertools import cycle, product

import pytest

from damaged_stores import OURS, RECIPES, THEIRS, damaged_stores, ends_of, recover_accepting, tree
from fix_golden import usual

SEEDS_SHORT, SEEDS_LONG = range(2), range(2, 30)


@pytest.mark.parametrize(("name", "owner"), usual(product(RECIPES, [THEIRS, OURS]), [*zip(RECIPES, cycle([THEIRS, OURS]))], pytest.mark.ci))
def test_all_say_the_same_end_before_and_after_recovery(name, owner, tmp_path):
    hold_all(name, owner, SEEDS_SHORT, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("owner", [THEIRS, OURS])
@pytest.mark.parametrize("name", RECIPES)
def test_all_say_the_same_end_after_many_damages(name, owner, tmp_path):
    hold_all(name, owner, SEEDS_LONG, tmp_path)


def hold_all(name, owner, seeds, folder):
    wrong = []
    for store in damaged_stores(name, owner, seeds, folder):
        before = ends_of(store)
        outcome = recover_accepting(store)
        if outcome is None:  # a file that RocketMQ refuses too
            continue
        end, loss = outcome
        if not loss and set(before.values()) != {end}:
            wrong.append(f"{store.told}: recovery ends at {end}, before it {before}")
        after = ends_of(store)
        if set(after.values()) != {end}:
            wrong.append(f"{store.told}: recovery ends at {end}, after it {after}")
        left = tree(store.root)
        again = recover_accepting(store)
        if again != (end, False) or tree(store.root) != left:
            wrong.append(f"{store.told}: a second recovery ends at {again}, after {end}")
    assert not wrong, "\n".join(wrong)
