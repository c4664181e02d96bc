"""Check that declared lookbacks are long enough. If one is too short, a build of a range computes wrong features."""

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from isthmus.features.contract.diff import duration_text
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.days import DAY, Days, day_name
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError
from isthmus.features.offline.canonical import identity
from isthmus.features.offline.spool import DaySpool
from isthmus.features.types import DataType
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Mask
from isthmus.transforms import sources
from isthmus.transforms.views.compute import Frames, stream_view

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Allowed difference of sums, relative to the largest value of a feature. Rounding depends on the first row of a sum.
_ROUNDING = {"Float32": 1e-5, "Float64": 1e-9}


def source_reach(reach: int) -> int:
    """Return how far a build reads its sources before and after the days that it computes, in microseconds.

    `reach` is the lookback that the view declares, in microseconds. The result is longer, so that `require_enough` can
    check the lookback.
    """
    # `require_enough` reads twice as far, or a day farther if the lookback is shorter than a day.
    return reach + max(reach, DAY)


def limit_sources(view: FeatureView, frames: Frames, days: Days, reach: int) -> Frames:
    first, end = days.first * DAY - reach, days.end * DAY + reach
    own = {source.name: sources.narrow(frames[source.name], source, first, end) for source in view.sources}
    return {**frames, **own}


def require_enough(view: FeatureView, contract: ViewContract, frames: Frames, rows: DaySpool) -> None:
    """Check that the lookback a view declares is long enough; raise DataError if a longer one gives other rows.

    Computes the first day in `rows`, the rows just built, again. To compute a range of days, a build uses the rows of
    the sources from one lookback before its first day until one lookback after its last. The longer lookback is twice
    the declared one, and at least a day longer. A lookback that is too short only on later days is not detected. Does
    nothing if the view has no lookback or `rows` is empty. `frames` has the rows of the sources, at least
    as far as the longer lookback reaches.
    """
    if contract.lookback is None or not (days := rows.days()):
        return
    # The first day, because it has the fewest earlier source rows.
    day = Days(days[0], days[0] + 1)
    wider = limit_sources(view, frames, day, source_reach(contract.lookback))
    declared = _sorted(contract, list(rows.groups(day)))
    doubled = _sorted(contract, list(stream_view(view, contract, wider, (day.first * DAY, day.end * DAY))))
    if difference := _difference(contract, declared, doubled):
        reach = duration_text(contract.lookback) if contract.lookback else "0"
        raise DataError(
            f"view {view.name}",
            f"reads beyond its lookback of {reach}: with a longer one, on {day_name(days[0])}, {difference}",
            expected="the same rows",
            remedy="declare a longer lookback, or none, or remove what is random in its function",
        )  # fmt: skip


def _sorted(contract: ViewContract, tables: list[pa.Table]) -> pa.Table | None:
    tables = [table for table in tables if len(table)]
    return pa.concat_tables(tables).sort_by([(name, "ascending") for name in identity(contract)]) if tables else None


def _difference(contract: ViewContract, declared: pa.Table | None, doubled: pa.Table | None) -> str:
    counts = [0 if table is None else len(table) for table in (declared, doubled)]
    if declared is None or doubled is None or counts[0] != counts[1]:
        return f"{counts[1]} rows instead of {counts[0]}"
    keys = declared.select(identity(contract))
    if not keys.equals(doubled.select(keys.column_names).cast(keys.schema)):
        return "the rows have other keys or times"
    for column in contract.fields:
        differing = np.flatnonzero(_differing(column, declared, doubled))
        if len(differing):
            row = int(differing[0])
            where = keys.drop_columns("known_at").slice(row, 1).to_pylist()[0]
            place = ", ".join(f"{name}={value}" for name, value in where.items())
            before, after = (table[column.name][row].as_py() for table in (declared, doubled))
            first = f"first {after} instead of {before} at {place}"
            return f"{column.name} differs in {len(differing)} of {len(declared)} rows, {first}"
    return ""


def _differing(column: Column, declared: pa.Table, doubled: pa.Table) -> Mask:
    left, right = (from_arrow(table[column.name], column.dtype) for table in (declared, doubled))
    element = column.dtype.element
    if column.dtype.numpy is not None:
        return np.asarray((left.valid != right.valid) | ~_close(left.data, right.data, column.dtype))
    if element is None or element.numpy is None:
        pairs = zip(left.tolist(column.dtype), right.tolist(column.dtype), strict=True)
        return np.asarray([repr(a) != repr(b) for a, b in pairs], bool)
    lengths, right_lengths = (
        np.array([-1 if array is None else len(array) for array in side.data]) for side in (left, right)
    )
    full = (lengths == right_lengths) & (lengths > 0)
    flat, right_flat = (np.concatenate([np.empty(0, element.numpy), *side.data[full]]) for side in (left, right))
    differing = np.asarray(lengths != right_lengths)
    differing[np.repeat(np.flatnonzero(full), lengths[full])[~_close(flat, right_flat, element)]] = True
    return differing


def _close(left: Numbers, right: Numbers, dtype: DataType) -> Mask:
    if (share := _ROUNDING.get(dtype.name)) is None:
        return np.asarray(left == right)
    finite = np.abs(left[np.isfinite(left)])
    return np.isclose(left, right, rtol=share, atol=share * finite.max(initial=0), equal_nan=True)
