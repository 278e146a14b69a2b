"""Why the source has no filter pushdown: with it Spark keeps one query's filter for the next (docs/design/08-spark-reads.md).

A toy source shows it, so that a Spark that plans each query anew is noticed here.
"""

from __future__ import annotations

import contextlib

import pytest

from fix_golden import unpack
from fix_spark import spark_version

pytestmark = [
    pytest.mark.spark,
    pytest.mark.java,
    pytest.mark.skipif(spark_version() < (4, 1), reason="Spark 4.0 has no filter pushdown for Python sources"),
]

ENABLED = "spark.sql.python.filterPushdown.enabled"
ROWS = {"a": 3, "b": 5}


@contextlib.contextmanager
def pushdown(spark):
    before = spark.conf.get(ENABLED)
    spark.conf.set(ENABLED, "true")
    try:
        yield
    finally:
        spark.conf.set(ENABLED, before)


def toy_source():
    """A source of ROWS[topic] rows for each topic that applies `topic = ...` itself."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, EqualTo

    class Reader(DataSourceReader):
        wanted = None

        def pushFilters(self, filters):
            for one in filters:
                if isinstance(one, EqualTo) and one.attribute == ("topic",):
                    self.wanted = one.value
                else:
                    yield one

        def read(self, partition):
            for topic, count in (("a", 3), ("b", 5)):
                if self.wanted in (None, topic):
                    yield from [(topic,)] * count

    class Toy(DataSource):
        @classmethod
        def name(cls):
            return "toy_with_pushdown"

        def schema(self):
            return "topic STRING"

        def reader(self, schema):
            return Reader()

    return Toy


@pytest.mark.long
def test_spark_gives_wrong_counts_for_a_dataframe_that_is_used_twice_with_pushdown(spark):
    spark.dataSource.register(toy_source())
    mended = "Spark plans each query anew now: docs/design/08-spark-reads.md can change"
    with pushdown(spark):
        df = spark.read.format("toy_with_pushdown").load()
        assert df.where("topic = 'a'").count() == ROWS["a"]
        assert df.count() == ROWS["a"] != sum(ROWS.values()), mended
        df = spark.read.format("toy_with_pushdown").load()
        both = df.where("topic = 'a'").union(df.where("topic = 'b'")).count()
        assert both == 2 * ROWS["b"] != sum(ROWS.values()), mended


def test_spark_refuses_a_reader_with_pushdown_while_it_is_off(spark):
    spark.dataSource.register(toy_source())
    assert spark.conf.get(ENABLED) == "false"
    with pytest.raises(Exception, match="DATA_SOURCE_PUSHDOWN_DISABLED"):
        spark.read.format("toy_with_pushdown").load().count()


@pytest.mark.ci
def test_our_source_has_none_so_a_dataframe_used_twice_is_right(spark, tmp_path):
    root = unpack("roll", tmp_path)

    def load(**options):
        return spark.read.format("pyengine").options(columns="topic", **options).load(str(root))

    alone = {topic: load(subscribe=topic).count() for topic in ("Roll1", "Other1")}
    everything = load().count()
    assert all(0 < count < everything for count in alone.values())
    with pushdown(spark):
        df = load()
        filtered = {topic: df.where(f"topic = '{topic}'") for topic in alone}
        assert {topic: part.count() for topic, part in filtered.items()} == alone
        assert filtered["Roll1"].union(filtered["Other1"]).count() == sum(alone.values())
        assert df.count() == everything
