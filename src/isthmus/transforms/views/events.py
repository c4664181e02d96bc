"""Convert events between Arrow tables and DataFrames."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa

from isthmus.features import clock
from isthmus.features.days import LAST
from isthmus.features.definition.spec import Source
from isthmus.features.values.arrow import micros
from isthmus.transforms.sources import narrow
from isthmus.transforms.tables import parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_LARGE = 32 << 20
"""Bytes of events from which on they go to the engine in a file: a message may have 128 MiB."""


@contextmanager
def events_frame(
    spark: "SparkSession", events: pa.Table, folder: Path, without: pa.Table | None = None
) -> "Iterator[DataFrame]":
    """Yield events as a DataFrame, in which rows that are equal in all columns are one.

    Leaves out the events in `without`. Many events are written to a file in `folder`, which is deleted after the block.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    if without is not None and len(without):
        with events_frame(spark, events, folder) as own, events_frame(spark, without, folder) as earlier:
            yield own.subtract(earlier)
    elif events.nbytes > _LARGE:
        file = parquet.write_batches(events.schema, events.to_batches(), folder / f"{uuid4().hex}.parquet")
        try:
            yield parquet.read(spark, str(file)).distinct()
        finally:
            file.unlink()
    else:
        # PySpark infers no schema from an empty table.
        empty = [] if len(events) else [from_arrow_schema(events.schema)]
        yield spark.createDataFrame([] if empty else events, *empty).distinct()


def latest(frame: "DataFrame", column: str) -> int | None:
    """Return the latest time in a column, in microseconds since 1970 UTC, or None if it has no time."""
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    times = micros(frame.agg(F.max(column).alias("last")).toArrow()["last"].drop_null())
    return int(times[0]) if len(times) else None


def events_of(frame: "DataFrame", source: Source, first: int, end: int = LAST) -> pa.Table:
    """Return the rows of a source whose time is null or in [first, end), in microseconds since 1970 UTC."""
    return narrow(frame, source, first, end).toArrow()


def known_since(frame: "DataFrame", column: str, time: int) -> pa.Table:
    """Return the rows whose time in `column` is `time` or later, in microseconds since 1970 UTC."""
    return frame.where(frame[column] >= clock.moment(time)).toArrow()


def columns_of(frame: "DataFrame") -> pa.Schema:
    return frame.limit(0).toArrow().schema
