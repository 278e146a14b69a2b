"""SQL over a store that reads only the columns that the query uses.

Spark tells a source in Python neither columns nor filters. Its optimizer knows the columns: `sql` has the query planned over the
whole view, looks in the optimized plan which of the view's columns any part of it refers to, and plans it again over a
view of the same schema whose other columns are not read and are null (decision 0211).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyengine.errors import UsageError
from pyengine.spark.schema import all_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVERYTHING = "*"
# What these pass on is named by the references of what is above them. All that is below any other node counts as used.
_PASSING_ON = frozenset(("Project", "Filter", "Aggregate", "Join", "Window", "WindowGroupLimit", "Sort", "LocalLimit", "GlobalLimit"))


def sql(spark: SparkSession, store: str | os.PathLike[str], query: str, *, view: str = "log", **options: object) -> DataFrame:
    """The result of a query over the temporary view `log` (`view` names another), reading the columns that it uses.

    The view is the whole log as `options` choose it (docs/spark.md), with all columns unless `columns` names them; it stays, with
    all its columns. The same rows as from `spark.sql(query)`. UsageError in a session of Spark Connect, which shows no plan.
    """
    if not hasattr(spark, "_jsparkSession"):
        raise UsageError("a session of Spark Connect does not show the plan of a query: name the columns by the option columns, and "
                         "call spark.sql")
    given = {"columns": ",".join(all_names()), **{name: str(value) for name, value in options.items()}, "path": str(store)}
    read = EVERYTHING
    try:
        while True:
            spark.read.format("pyengine").options(**given, readColumns=read).load().createOrReplaceTempView(view)
            result = spark.sql(query)
            used = _used_columns(result._jdf.queryExecution().optimizedPlan(), read)
            if used is None or used <= set(read.split(",")):  # each round reads more, or is the last
                return result
            read = ",".join(sorted(used if read == EVERYTHING else used | set(read.split(","))))
    finally:
        spark.read.format("pyengine").options(**given).load().createOrReplaceTempView(view)


def _used_columns(plan: Any, read: str) -> set[str] | None:
    """Names of the columns of our relations in the plan that anything in it refers to; None without such a relation.

    `plan` is a LogicalPlan of the JVM. The name of a column that is never null stands for no column at all.
    """
    nodes = list(_nodes(plan))
    used = _ids(plan.output())
    relations = []
    for node in nodes:
        used |= _ids(node.references().toSeq())
        if node.nodeName() not in _PASSING_ON:
            for child in _each(node.children()):
                used |= _ids(child.output())
        for inner in _each(node.subqueries()):
            used |= _ids(inner.output())
        if node.getClass().getSimpleName() == "DataSourceV2ScanRelation" and node.relation().options().get("readColumns") == read:
            relations.append(node)
    if not relations:
        return None
    names = {field.name() for relation in relations for field in _each(relation.output()) if field.exprId().id() in used}
    return names or {"partition"}


def _nodes(plan: Any) -> Iterator[Any]:
    """All nodes of a plan, those of its subqueries too."""
    yield plan
    for below in (*_each(plan.children()), *_each(plan.subqueries())):
        yield from _nodes(below)


def _ids(attributes: Any) -> set[int]:
    return {attribute.exprId().id() for attribute in _each(attributes)}


def _each(sequence: Any) -> Iterator[Any]:
    """The elements of a Seq of Scala's."""
    return (sequence.apply(at) for at in range(sequence.size()))
