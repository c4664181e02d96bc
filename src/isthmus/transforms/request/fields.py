"""The fields of a request as their source declares them: as they are, their default, or refused.

The rules are written as PySpark columns, so that the engine and every graph compute them as they do all else.
"""

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
    """The fields of a request source as a transform sees them, by name."""
    from pyspark.sql import functions

    found = {}
    for field in source.schema:
        column, dtype = functions.col(field.name), field.dtype.name
        rules = [one for one in source.expectations if one.feature == field.name]
        broken = [wrong for rule in rules for wrong in _broken(column, rule, dtype)]
        if field.name in source.defaults:
            other = _literal(source.defaults[field.name], dtype)
            found[field.name] = functions.when(reduce(or_, broken, column.isNull()), other).otherwise(column)
        elif broken:
            words = (
                f"field {field.name} of request source {source.name} is not as expected: {', '.join(map(str, rules))}"
            )
            refused = functions.raise_error(functions.lit(words))
            found[field.name] = functions.when(reduce(or_, broken), refused).otherwise(column)
        else:
            found[field.name] = column
    return found


def _broken(column: "Column", rule: Expectation, dtype: str) -> "Iterator[Column]":
    """Where a rule is broken, by any of these; null or false where it is not."""
    from pyspark.sql import functions

    match rule:
        case Present():
            yield column.isNull()
        case Between(low=low, high=high):
            if dtype.startswith("Float"):
                yield functions.isnan(column)
            # Engines that do not follow IEEE 754 put -0.0 before 0.0.
            if low is not None:
                yield column < _literal(-0.0 if low == 0 and dtype.startswith("Float") else low, dtype)
            if high is not None:
                yield column > _literal(0.0 if high == 0 and dtype.startswith("Float") else high, dtype)
        case Length(low=low, high=high):
            # Graphs compare texts with patterns, and do not measure them.
            if low:
                yield ~column.like("_" * low + "%")
            if high is not None:
                yield column.like("_" * (high + 1) + "%")
        case OneOf(values=values):
            signless = [-0.0, 0.0] if dtype.startswith("Float") and 0 in values else []
            yield ~column.isin(*(_literal(value, dtype) for value in (*values, *signless)))


def _literal(value: Any, dtype: str) -> "Column":
    """A value of a type as a literal of exactly that type."""
    from pyspark.sql import functions

    if isinstance(value, datetime):
        return functions.timestamp_micros(functions.lit(clock.micros(value)))
    numpy = TYPES[dtype].numpy
    if numpy is None or isinstance(value, bool):
        return functions.lit(value)
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, as the values do
        return functions.lit(np.dtype(numpy).type(value))
