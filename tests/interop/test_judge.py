"""The judge itself: it reads the golden stores as the published answers say, and it notices a changed byte."""

from __future__ import annotations

import pytest

from fix_golden import HALTED, RECIPES, USUAL, compare_inspect, load_manifest, load_verify, unpack, usual
from interop.judge import put_row
from replay import decode_put
from waiting import scaled_timeout_s

pytestmark = [pytest.mark.java, pytest.mark.maven]

# The real store sleeps whole seconds: ask for all, then look at each.
WRITTEN = ("basic", "batch", "tx", "ipv6")


@pytest.fixture(scope="module")
def verified(judge, tmp_path_factory, request):
    """recipe -> what the judge reads from the unpacked store, as a Future."""
    folder = tmp_path_factory.mktemp("golden")
    return {name: judge.verify(unpack(name, folder), load_manifest(name)["config"])
            for name in (RECIPES if request.config.run_ci else USUAL)}


@pytest.mark.parametrize("recipe", usual(RECIPES, rest=pytest.mark.ci))
def test_the_judge_reads_what_the_golden_answers_hold(verified, recipe):
    mine, golden = verified[recipe].result(timeout=scaled_timeout_s(240)), load_verify(recipe)
    assert (mine["loadOk"], mine["path"]) == (golden["loadOk"], golden["path"])
    if golden["loadOk"]:
        assert compare_inspect(mine, golden) == []
        assert mine["facts"] == golden["facts"]
        assert mine["after"] == golden["after"]
    assert (mine["path"] == "abnormal") == (recipe in HALTED)


def test_the_judge_notices_a_changed_body_byte(judge, tmp_path):
    root = unpack("basic", tmp_path)
    golden = load_verify("basic")
    record = golden["records"][50]
    segment = next((root / "commitlog").iterdir())
    with open(segment, "r+b") as file:
        file.seek(record["phy"] + 100)
        byte = file.read(1)[0]
        file.seek(record["phy"] + 100)
        file.write(bytes([byte ^ 1]))
    found = judge.verify(root, load_manifest("basic")["config"]).result(timeout=scaled_timeout_s(240))
    differences = compare_inspect(found, golden, ignore=("byTime",))
    # A checksum that no longer fits ends the log there, so this message and all after it are gone.
    assert differences
    assert found["facts"]["maxPhy"] == record["phy"]


@pytest.mark.parametrize("recipe", usual(WRITTEN, ["batch", "tx"], pytest.mark.ci))
def test_the_judge_writes_what_a_manifest_says(judge, tmp_path, recipe):
    manifest = load_manifest(recipe)
    puts = [decode_put(number, row) for number, row in enumerate(manifest["puts"])]
    wrote = judge.write(tmp_path / "store", manifest["config"], [put_row(put) for put in puts]).result(timeout=scaled_timeout_s(240))
    assert [put["status"] for put in wrote["puts"]] == [put["status"] for put in manifest["puts"]]
    assert wrote["records"] == manifest["records"]
    queues = {(queue["topic"], queue["queueId"]): queue["entries"] for queue in wrote["facts"]["queues"]}
    assert queues == {(queue["topic"], queue["queueId"]): queue["entries"] for queue in manifest["facts"]["queues"]}
    assert wrote["after"]["abort"] is False


def test_the_judge_appends_to_a_golden_store(judge, tmp_path):
    root = unpack("basic", tmp_path)
    manifest = load_manifest("basic")
    put = decode_put(0, manifest["puts"][0])
    wrote = judge.write(root, manifest["config"], [put_row(put, with_clock=False)] * 3).result(timeout=scaled_timeout_s(240))
    assert [row["status"] for row in wrote["puts"]] == ["PUT_OK"] * 3
    assert wrote["puts"][0]["phy"] == manifest["facts"]["maxPhy"]
    assert len(wrote["records"]) == len(manifest["records"]) + 3
    assert len(wrote["messages"]) == len(load_verify("basic")["messages"]) + 3
