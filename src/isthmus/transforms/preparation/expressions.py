"""PySpark expressions for the steps between a model's inputs and its network."""

import math
from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame, functions

from isthmus.transforms.preparation.steps import Clip, Impute, Log1p, Standardize, Step

_TINY = 1.1754943508222875e-38
"""Smallest normal float32."""


def number(rows: DataFrame, name: str) -> Column:
    # Times become microseconds, and booleans 0 or 1. NaN becomes null.
    column, _, place = name.partition("[")  # of an array, an element
    value = rows[column][int(place[:-1])] if place else rows[name]
    as_float = (functions.unix_micros(value) if dict(rows.dtypes)[column] == "timestamp" else value).cast("float")
    return functions.when(~functions.isnan(as_float), as_float)


def chain(value: Column, steps: Sequence[Step], parameters: Sequence[Sequence[Column]]) -> Column:
    for step, columns in zip(steps, parameters, strict=True):
        value = _step(step, value, *columns)
    return value


def _step(step: Step, value: Column, *parameters: Column) -> Column:
    match step:
        case Log1p():
            return functions.log1p(value.cast("double")).cast("float")
        case Clip():
            return _within(value, *parameters)
        case Impute():
            return functions.coalesce(value, parameters[0])
        case Standardize():
            mean, inverse = parameters
            limit = functions.lit(step.limit).cast("float")
            return _within((value - mean) * inverse, -limit, limit)
    return value


def _within(value: Column, low: Column, high: Column) -> Column:
    # greatest and least ignore nulls.
    return functions.when(value.isNotNull(), functions.greatest(functions.least(value, high), low))


def aggregates(step: Step, value: Column) -> list[Column]:
    wide = value.cast("double")
    finite = functions.when(functions.abs(wide) < math.inf, wide)
    match step:
        case Clip():
            return [functions.percentile_approx(finite, share, 10_000) for share in (step.low, step.high)]
        case Impute("mean"):
            return [functions.avg(finite)]
        case Impute("median"):
            return [functions.percentile_approx(finite, 0.5, 10_000)]
        case Standardize():
            return [functions.avg(finite), functions.stddev_pop(finite)]
    return []


def parameters(step: Step, results: Sequence[float | None]) -> tuple[float, ...]:
    match step:
        case Clip():
            low, high = results
            return (low or 0.0, high or 0.0)
        case Impute():
            return (results[0] or 0.0 if results else float(step.value),)
        case Standardize():
            mean, deviation = results
            # Use 1 for a constant column. A smaller deviation would be 0 in float32.
            return (mean or 0.0, 1 / deviation if deviation and deviation > _TINY else 1.0)
    return ()


def place(value: Column, places: Mapping[str, int]) -> Column:
    nowhere = functions.lit(0).cast("bigint")
    if not places:
        return nowhere
    pairs = [
        part for word, place in places.items() for part in (functions.lit(word), functions.lit(place).cast("bigint"))
    ]
    return functions.coalesce(functions.element_at(functions.create_map(*pairs), value), nowhere)
