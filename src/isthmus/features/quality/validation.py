"""Checks expectations against the rows of a view. A `Finding` is one result, with the first rows that break it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.definition import expectations
from isthmus.features.definition.expectations import Expectation
from isthmus.features.quality.drift import psi, windows
from isthmus.features.quality.statistics import FeatureStatistics, read, view_statistics
from isthmus.features.types import DataType
from isthmus.features.values.arrow import ARROW, micros

EXAMPLES = 3


class ReferenceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics, by feature, of a view's rows in a training set. `last` is its latest event time, in microseconds."""

    name: str
    training_set: str
    last: int
    features: Mapping[str, FeatureStatistics]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an expectation. `feature` is empty if it is about the rows; `examples` are rows that break it."""

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
    declared: Sequence[Expectation],
    data: ds.Dataset | pa.Table,
    *,
    now: int,
    references: Sequence[ReferenceStatistics] = (),
) -> list[Finding]:
    """Check a view's rows against the expectations declared for it, such as `Between`, and return the results in order.

    Each expectation gives one finding. `NoDrift` instead gives a finding for each reference with later rows, or a
    single finding that passes if there is none.

    Args:
        view: definition of the view.
        declared: expectations to check.
        data: rows with join keys, `event_timestamp` and features.
        now: time of the check in microseconds since 1970 UTC; `Fresh` ignores later rows.
        references: statistics of the training sets in use that read the view, for `NoDrift`.
    """
    if not declared:
        return []
    types = {column.name: column.dtype for column in view.fields}
    broken = {n: _Broken() for n, expectation in enumerate(declared) if isinstance(expectation, expectations.BY_ROW)}
    keys = [*(column.name for column in view.keys), "event_timestamp"]
    rows = 0
    latest: list[int] = []
    for batch in read(data, [*dict.fromkeys([*keys, *(declared[n].feature for n in broken)])]):
        rows += len(batch)
        times = micros(batch["event_timestamp"])
        # Rows in the future must not hide that no data has arrived for a long time.
        if (past := times <= now).any():
            latest.append(int(times[past].max()))
        for n, breaks in broken.items():
            feature = declared[n].feature
            breaks.add(_wrong(declared[n], batch[feature], types[feature]), batch, feature, keys)
    findings = []
    for n, expectation in enumerate(declared):
        match expectation:
            case expectations.RowCount(at_least=low, at_most=high):
                passed = rows >= low and (high is None or rows <= high)
                findings.append(_finding(view, expectation, passed, f"{rows:,} rows"))
            case expectations.Fresh(within=within):
                newest = max(latest, default=None)
                findings.append(_fresh(view, expectation, within // clock.MICROSECOND, newest, now))
            case expectations.Unique():
                findings.append(_unique(view, expectation, types[expectation.feature], data, keys))
            case expectations.NoDrift(psi=limit):
                findings += _drift(view, expectation, limit, types[expectation.feature], data, references)
            case expectations.Present(share=share):
                present = 1.0 - broken[n].rows / rows if rows else 1.0
                text = f"{broken[n].rows:,} of {rows:,} rows have no value"
                findings.append(_finding(view, expectation, present >= share, text, broken[n].examples))
            case _:
                text = f"{broken[n].rows:,} of {rows:,} rows do not fit"
                findings.append(_finding(view, expectation, not broken[n].rows, text, broken[n].examples))
    return findings


@dataclass
class _Broken:
    rows: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, wrong: pa.BooleanArray, batch: pa.RecordBatch, feature: str, keys: Sequence[str]) -> None:
        count = pc.sum(wrong).as_py() or 0
        if count and len(self.examples) < EXAMPLES:
            first = batch.filter(wrong).slice(0, EXAMPLES - len(self.examples))
            self.examples += _examples(pa.Table.from_batches([first]), feature, keys)
        self.rows += count


def _wrong(expectation: Expectation, values: pa.Array, dtype: DataType) -> pa.BooleanArray:
    match expectation:
        case expectations.Between(low=low, high=high):
            fits = _within(values, low, high, dtype)
        case expectations.Length(low=low, high=high):
            fits = _within(_lengths(values, dtype), low, high, dtype)
        case expectations.OneOf(values=allowed):
            fits = pc.is_in(values, value_set=pa.array(allowed, ARROW[dtype.name]))
        case _:
            return pc.is_null(values)
    return pc.and_kleene(pc.is_valid(values), pc.invert(fits))


def _within(values: pa.Array, low: Any, high: Any, dtype: DataType) -> pa.BooleanArray:
    if isinstance(low, datetime) or isinstance(high, datetime):
        values = pc.cast(values, pa.int64())
        low, high = (None if bound is None else clock.micros(bound) for bound in (low, high))
    fits = pc.is_valid(values)
    # A comparison with NaN is false, and null where the value is null.
    for bound, compare in ((low, pc.greater_equal), (high, pc.less_equal)):
        if bound is not None:
            fits = pc.and_(fits, compare(values, _bound(bound, dtype)))
    return fits


def _bound(bound: float, dtype: DataType) -> pa.Scalar:
    # Use the feature's precision: 0.1 as Float32 is the nearest Float32.
    if isinstance(bound, float) and dtype.name == "Float32":
        return pa.scalar(bound, pa.float32())
    return pa.scalar(float(bound) if abs(bound) >= 1 << 63 else bound)


def _lengths(values: pa.Array, dtype: DataType) -> pa.Array:
    if dtype.element is not None:
        return pc.list_value_length(values)
    return pc.utf8_length(values) if dtype.name == "String" else pc.binary_length(values)


def _fresh(view: ViewContract, expectation: Expectation, within: int, newest: int | None, now: int) -> Finding:
    if newest is None:
        return _finding(view, expectation, False, "no row up to the project's present")
    age = (now - newest) * clock.MICROSECOND
    text = f"the latest event is at {clock.moment(newest):%Y-%m-%d %H:%M:%S}Z, {age} before the project's present"
    return _finding(view, expectation, now - newest <= within, text)


def _unique(
    view: ViewContract, expectation: Expectation, dtype: DataType, data: ds.Dataset | pa.Table, keys: Sequence[str]
) -> Finding:
    feature = expectation.feature
    # Only this expectation needs the distinct values of a column in memory.
    counted = pa.table({"value": pa.array([], ARROW[dtype.name]), "rows": pa.array([], pa.int64())})
    for batch in read(data, [feature]):
        fresh = pc.value_counts(batch[feature].drop_null())
        parts = pa.table({"value": fresh.field("values"), "rows": fresh.field("counts")})
        counted = pa.concat_tables([counted, parts])
    counted = counted.group_by("value").aggregate([("rows", "sum")])
    doubled = counted.filter(pc.greater(counted["rows_sum"], 1))
    surplus = (pc.sum(doubled["rows_sum"]).as_py() or 0) - len(doubled)
    if not surplus:
        return _finding(view, expectation, True, "no value occurs twice")
    text = f"{len(doubled)} values occur in {surplus + len(doubled)} rows"
    return _finding(view, expectation, False, text, _first(data, feature, doubled["value"], keys))


def _first(data: ds.Dataset | pa.Table, feature: str, values: pa.ChunkedArray, keys: Sequence[str]) -> Iterator[str]:
    left = EXAMPLES
    for batch in read(data, [*dict.fromkeys([*keys, feature])]):
        rows = batch.filter(pc.is_in(batch[feature], value_set=values.combine_chunks())).slice(0, left)
        yield from _examples(pa.Table.from_batches([rows]), feature, keys)
        left -= len(rows)
        if not left:
            return


def _drift(
    view: ViewContract,
    expectation: Expectation,
    limit: float,
    dtype: DataType,
    data: ds.Dataset | pa.Table,
    references: Sequence[ReferenceStatistics],
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
        text = f"psi {index:.3g} of {new.rows:,} rows after training set {reference.training_set} of {reference.name}"
        usual = 0.0
        if index > max(limit, chance):
            parts = windows(columns, data, reference.last, new.last - reference.last)[expectation.feature]
            usual = max((psi(then, part)[0] for part in parts), default=0.0)
        if limit < index <= max(chance, usual):
            text += ", within chance or the usual variation"
        yield _finding(view, expectation, index <= max(limit, chance, usual), text)
    if not compared:
        yield _finding(view, expectation, True, "no training set, or no row after it")


def _finding(
    view: ViewContract, expectation: Expectation, passed: bool, text: str, examples: Iterator[str] | Sequence[str] = ()
) -> Finding:
    return Finding(view=view.name, feature=expectation.feature, expectation=str(expectation), passed=passed,
                   found=text, examples=() if passed else tuple(examples))  # fmt: skip


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
