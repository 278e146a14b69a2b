"""`pyengine stats` and `export`: count messages in the log, or export them as Parquet, with Spark's workers."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from pyengine.cli import output
from pyengine.cli.output import (
    Reply,
    answers,
    byte_bar,
    master_option,
    raw_option,
    set_option,
    spark_level_option,
    spark_session,
    spark_source,
    store_or_uri_argument,
)

if TYPE_CHECKING:
    from pyengine.spark.jobs import By


# The values of these options have the names of Spark's, as which they are passed on.
_allow_missing = click.option("--allow-missing", "allowMissing", is_flag=True,
                              help="Accept a topic that does not exist (allowMissing=true).")


@click.command()
@store_or_uri_argument
@set_option
@answers
@click.option("--by", type=click.Choice(["queue", "topic", "hour", "day"]), default="topic", show_default=True,
              help="Count by queue, topic, or topic and hour or day (UTC).")
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated. All if not given.")
@_allow_missing
@click.option("--verify-crc", "verifyCRC", is_flag=True, help="Check the CRC of every body.")
@master_option
@spark_level_option
def stats(store: str, settings: dict[str, str], by: By, topics: tuple[str, ...], master: str | None, **options: object) -> Reply:
    """Count messages and bytes in the log. It uses Spark (extra `spark`, Java 17 or later).

    STORE may be a URI (s3://bucket/store).

    \b
    Example:
      pyengine stats STORE --by hour --topic orders --json
    """
    source, sizes = spark_source(store, settings)
    with spark_session("pyengine stats", master) as spark, byte_bar("counting", None) as show:
        from pyengine.spark.jobs import collect_stats

        begun_s = time.monotonic()
        rows = collect_stats(spark, source, topics or None, by=by, progress=show, **sizes, **options)
    seconds = time.monotonic() - begun_s
    document = {"by": by, "messages": sum(row.messages for row in rows), "bytes": sum(row.bytes for row in rows), "seconds": seconds,
                "rows": [asdict(row) for row in rows]}
    return Reply(document, lambda: _print(document))


def _print(document: dict[str, Any]) -> None:
    key = {"topic": "", "queue": "queue_id"}.get(document["by"], document["by"])
    begins = [output.time_text(row["time_ms"]) for row in document["rows"]]
    output.write_rows([row | {"mean_bytes": row["bytes"] / row["messages"], "largest_bytes": row["largest"],
                              "hour": begin[:13], "day": begin[:10]} for row, begin in zip(document["rows"], begins, strict=True)],
                      f"topic {key} messages bytes mean_bytes largest_bytes delayed transactional first_timestamp_ms last_timestamp_ms")
    print(f"{document['messages']:,} messages, {output.size_text(document['bytes'])}")


@click.command()
@store_or_uri_argument
@set_option
@answers
@click.argument("dest", metavar="DEST")
@click.option("--format", "file_format", type=click.Choice(["parquet"]), default="parquet", show_default=True,
              help="The format of the files.")
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated. All if not given.")
@_allow_missing
@click.option("--columns", default=None, help="Columns, separated by commas; * for all (docs/spark.md).")
@click.option("--compression", type=click.Choice(["snappy", "zstd", "gzip", "lz4", "none"]), default="snappy",
              show_default=True, help="Compression of the files.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in DEST.")
@click.option("--partitioned", is_flag=True, help="Write into folders topic=.../date=... in DEST.")
@click.option("--incremental", is_flag=True, help="Continue where the last run into DEST ended.")
@raw_option
@master_option
@spark_level_option
def export(store: str, settings: dict[str, str], dest: str, topics: tuple[str, ...], master: str | None, **options: Any) -> Reply:
    """Write the log into DEST as Parquet files. It uses Spark (extra `spark`, Java 17 or later).

    DEST and STORE are folders or URIs. DEST/_SUCCESS comes last: without it the export is incomplete.

    \b
    Examples:
      pyengine export STORE s3://bucket/lake --partitioned --incremental
    """
    source, sizes = spark_source(store, settings)
    file_format, options["decompress"] = options.pop("file_format"), not options.pop("raw")
    if options["columns"] is None:
        del options["columns"]
    from pyengine.spark.options import destination

    destination(dest)  # before Java starts: a wrong DEST is an error
    begun_s = time.monotonic()
    with spark_session("pyengine export", master) as spark, byte_bar("exporting", None) as show:
        from pyengine.spark.export import export_parquet

        done = export_parquet(spark, source, dest, topics or None, progress=show, **options | sizes)
    seconds = time.monotonic() - begun_s
    document = {"dest": done.dest, "format": file_format, "files": done.files, "messages": done.messages, "bytes": done.bytes,
                "seconds": seconds}
    return Reply(
        document, f"{done.messages:,} messages in {done.files} files ({output.size_text(done.bytes)}) in {seconds:.1f} s: {done.dest}")
