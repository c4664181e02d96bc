"""Convert events between Arrow tables and DataFrames."""

from typing import TYPE_CHECKING

import pyarrow as pa

from isthmus.features.days import LAST
from isthmus.features.definition.spec import Source
from isthmus.features.values.arrow import micros
from isthmus.transforms.sources import narrow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def events_frame(spark: "SparkSession", events: pa.Table) -> "DataFrame":
    """Return events as a DataFrame, in which rows that are equal in all columns are one."""
    from pyspark.sql.pandas.types import from_arrow_schema

    # PySpark infers no schema from an empty table.
    empty = [] if len(events) else [from_arrow_schema(events.schema)]
    return spark.createDataFrame([] if empty else events, *empty).distinct()


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
