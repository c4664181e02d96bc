"""Rows of a view with aggregations, computed by the engine from the events that its function returns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.features.clock import MICROSECOND
from isthmus.features.definition.tiles import Aggregation, Count, Max, Mean, Min, Sum, Tiling

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

INTEGERS = ("tinyint", "smallint", "int", "bigint")
"""Spark types that can be aggregated: their sums do not depend on the order."""


def aggregated(events: "DataFrame", keys: Sequence[str], tiling: Tiling) -> "DataFrame":
    """Return the rows of the windows: the join keys, `event_timestamp` and the features.

    A key has a row at each tick with an event, and an event counts from the first tick at or after its `known_at`. A
    window ends with its row's tick, which it includes.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    known = F.unix_micros("known_at")
    tick = F.timestamp_micros(known + F.pmod(-known, F.lit(tiling.tick // MICROSECOND)))
    functions = {"count": F.count, "sum": F.sum, "min": F.min, "max": F.max}
    parts = {_part(column, name): function(column)
             for column in tiling.columns for name, function in functions.items()}  # fmt: skip
    parts[_part("", "count")] = F.count(F.lit(1))
    ticks = events.groupBy(*keys, tick.alias("event_timestamp")).agg(
        *(value.alias(name) for name, value in parts.items())
    )

    def feature(each: Aggregation, seconds: int) -> "Column":
        window = Window.partitionBy(*keys).orderBy(F.unix_seconds("event_timestamp")).rangeBetween(1 - seconds, 0)
        count, total = (F.sum(_part(each.column, name)).over(window) for name in ("count", "sum"))
        match each:
            case Count():
                return count
            case Sum():
                return total
            case Mean():
                return F.try_divide(total, count)
            case Min():
                return F.min(_part(each.column, "min")).over(window)
            case Max():
                return F.max(_part(each.column, "max")).over(window)

    features = [
        feature(each, int(window.total_seconds())).alias(name) for name, each, window in tiling.features()
    ]  # fmt: skip
    return ticks.select(*keys, "event_timestamp", *features)


def _part(column: str, function: str) -> str:
    return f"__{column}_{function}"
