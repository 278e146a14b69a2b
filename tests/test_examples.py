"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fix_cli import SOURCES, environment
from waiting import scaled_timeout_s

EXAMPLES = sorted((SOURCES / "examples").glob("*.py"))


def run_example(name: str, *arguments: object) -> str:
    """stdout of an example; it must end well."""
    done = subprocess.run([sys.executable, str(SOURCES / "examples" / name), *map(str, arguments)], env=environment(),
                          capture_output=True, text=True, timeout=scaled_timeout_s(240))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_under_40_lines(path):
    assert len(path.read_text().splitlines()) < 40


def test_produce_consume_and_tail_queue(tmp_path):
    shown = run_example("produce_consume.py", tmp_path / "store")
    assert "put: PUT_OK" in shown and "put_many: PUT_OK 10 messages from queue offset 1" in shown
    assert "sent: ['18 sent', '19 sent'" in shown and "by key: 17 paid" in shown
    lines = run_example("tail_queue.py", tmp_path / "store", "orders", 0, 3).splitlines()
    assert lines == ["0 paid 17 paid", "1 sent 18 sent", "2 sent 19 sent"]


@pytest.mark.ci
@pytest.mark.java
@pytest.mark.spark
def test_the_spark_example_counts_messages_by_queue(golden):
    store = golden("basic")
    shown = run_example("spark_read.py", store.root)
    queue = store.verify["facts"]["queues"][0]
    assert any(line.replace(" ", "").startswith(f"|{queue['topic']}|{queue['queueId']}|{queue['max']}|")
               for line in shown.splitlines())
