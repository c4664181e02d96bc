"""Rows of a view with aggregations, computed by the engine from the events that its function returns."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.features.clock import MICROSECOND
from isthmus.features.definition.tiles import LARGEST_SUM, Aggregation, Count, Max, Mean, Min, Sum, Tiling

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EXACT = ("boolean", "tinyint", "smallint", "int", "bigint")
"""Spark types that can be aggregated: their sums do not depend on the order."""

_MARK = "isthmus_events"
_BY_ROW = {
    "project", "filter", "with_columns", "with_columns_renamed", "drop", "drop_na", "fill_na", "replace", "to_df",
    "to_schema", "subquery_alias", "hint", "sort", "repartition", "join",
}  # fmt: skip
"""Spark Connect's names of operations that compute each result row from one event, independently of other events."""


def marked(events: "DataFrame") -> "DataFrame":
    """Mark events, so that `uses_other_rows` finds them in the plan of a function's result."""
    return events.alias(_MARK)


def uses_other_rows(result: "DataFrame") -> str:
    """Return the name of an operation in a plan that combines several of the marked events, or "" if none does."""
    plan: Any = result
    return _combining(plan._plan.to_proto(plan._session.client).root)


def _combining(relation: Any) -> str:
    kind = relation.WhichOneof("rel_type")
    content = getattr(relation, kind)
    if kind == "subquery_alias" and content.alias == _MARK:
        return ""
    inner = [part for part in _parts(content, "Relation") if _has_mark(part)]
    if not inner:
        return ""
    if kind not in _BY_ROW or len(inner) > 1:
        return str(kind)
    if any(True for _ in _parts(content, "Window")):
        return "window"
    return _combining(inner[0])


def _has_mark(relation: Any) -> bool:
    content = getattr(relation, relation.WhichOneof("rel_type"))
    return getattr(content, "alias", "") == _MARK or any(_has_mark(part) for part in _parts(content, "Relation"))


def _parts(message: Any, kind: str) -> Iterator[Any]:
    """Yield the messages of a kind in a message, but none in other relations."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for part in value if field.is_repeated else [value]:
            if not hasattr(part, "ListFields"):
                continue  # a map
            if field.message_type.name == kind:
                yield part
            elif field.message_type.name != "Relation":
                yield from _parts(part, kind)


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
    parts = {_part(column, name): function(f"`{column}`")
             for column in tiling.columns for name, function in functions.items()}  # fmt: skip
    parts[_part("", "count")] = F.count(F.lit(1))
    parts |= {_part(name, "size"): F.sum(F.abs(F.col(f"`{name}`").cast("double"))) for name in tiling.summed}
    ticks = events.groupBy(*keys, tick.alias("event_timestamp")).agg(
        *(value.alias(name) for name, value in parts.items())
    )

    def feature(each: Aggregation, seconds: int) -> "Column":
        window = Window.partitionBy(*keys).orderBy(F.unix_seconds("event_timestamp")).rangeBetween(1 - seconds, 0)
        count, total, size = (F.sum(_part(each.column, name)).over(window) for name in ("count", "sum", "size"))
        if isinstance(each, Sum | Mean):
            too_large = F.raise_error(F.lit(f"the sum of {each.column} exceeds 64 bits")).cast("bigint")
            total = F.when(size >= LARGEST_SUM, too_large).otherwise(total)
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
    return f"__{column.replace('.', '_')}_{function}"
