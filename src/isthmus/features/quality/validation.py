"""Expectations held against rows: what was found, and at which keys first. One pass; unique ones take a second look."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.contract.contract import ViewContract
from isthmus.features.definition.expectations import (
    Between,
    Expectation,
    Fresh,
    Length,
    NoDrift,
    OneOf,
    Present,
    Rows,
    Unique,
)
from isthmus.features.quality.drift import psi, windows
from isthmus.features.quality.statistics import FeatureStatistics, read, view_statistics
from isthmus.features.types import DataType
from isthmus.features.values.columns import ARROW, micros

EXAMPLES = 3
_Rule = Callable[[pa.Array], pa.BooleanArray]


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a view looked like when a training set was made.

    Attributes:
        name: the distillation.
        training_set: its identity.
        last: its latest moment, in microseconds: rows with a later event time are new.
        features: statistics of the view's rows up to then, by feature.
    """

    name: str
    training_set: str
    last: int
    features: Mapping[str, FeatureStatistics]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One expectation and what the rows hold against it.

    Attributes:
        view: the view.
        feature: the feature; empty where the expectation is about the rows.
        expectation: what was promised.
        passed: whether it holds.
        found: what was found.
        examples: keys and event times of the first rows that break it.
    """

    view: str
    feature: str
    expectation: str
    passed: bool
    found: str
    examples: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"view {self.view}, feature {self.feature}" if self.feature else f"view {self.view}"
        first = f", first {'; '.join(self.examples)}" if self.examples else ""
        return f"{place}: {self.found}{first}; expected {self.expectation}"


def check(
    view: ViewContract,
    expectations: Sequence[Expectation],
    data: ds.Dataset | pa.Table,
    *,
    now: int,
    references: Sequence[Reference] = (),
) -> list[Finding]:
    """Holds the expectations of a view against its rows.

    Args:
        view: the view.
        expectations: checked together with the declarations.
        data: keys, `event_timestamp` and features, in the types of the view.
        now: the project's present, in microseconds.
        references: one for every training set in use that reads the view.

    Returns:
        A finding for each, in their order; for drift one for each reference too.
    """
    if not expectations:
        return []
    types = {column.name: column.dtype for column in view.fields}
    rules = {n: _rule(one, types[one.feature]) for n, one in enumerate(expectations) if by_row(one)}
    broken = {n: _Broken() for n in rules}
    keys = [*(column.name for column in view.keys), "event_timestamp"]
    asked = dict.fromkeys(expectations[n].feature for n in rules)
    rows = 0
    newest: int | None = None
    for batch in read(data, [*dict.fromkeys([*keys, *asked])]):
        if not len(batch):
            continue
        rows += len(batch)
        # A row of the future is not there yet: it must not hide that nothing has come for long.
        times = micros(batch["event_timestamp"])
        if (past := times <= now).any():
            latest = int(times[past].max())
            newest = latest if newest is None else max(newest, latest)
        for n, rule in rules.items():
            feature = expectations[n].feature
            broken[n].add(pc.fill_null(pc.invert(rule(batch[feature])), False), batch, feature, keys)
    findings = []
    for n, one in enumerate(expectations):
        match one:
            case Rows(at_least=low, at_most=high):
                passed, found = rows >= low and (high is None or rows <= high), f"{rows:,} rows"
                findings.append(_finding(view, one, passed, found))
            case Fresh(within=within):
                findings.append(_fresh(view, one, within // clock.MICROSECOND, newest, now))
            case Unique():
                findings.append(_unique(view, one, data, keys))
            case NoDrift(psi=most):
                findings += _drift(view, one, most, types[one.feature], data, references)
            case Present(share=share):
                there = 1.0 - broken[n].rows / rows if rows else 1.0
                found = f"{broken[n].rows:,} of {rows:,} rows have none"
                findings.append(_finding(view, one, there >= share, found, broken[n].examples))
            case _:
                found = f"{broken[n].rows:,} of {rows:,} rows do not fit"
                findings.append(_finding(view, one, not broken[n].rows, found, broken[n].examples))
    return findings


class _Broken:
    """Rows that break one expectation."""

    def __init__(self) -> None:
        self.rows = 0
        self.examples: list[str] = []

    def add(self, wrong: pa.BooleanArray, batch: pa.RecordBatch, feature: str, keys: Sequence[str]) -> None:
        count = pc.sum(wrong).as_py() or 0
        if count and len(self.examples) < EXAMPLES:
            some = batch.filter(wrong).slice(0, EXAMPLES - len(self.examples))
            self.examples += _examples(pa.Table.from_batches([some]), feature, keys)
        self.rows += count


def by_row(expectation: Expectation) -> bool:
    """Whether it says something of each row alone."""
    return isinstance(expectation, Present | Between | Length | OneOf)


def _rule(expectation: Expectation, dtype: DataType) -> _Rule:
    """Which values fit, null where there is none to judge."""
    match expectation:
        case Between(low=low, high=high):
            return lambda values: _within(values, low, high, dtype)
        case Length(low=low, high=high):
            return lambda values: _within(_lengths(values, dtype), low, high, dtype)
        case OneOf(values=allowed):
            return lambda values: _among(values, allowed, dtype)
    return lambda values: pc.is_valid(values)


def _within(values: pa.Array, low: Any, high: Any, dtype: DataType) -> pa.BooleanArray:
    if isinstance(low, datetime) or isinstance(high, datetime):
        values = pc.cast(values, pa.int64())
        low, high = (None if bound is None else clock.micros(bound) for bound in (low, high))
    fits = pc.is_valid(values)
    # A comparison with NaN is false, and null where the value is null.
    for bound, compare in ((low, pc.greater_equal), (high, pc.less_equal)):
        if bound is not None:
            fits = pc.and_(fits, compare(values, _bound(bound, dtype)))
    return pc.if_else(pc.is_valid(values), fits, pa.scalar(None, pa.bool_()))


def _bound(bound: float, dtype: DataType) -> pa.Scalar:
    """A bound in the feature's own precision: 0.1 of a Float32 is the Float32 that is written 0.1."""
    if isinstance(bound, float) and dtype.name == "Float32":
        return pa.scalar(bound, pa.float32())
    return pa.scalar(float(bound) if abs(bound) >= 1 << 63 else bound)


