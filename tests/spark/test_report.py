"""`pyengine report` over real stores: the page's figures are the parser's, and the groups' own lags."""

from __future__ import annotations

import json
import re

import pytest

from fix_cli import picture, run
from fix_golden import unpack
from spark import oracle

pytestmark = [pytest.mark.spark, pytest.mark.java]


def test_a_page_of_a_store_with_groups_at_an_odd_path(spark, tmp_path):
    root = unpack("roll", tmp_path / "a <b>'s & \"störe\" #1%20?")
    messages = oracle.log_messages(root)
    end = {queue: sum((m.topic, m.queue_id) == ("Roll1", queue) for m in messages) for queue in (0, 1)}
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "consumerOffset.json").write_text(json.dumps({"offsetTable": {"Roll1@billing": {"0": 5, "1": end[1]}}}))
    before = picture(root)
    file = tmp_path / "out #2.html"
    file.write_text("an older page")
    done = run("report", root, "--html", file, "--json")
    assert done.code == 0, done.stderr
    text = file.read_text(encoding="utf-8")
    found = done.document
    assert (found["messages"], found["bytes"]) == (len(messages), sum(m.size_bytes for m in messages))
    topics = {one["topic"]: one for one in found["topics"]}
    assert topics.keys() == {m.topic for m in messages}
    for name, one in topics.items():
        mine = [m for m in messages if m.topic == name]
        assert one["count"] == {"messages": len(mine), "bytes": sum(m.size_bytes for m in mine)}
        assert (one["first_ms"], one["last_ms"]) == (min(m.store_timestamp_ms for m in mine), max(m.store_timestamp_ms for m in mine))
        assert one["largest"] == max(m.size_bytes for m in mine)
    [group] = found["groups"]
    assert (group["group"], group["topic"], group["lag"]) == ("billing", "Roll1", end[0] - 5)
    assert f"<b>{len(messages):,}</b>messages" in text and "billing on Roll1" in text and "a &lt;b&gt;" in text
    drawn = [int(number.replace(",", "")) for number in re.findall(r"</td><td>([\d,]+)</td><td>[\d.,]+ \w+</td></tr>", text)]
    assert sum(drawn) == len(messages)
    assert picture(root) == before and sorted(path.name for path in tmp_path.iterdir()) == sorted([root.parent.name, file.name])


def test_report_accepts_an_empty_store_with_a_non_text_name_and_refuses_wrong_targets(spark, tmp_path):
    root, file = tmp_path / "sto\udcffre", tmp_path / "pa\udcffge.html"
    (root / "commitlog").mkdir(parents=True)
    done = run("report", root, "--html", file)
    assert done.code == 0 and "0 messages of 0 topics" in done.stdout
    assert "no messages" in file.read_text() and "sto\\udcffre" in file.read_text()
    for file in (root, tmp_path / "nowhere" / "page.html"):
        refused = run("report", root, "--html", file)
        assert refused.code == 2 and "give a file in a folder that exists" in refused.stderr
