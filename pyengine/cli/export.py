"""`pyengine export`: the log, or some topics of it, as Parquet files, written by Spark's workers."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pyengine.cli import output
from pyengine.cli.options import existing_store, store_command
from pyengine.cli.progress import byte_bar
from pyengine.cli.spark_session import level_option, master_option, size_options, spark_session


@click.command()
@store_command
@click.argument("dest", type=click.Path(path_type=Path), metavar="DEST")
@click.option("--format", "file_format", type=click.Choice(["parquet"]), default="parquet", show_default=True,
              help="The format of the files.")
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be repeated. All if not given.")
@click.option("--columns", default=None, help="The columns, separated by commas; * for all (docs/spark.md lists them).")
@click.option("--compression", type=click.Choice(["snappy", "zstd", "gzip", "lz4", "none"]), default="snappy",
              show_default=True, help="How the files are compressed.")
@click.option("--overwrite", is_flag=True, help="Replace an export that stands in DEST.")
@click.option("--partitioned", is_flag=True, help="Folders topic=.../date=... in DEST.")
@click.option("--incremental", is_flag=True, help="Go on where the last run into DEST ended.")
@master_option
@level_option
def export(
    store: Path, settings: dict[str, str], as_json: bool, dest: Path, file_format: str, topics: tuple[str, ...],
    columns: str | None, compression: str, overwrite: bool, partitioned: bool, incremental: bool,
    master: str | None, level: str | None,
) -> None:
    """Write the log into the folder DEST as Parquet files.

    Reads what is flushed when the command starts (--level chooses otherwise), with Spark
    on all processors of this host; a running engine is not disturbed. DEST/_SUCCESS
    comes last: without it the export is not whole. Needs Java 17 or later and the
    extra `spark` (pip install '.[spark]').

    \b
    Examples:
      pyengine export STORE orders.parquet --topic orders
      pyengine export STORE all.parquet --columns "*" --compression zstd
      pyengine export STORE lake --partitioned --incremental
    """
    root = existing_store(store)
    options = size_options(root, settings)
    if level is not None:
        options["readLevel"] = level
    if columns is not None:
        options["columns"] = columns
    begun_s = time.monotonic()
    with spark_session("pyengine export", master) as spark, byte_bar("exporting", None) as show:
        from pyengine.spark.export import export_parquet

        done = export_parquet(spark, root, dest, topics or None, compression=compression, overwrite=overwrite,
                              partitioned=partitioned, incremental=incremental, progress=show, **options)
    seconds = time.monotonic() - begun_s
    if as_json:
        output.write_json({"dest": done.dest, "format": file_format, "files": done.files, "messages": done.messages,
                           "bytes": done.bytes, "seconds": seconds})
        return
    print(f"{done.messages:,} messages in {done.files} files ({output.size_text(done.bytes)}) in {seconds:.1f} s: {done.dest}")
