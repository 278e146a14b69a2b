"""The alerts and the dashboard of monitoring/: each alert has a case in which it fires and one in which it is silent.

That they ask only for what `pyengine metrics` exports is in tests/cli/test_cli_metrics.py.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

MONITORING = Path(__file__).parents[1] / "monitoring"
RULES = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
CASES = (MONITORING / "alerts_test.yml").read_text(encoding="utf-8")
ALERTS = re.findall(r"- alert: (\w+)", RULES)


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent():
    cases = re.findall(r"- name: (\w+) (fires|is silent)\n(?:.|\n)*?alertname: (\w+)\n\s+exp_alerts:(.*)", CASES)
    assert len(set(ALERTS)) == len(ALERTS) > 10
    assert all(name == alert for name, _, alert, _ in cases)
    assert sorted((name, what) for name, what, _, _ in cases) == sorted((name, what) for name in ALERTS for what in ("fires", "is silent"))
    assert all((expected.strip() == "[]") == (what == "is silent") for _, what, _, expected in cases)


def test_each_alert_says_what_is_wrong_and_what_to_do_and_the_pages_exist():
    rules = RULES.split("- alert: ")[1:]
    for rule in rules:
        assert re.search(r'severity: (critical|warning)\n', rule) and re.search(r'summary: ".+"\n', rule), rule
        action = re.search(r'action: "(.+)"\n', rule)
        assert action, rule
        for page in re.findall(r"docs/[\w/]+\.md", action[1]):
            assert (MONITORING.parent / page).exists(), page


def test_the_dashboard_is_a_document_whose_panels_each_have_a_query_and_a_place():
    dashboard = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    panels = dashboard["panels"]
    assert all(target["expr"] and "$store" in target["expr"] for panel in panels for target in panel["targets"])
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places) and all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@pytest.mark.promtool
@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")], ids=["check", "test"])
def test_prometheus_accepts_the_alerts_and_they_fire_as_their_cases_say(arguments):
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
