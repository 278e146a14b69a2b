"""A Spark session for this data source, the source's registration, and SQL that reads only the columns of the query.

Spark passes neither columns nor filters to a source in Python. Its optimizer knows the columns: `sql` plans the query over the
whole view, finds in the optimized plan which columns of the view it refers to, and plans it again over a view of the same
schema whose other columns are not read and are null.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyengine
from pyengine.errors import UsageError
from pyengine.spark.java import HINT, find_java_home
from pyengine.spark.jobs import given_options
from pyengine.spark.schema import all_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVERYTHING = "*"
_IS_HERE = re.compile(r"local|spark://(127\.|localhost)")  # a master whose executors are all on this host
# For these nodes the references of the nodes above name the used columns. All columns below any other node count as used.
_views = threading.Lock()  # a view has one name in a session, and `sql` makes it anew until its plan is found
_PASSING_ON = frozenset(("Project", "Filter", "Aggregate", "Join", "Window", "WindowGroupLimit", "Sort", "LocalLimit", "GlobalLimit"))


def register(spark: SparkSession) -> SparkSession:
    """Make the format `pyengine` known to this session."""
    from pyengine.spark.source import OldQueueSource, PyEngineSource
    from pyengine.spark.versions import register_source

    register_source(spark, PyEngineSource)
    register_source(spark, OldQueueSource)
    return spark


def session(app: str = "pyengine", cores: int | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Return the running session, or a local one: loopback only, no web page, UTC.

    PYENGINE_SPARK_MASTER names another master. UsageError without Java 17 or later.
    """
    from pyspark.sql import SparkSession

    if is_running():
        return register(SparkSession.active())
    builder = SparkSession.builder.appName(app)
    wanted = {**default_settings(cores, (settings or {}).get("spark.master")), **(settings or {})}
    for name, value in wanted.items():
        builder = builder.config(name, value)
    with _environment_of_jvm(wanted["spark.master"]):
        spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel((settings or {}).get("spark.log.level", "ERROR"))
    return register(spark)


def is_running() -> bool:
    """Whether there is a session; Spark's active one is that of a thread, and a new thread has none."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        found = SparkSession.active()
    except PySparkRuntimeError:
        return False
    return not hasattr(found, "_sc") or found._sc._jsc is not None  # a context may be stopped alone; Spark Connect has none


@contextlib.contextmanager
def borrowed_session(app: str, settings: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Yield the running session, or a new one that ends with the block (`settings` as for `session`)."""
    was_running = is_running()
    spark = session(app, settings=settings)
    try:
        yield spark
    finally:
        if not was_running:
            spark.stop()


def default_settings(cores: int | None = None, master: str | None = None) -> dict[str, str]:
    """Return the settings of `session`, measured on small hosts with short sessions and local data."""
    count = cores or len(os.sched_getaffinity(0))
    master = master or os.environ.get("PYENGINE_SPARK_MASTER") or f"local[{count}]"
    loopback = ("spark.driver.host", "spark.driver.bindAddress") if _IS_HERE.match(master) else ()
    return {
        "spark.master": master,
        **dict.fromkeys(loopback, "127.0.0.1"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(2 * count),
    }


@contextlib.contextmanager
def _environment_of_jvm(master: str) -> Iterator[None]:
    """Set the environment of the JVM and its workers: Java, Python, the loopback address, the path of this package, the user."""
    home = find_java_home()
    if home is None:
        raise UsageError(HINT)
    package = str(Path(pyengine.__file__).resolve().parent.parent)
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    wanted = {
        "JAVA_HOME": str(home),
        **({"SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")} if _IS_HERE.match(master) else {}),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        **environment_of_user(),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def environment_of_user() -> dict[str, str]:
    """Name the user for the JVM if the system has no entry for its uid, as in many containers: Java needs a name and a home."""
    try:
        pwd.getpwuid(os.getuid())
        return {}
    except KeyError:
        home, name = os.environ.get("HOME", ""), f"uid-{os.getuid()}"
        if not (os.path.isabs(home) and os.path.isdir(home)):
            home = tempfile.gettempdir()
        given = shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", ""))
        options = [option for option in (f"-Duser.name={name}", f"-Duser.home={home}")
                   if not any(one.startswith(f"{option.partition('=')[0]}=") for one in given)]
        return {"SPARK_USER": os.environ.get("SPARK_USER", name), "SPARK_SUBMIT_OPTS": shlex.join([*options, *given])}


def sql(spark: SparkSession, store: str | os.PathLike[str], query: str, *, view: str = "log", **options: object) -> DataFrame:
    """Run a query over the temporary view `log` (or `view`), reading only the columns that it uses.

    The result has the selected columns alone. UsageError with Spark Connect.
    """
    if not hasattr(spark, "_jsparkSession"):
        raise UsageError("a session of Spark Connect does not show the plan of a query: name the columns by the option columns, and "
                         "call spark.sql")
    given = {"columns": ",".join(all_names()), **given_options(store, None, options)}
    read = EVERYTHING
    with _views:
        try:
            while True:
                spark.read.format("pyengine").options(**given, readColumns=read).load().createOrReplaceTempView(view)
                result = spark.sql(query).alias(view)  # below an alias Spark finds no columns that are not selected: they are null
                used = _used_columns(result._jdf.queryExecution().optimizedPlan(), read)
                if used is None or used <= set(read.split(",")):  # each round reads more, or is the last
                    return result
                read = ",".join(sorted(used if read == EVERYTHING else used | set(read.split(","))))
        finally:
            spark.read.format("pyengine").options(**given).load().createOrReplaceTempView(view)


def _used_columns(plan: Any, read: str) -> set[str] | None:
    """Return the names of the columns of pyengine's relations to which the plan refers; None without such a relation.

    `plan` is a LogicalPlan of the JVM. If it refers to no column, the result is a column that is never null.
    """
    nodes = list(plan_nodes(plan))
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


def plan_nodes(plan: Any) -> Iterator[Any]:
    """Yield all nodes of a plan and of its subqueries."""
    yield plan
    for below in (*_each(plan.children()), *_each(plan.subqueries())):
        yield from plan_nodes(below)


def _ids(attributes: Any) -> set[int]:
    return {attribute.exprId().id() for attribute in _each(attributes)}


def _each(sequence: Any) -> Iterator[Any]:
    """Yield the elements of a Scala Seq."""
    return (sequence.apply(at) for at in range(sequence.size()))