def _lengths(values: pa.Array, dtype: DataType) -> pa.Array:
    if dtype.element is not None:
        return pc.list_value_length(values)
    return pc.utf8_length(values) if dtype.name == "String" else pc.binary_length(values)


def _among(values: pa.Array, allowed: Sequence[Any], dtype: DataType) -> pa.BooleanArray:
    fits = pc.is_in(values, value_set=pa.array(allowed, ARROW[dtype.name]))
    return pc.if_else(pc.is_valid(values), fits, pa.scalar(None, pa.bool_()))


def _fresh(view: ViewContract, expectation: Expectation, within: int, newest: int | None, now: int) -> Finding:
    if newest is None:
        return _finding(view, expectation, False, "no row until the project's present")
    age = (now - newest) * clock.MICROSECOND
    found = f"the latest event is of {clock.moment(newest):%Y-%m-%d %H:%M:%S}Z, {age} before the project's present"
    return _finding(view, expectation, now - newest <= within, found)


def _unique(view: ViewContract, expectation: Expectation, data: ds.Dataset | pa.Table, keys: Sequence[str]) -> Finding:
    feature = expectation.feature
    # The one rule that needs the whole column at once: its distinct values are in memory.
    counted = pa.table({"value": pa.array([], ARROW[_dtype(view, feature)]), "rows": pa.array([], pa.int64())})
    for batch in read(data, [feature]):
        fresh = pc.value_counts(batch[feature].drop_null())
        parts = pa.table({"value": fresh.field("values"), "rows": fresh.field("counts")})
        counted = pa.concat_tables([counted, parts])
    counted = counted.group_by("value").aggregate([("rows", "sum")])
    doubled = counted.filter(pc.greater(counted["rows_sum"], 1))
    surplus = (pc.sum(doubled["rows_sum"]).as_py() or 0) - len(doubled)
    if not surplus:
        return _finding(view, expectation, True, "no value stands in two rows")
    found = f"{len(doubled)} values stand in {surplus + len(doubled)} rows"
    return _finding(view, expectation, False, found, _first(data, feature, doubled["value"], keys))


def _first(data: ds.Dataset | pa.Table, feature: str, values: pa.ChunkedArray, keys: Sequence[str]) -> Iterator[str]:
    """The first rows that hold one of these values."""
    left = EXAMPLES
    for batch in read(data, [*dict.fromkeys([*keys, feature])]):
        some = batch.filter(pc.is_in(batch[feature], value_set=values.combine_chunks())).slice(0, left)
        yield from _examples(pa.Table.from_batches([some]), feature, keys)
        left -= len(some)
        if not left:
            return


def _drift(
    view: ViewContract,
    expectation: Expectation,
    most: float,
    dtype: DataType,
    data: ds.Dataset | pa.Table,
    references: Sequence[Reference],
) -> Iterator[Finding]:
    columns = [column for column in view.fields if column.name == expectation.feature]
    compared = False
    for reference in references:
        then = reference.features.get(expectation.feature)
        if then is None or then.dtype != dtype.name or not then.rows:
            continue
        new = view_statistics(replace(view, fields=tuple(columns)), data, 0, "", after=reference.last)
        if new.last is None:
            continue
        compared = True
        index, chance = psi(then, new.features[expectation.feature])
        found = f"psi {index:.3g} of {new.rows:,} rows after training set {reference.training_set} of {reference.name}"
        usual = 0.0
        if index > max(most, chance):
            parts = windows(columns, data, reference.last, new.last - reference.last)[expectation.feature]
            usual = max((psi(then, part)[0] for part in parts), default=0.0)
        if most < index <= max(chance, usual):
            found += ", no more than chance or what was usual"
        yield _finding(view, expectation, index <= max(most, chance, usual), found)
    if not compared:
        yield _finding(view, expectation, True, "no training set, or no row after it")


def _finding(
    view: ViewContract, expectation: Expectation, passed: bool, found: str, examples: Iterator[str] | Sequence[str] = ()
) -> Finding:
    return Finding(view=view.name, feature=expectation.feature, expectation=str(expectation), passed=passed,
                   found=found, examples=() if passed else tuple(examples))  # fmt: skip


def _dtype(view: ViewContract, feature: str) -> str:
    return next(column.dtype.name for column in view.fields if column.name == feature)


def _examples(rows: pa.Table, feature: str, keys: Sequence[str]) -> list[str]:
    return [
        f"{_short(row[feature])} at " + ", ".join(f"{key}={_short(row[key])}" for key in keys)
        for row in rows.to_pylist()
    ]


def _short(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    text = "null" if value is None else repr(value) if isinstance(value, float | bytes | list) else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
