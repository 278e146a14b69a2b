"""The blocks of the pages on delayed messages, transactions, topics and recipes run, one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from test_docs import blocks_of, reader  # noqa: F401

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300)]


def test_a_delayed_message_arrives(reader):  # noqa: F811
    shell, program, at_a_time = blocks_of("docs/delayed.md")
    assert "pay reminder" in reader.run(shell)
    assert reader.run(program) == "True\n"
    assert reader.run(at_a_time) == "SCHEDULE_TOPIC_XXXX\nb'light the candles' True\n"


def test_a_transaction_is_committed(reader):  # noqa: F811
    (block,) = blocks_of("docs/transactions.md")
    assert reader.run(block) == "['PUT_OK', 'PUT_OK']\n"


def test_topics_are_made_and_listed(reader):  # noqa: F811
    shell, program, choice = blocks_of("docs/topics.md")
    said = reader.run(shell)
    assert "4 queues to read, 8 to write, R--" in said and '"messages": 1' in said
    assert reader.run(program) == "['orders', 'payments']\n"
    assert reader.run(choice) == "{0}\n"


def test_the_recipes_run(reader, tmp_path):  # noqa: F811
    start, outbox, traces, logs, frames, dbt, _ = blocks_of("docs/recipes.md")
    reader.run(start)
    reader.run(outbox)
    assert reader.run(traces) == "same trace: True\n"
    reader.run(logs)
    assert reader.run(frames).splitlines() == [
        "[('app', 'the printer is on fire')]", "[('the printer is on fire',), ('the printer is warm',)]"]
    plugins = tmp_path / "stub" / "dbt" / "adapters" / "duckdb"  # dbt itself would bring sixty packages
    plugins.mkdir(parents=True)
    (plugins / "plugins.py").write_text("class BasePlugin: pass\n")
    reader.environment["PYTHONPATH"] += f":{tmp_path / 'stub'}"
    use = ("\nfrom types import SimpleNamespace\nplugin = Plugin()\nplugin.initialize({'store': 'my-store'})\n"
           "print(plugin.load(SimpleNamespace(identifier='logs')).num_rows, 'rows')\n")
    assert reader.run(replace(dbt, text=dbt.text + use)) == "2 rows\n"


@pytest.mark.java
@pytest.mark.spark
def test_the_recipe_for_spark_and_delta_lake_runs(reader):  # noqa: F811
    start, _, _, logs, _, _, delta = blocks_of("docs/recipes.md")
    reader.run(start)
    reader.run(logs)
    assert reader.run(delta) == "2 rows\n"
