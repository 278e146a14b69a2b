"""What one task of an export does: its part of the log into Parquet files, which appear together when all are whole."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow
from pyarrow import parquet

if TYPE_CHECKING:
    import numpy

ROW_GROUP_BYTES = 64 << 20
OPEN_FILES_MAX = 128
# Columns whose values repeat; a dictionary of bodies or offsets would only be thrown away.
_DICTIONARY = ["topic", "tags", "bornHost", "storeHost", "partition", "queueId", "flag", "sysFlag", "reconsumeTimes",
               "preparedTransactionOffset", "timestampType"]
# What Spark writes as %XX in the name of a folder key=value; beyond ASCII it escapes nothing.
_ESCAPED = {*map(chr, range(32)), *"\"#%'*/:=?\\{[]^\x7f"}


class PartFiles:
    """The files of one part: `<name>.parquet` in `target`, or in topic=.../date=... of it.

    `schema` is of the columns that the files hold. At most OPEN_FILES_MAX are open, so a
    part with more topics and days leaves several files in a folder.
    """

    def __init__(self, target: str, name: str, schema: pyarrow.Schema, compression: str, run: str, *, partitioned: bool) -> None:
        self._target = Path(target)
        self._name = name
        self._schema = schema
        self._compression = compression
        self._mark = f"{run}.{uuid.uuid4().hex[:8]}"
        self._partitioned = partitioned
        self._open: dict[str, tuple[Path, parquet.ParquetWriter]] = {}
        self._rows: dict[str, int] = {}      # file -> rows, by its path below target
        self._unfinished: dict[str, Path] = {}
        self._opened: dict[str, int] = {}    # folder -> files so far

    def add(self, table: pyarrow.Table) -> None:
        """Rows to write; partitioned, the table has the columns topic and timestamp also where files have not."""
        for folder, rows in self._split(table):
            if rows.num_rows:
                file, writer = self._writer(folder)
                writer.write_table(rows.select(self._schema.names), row_group_size=rows.num_rows)
                self._rows[file] += rows.num_rows

    def finish(self) -> list[tuple[str, int, int]]:
        """Give all files their names: (path below target, rows, bytes) of each."""
        self._close()
        found = []
        for file, unfinished in self._unfinished.items():
            unfinished.rename(self._target / file)
            found.append((file, self._rows[file], (self._target / file).stat().st_size))
        return found

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(Exception):
            self._close()
        for unfinished in self._unfinished.values():
            unfinished.unlink(missing_ok=True)

    def _close(self) -> None:
        while self._open:
            _, (_, writer) = self._open.popitem()
            writer.close()

    def _writer(self, folder: str) -> tuple[str, parquet.ParquetWriter]:
        if folder in self._open:
            path, writer = self._open[folder]
            return str(path), writer
        if len(self._open) == OPEN_FILES_MAX:
            self._close()
        number = self._opened.get(folder, 0)
        self._opened[folder] = number + 1
        name = f"{self._name}{f'-{number}' if number else ''}.parquet"
        place = self._target / folder
        place.mkdir(parents=True, exist_ok=True)
        unfinished = place / f".{name}.{self._mark}"
        file = str(Path(folder, name))
        writer = parquet.ParquetWriter(unfinished, self._schema, compression=self._compression, use_dictionary=_DICTIONARY)
        self._unfinished[file], self._rows[file], self._open[folder] = unfinished, 0, (Path(file), writer)
        return file, writer

    def _split(self, table: pyarrow.Table) -> Iterator[tuple[str, pyarrow.Table]]:
        """(folder, rows in their order) of a table."""
        if not self._partitioned:
            yield "", table
            return
        topics = table["topic"].combine_chunks().dictionary_encode()
        days = table["timestamp"].combine_chunks().cast(pyarrow.date32())
        day_numbers = days.cast(pyarrow.int32()).to_numpy().astype("int64")
        keys = topics.indices.to_numpy().astype("int64") << 32 | day_numbers & 0xFFFFFFFF
        order = keys.argsort(kind="stable")
        table, keys = table.take(pyarrow.array(order)), keys[order]
        for begin, end in _runs(keys):
            first = int(order[begin])
            folder = f"topic={escaped(topics[first].as_py())}/date={days[first].as_py().isoformat()}"
            yield folder, table.slice(begin, end - begin)


def write_groups(files: PartFiles, batches: Iterator[pyarrow.RecordBatch]) -> list[tuple[str, int, int]]:
    """All batches into the files, in row groups of about ROW_GROUP_BYTES; what `finish` gives. Nothing stays if it fails."""
    try:
        for group in _groups(batches, ROW_GROUP_BYTES):
            files.add(pyarrow.Table.from_batches(group))
        return files.finish()
    except BaseException:
        files.abandon()
        raise


def escaped(value: str) -> str:
    """A value in the name of a folder key=value, as Spark writes and reads it."""
    return "".join(f"%{ord(mark):02X}" if mark in _ESCAPED else mark for mark in value) or "__HIVE_DEFAULT_PARTITION__"


def _runs(keys: numpy.ndarray) -> Iterator[tuple[int, int]]:
    """[begin, end) of equal neighbours."""
    borders = [0, *((keys[1:] != keys[:-1]).nonzero()[0] + 1).tolist(), len(keys)]
    return itertools.pairwise(borders)


def _groups(batches: Iterator[pyarrow.RecordBatch], most_bytes: int) -> Iterator[list[pyarrow.RecordBatch]]:
    group: list[pyarrow.RecordBatch] = []
    held = 0
    for batch in batches:
        group.append(batch)
        held += batch.nbytes
        if held >= most_bytes:
            yield group
            group, held = [], 0
    if group:
        yield group
