"""Convert events between Arrow tables and DataFrames."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa

from isthmus.features.days import LAST
from isthmus.features.definition.spec import Source
from isthmus.features.values.arrow import micros
from isthmus.transforms.sources import narrow
from isthmus.transforms.tables import parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_LARGE, _NAMED = 32 << 20, 1 << 18
"""Bytes above which events go to the engine in a file, because messages have at most 128 MiB, and as a named view."""


@contextmanager
def events_frame(
    spark: "SparkSession", events: pa.Table, folder: Path, without: pa.Table | None = None
) -> "Iterator[DataFrame]":
    """Yield events as a DataFrame, in which rows that are equal in all columns are one.

    Leaves out the events in `without`. Many events are written to a file in `folder`, which is deleted after the block.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    name = f"events_{uuid4().hex}"
    with ExitStack() as stack:
        if events.nbytes > _LARGE:
            file = parquet.write_batches(events.schema, events.to_batches(), folder / f"{name}.parquet")
            stack.callback(file.unlink)
            frame = parquet.read(spark, str(file))
        else:
            # PySpark infers no schema from an empty table.
            empty = [] if len(events) else [from_arrow_schema(events.schema)]
            frame = spark.createDataFrame([] if empty else events, *empty)
            if events.nbytes > _NAMED:
                # Without a name, each request for the columns of a derived frame would send the events again.
                frame.createTempView(name)
                stack.callback(_forget, spark, name)
                frame = spark.table(name)
        frame = frame.distinct()
        if without is not None and len(without):
            frame = frame.subtract(stack.enter_context(events_frame(spark, without, folder)))
        yield frame


def _forget(spark: "SparkSession", name: str) -> None:
    from pyspark.errors import PySparkException

    with suppress(PySparkException):  # it would hide an error of the caller's block
        spark.catalog.dropTempView(name)


def latest(frame: "DataFrame", column: str) -> int | None:
    """Return the latest time in a column, in microseconds since 1970 UTC, or None if it has no time."""
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    times = micros(frame.agg(F.max(column).alias("last")).toArrow()["last"].drop_null())
    return int(times[0]) if len(times) else None


def events_of(frame: "DataFrame", source: Source, first: int, end: int = LAST) -> pa.Table:
    """Return the rows of a source whose time is null or in [first, end), in microseconds since 1970 UTC."""
    return narrow(frame, source, first, end).toArrow()


def columns_of(frame: "DataFrame") -> pa.Schema:
    return frame.limit(0).toArrow().schema
