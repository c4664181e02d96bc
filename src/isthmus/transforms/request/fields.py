"""The checked fields of a request source as PySpark columns: the value, its default, or an error in Spark."""

from collections.abc import Iterator
from datetime import datetime
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.features import clock
from isthmus.features.definition.expectations import Between, Expectation, Length, OneOf, Present
from isthmus.features.definition.spec import RequestSource
from isthmus.features.types import TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column


def fields(source: RequestSource) -> "dict[str, Column]":
    from pyspark.sql import functions

    columns = {}
    for field in source.schema:
        column, dtype = functions.col(field.name), field.dtype.name
        rules = [expectation for expectation in source.expectations if expectation.feature == field.name]
        broken = [wrong for rule in rules for wrong in _broken(column, rule, dtype)]
        if field.name in source.defaults:
            default = _literal(source.defaults[field.name], dtype)
            column = functions.when(reduce(or_, broken, column.isNull()), default).otherwise(column)
        elif broken:
            expected = ", ".join(map(str, rules))
            text = f"field {field.name} of request source {source.name} is not as expected: {expected}"
            refused = functions.raise_error(functions.lit(text))
            column = functions.when(reduce(or_, broken), refused).otherwise(column)
        columns[field.name] = column
    return columns


def _broken(column: "Column", rule: Expectation, dtype: str) -> "Iterator[Column]":
    """Yield boolean columns. A row breaks the rule if one of them is true. Otherwise, all are false or null."""
    from pyspark.sql import functions

    match rule:
        case Present():
            yield column.isNull()
        case Between(low=low, high=high):
            if dtype.startswith("Float"):
                yield functions.isnan(column)
            # Some engines sort -0.0 before 0.0.
            if low is not None:
                yield column < _literal(-0.0 if low == 0 and dtype.startswith("Float") else low, dtype)
            if high is not None:
                yield column > _literal(0.0 if high == 0 and dtype.startswith("Float") else high, dtype)
        case Length(low=low, high=high):
            # Graphs can match patterns, but not measure lengths.
            if low:
                yield ~column.like("_" * low + "%")
            if high is not None:
                yield column.like("_" * (high + 1) + "%")
        case OneOf(values=values):
            zeros = [-0.0, 0.0] if dtype.startswith("Float") and 0 in values else []
            yield ~column.isin(*(_literal(value, dtype) for value in (*values, *zeros)))


def _literal(value: Any, dtype: str) -> "Column":
    # A literal of exactly the type.
    from pyspark.sql import functions

    if isinstance(value, datetime):
        return functions.timestamp_micros(functions.lit(clock.micros(value)))
    numpy = TYPES[dtype].numpy
    if numpy is None or isinstance(value, bool):
        return functions.lit(value)
    with np.errstate(over="ignore"):  # beyond float32, a bound becomes infinite, as values do
        return functions.lit(np.dtype(numpy).type(value))
