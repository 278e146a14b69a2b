"""`pyengine diff`: exit codes and what it prints of two stores; neither is changed."""

from __future__ import annotations

import re
import shutil

from damage import flip
from fix_cli import changes, picture, run


def test_a_store_and_its_copy_are_equal(golden):
    store = golden("basic")
    other = shutil.copytree(store.root, store.root.with_name("copy"))
    before = picture(store.root), picture(other)
    ran = run("diff", store.root, other, "--json")
    assert (ran.code, ran.document["is_equal"], ran.document["exit_code"], ran.document["differences"]) == (0, True, 0, [])
    assert ran.document["records"]["equal"] == sum(1 for record in store.verify["records"] if record.get("topic"))
    human = run("diff", store.root, other)
    assert human.code == 0 and "The stores are equal from 0 to" in human.stdout and "TopicA1" in human.stdout
    assert (changes(before[0], picture(store.root)), changes(before[1], picture(other))) == ([], [])


def test_diff_reports_a_changed_body_with_exit_code_3(golden):
    store = golden("basic")
    other = shutil.copytree(store.root, store.root.with_name("copy"))
    record = next(record for record in store.verify["records"][30:] if record.get("topic"))
    flip(other / "commitlog" / ("0" * 20), record["phy"] + 90)
    ran = run("diff", store.root, other, "--json")
    assert (ran.code, ran.document["first_difference"]) == (3, record["phy"])
    (found,) = ran.document["differences"]
    assert (found["kind"], found["topic"], found["fields"], found["bad_crc"]) == ("differs", record["topic"], ["body"], ["other"])
    human = run("diff", store.root, other)
    assert human.code == 3 and re.search(r"differs +body +other", human.stdout)
    assert re.search(rf"^OTHER +{other} ", human.stdout, re.MULTILINE)


def test_a_path_without_a_store_is_refused(golden, tmp_path):
    ran = run("diff", golden("basic").root, tmp_path / "nothing")
    assert ran.code == 2 and "does not exist" in ran.stderr
