"""Whether a view reaches further back than it says: a range that is built from too little of its sources is wrong."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from isthmus.features.contract.contract import Column, ViewContract
from isthmus.features.contract.diff import duration
from isthmus.features.days import DAY, Days, day_name
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError
from isthmus.features.offline.spool import Spool
from isthmus.features.types import DataType
from isthmus.features.values.columns import from_arrow
from isthmus.transforms import sources
from isthmus.transforms.views.compute import Frames, stream_view

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_ROUNDING = {"Float32": 1e-5, "Float64": 1e-9}
"""By which share of a feature's greatest value an engine's sums may differ, which begin at the first row they see."""


def narrowed(view: FeatureView, frames: Frames, days: Days, reach: int) -> Frames:
    """The sources of a view within `reach` microseconds of a range."""
    first, end = days.first * DAY - reach, days.end * DAY + reach
    own = {source.name: sources.narrow(frames[source.name], source, first, end) for source in view.sources}
    return {**frames, **own}


def require_enough(view: FeatureView, contract: ViewContract, frames: Frames, rows: Spool) -> None:
    """Computes the first day that has rows again, with twice the lookback (or a day more): that must change nothing.

    The first day is the one before which a step reads least. What that day cannot show is not found: a window that only
    other days fill, or one that reaches further than twice.

    Args:
        view: the view, with a lookback.
        contract: its canonical form.
        frames: a DataFrame per source name, as they are.
        rows: what a range came to with the lookback as declared.

    Raises:
        DataError: the rows differ, by more than the rounding of sums.
    """
    if contract.lookback is None or not (days := rows.days()):
        return
    day = Days(days[0], days[0] + 1)
    wider = narrowed(view, frames, day, contract.lookback + max(contract.lookback, DAY))
    once = _sorted(contract, list(rows.groups(day)))
    twice = _sorted(contract, list(stream_view(view, contract, wider, (day.first * DAY, day.end * DAY))))
    found = _difference(contract, once, twice)
    if found:
        reach = duration(contract.lookback) if contract.lookback else "0"
        raise DataError(
            f"view {view.name}",
            f"reaches further than its lookback of {reach}: with more of it, on {day_name(days[0])}, {found}",
            expected="the same rows",
            remedy="declare a longer lookback, or none; or mend what in its function depends on chance",
        )  # fmt: skip


def _sorted(contract: ViewContract, tables: list[pa.Table]) -> pa.Table | None:
    full = [table for table in tables if len(table)]
    if not full:
        return None
    order = [*(key.name for key in contract.keys), "event_timestamp", "known_at"]
    return pa.concat_tables(full).sort_by([(name, "ascending") for name in order])


def _difference(contract: ViewContract, once: pa.Table | None, twice: pa.Table | None) -> str:
    """What two computations of a day differ in; nothing if they do not."""
    counts = [0 if table is None else len(table) for table in (once, twice)]
    if once is None or twice is None or counts[0] != counts[1]:
        return f"{counts[1]} rows instead of {counts[0]}"
    identity = [*(key.name for key in contract.keys), "event_timestamp", "known_at"]
    if not once.select(identity).equals(twice.select(identity).cast(once.select(identity).schema)):
        return "the rows have other keys or times"
    for column in contract.fields:
        differing = np.flatnonzero(_differ(column, once, twice))
        if len(differing):
            row = int(differing[0])
            where: Mapping[str, object] = once.slice(row, 1).select(identity[:-1]).to_pylist()[0]
            place = ", ".join(f"{name}={value}" for name, value in where.items())
            values = [table[column.name][row].as_py() for table in (once, twice)]
            found = f"first {values[1]} instead of {values[0]} at {place}"
            return f"{column.name} differs in {len(differing)} of {len(once)} rows, {found}"
    return ""


def _differ(column: Column, once: pa.Table, twice: pa.Table) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows of one column differ."""
    one, two = (from_arrow(table[column.name], column.dtype) for table in (once, twice))
    element = column.dtype.element
    if column.dtype.numpy is not None:
        return np.asarray((one.valid != two.valid) | ~_near(one.data, two.data, column.dtype))
    if element is None or element.numpy is None:
        pairs = zip(one.tolist(column.dtype), two.tolist(column.dtype), strict=True)
        return np.asarray([repr(a) != repr(b) for a, b in pairs], bool)
    lengths, others = (np.array([-1 if array is None else len(array) for array in found.data]) for found in (one, two))
    full = (lengths == others) & (lengths > 0)
    first, second = (np.concatenate([np.empty(0, element.numpy), *found.data[full]]) for found in (one, two))
    differing = np.asarray(lengths != others)
    differing[np.repeat(np.flatnonzero(full), lengths[full])[~_near(first, second, element)]] = True
    return differing


def _near(one: Numbers, two: Numbers, dtype: DataType) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which numbers are the same, but for the rounding of sums."""
    if (share := _ROUNDING.get(dtype.name)) is None:
        return np.asarray(one == two)
    finite = np.abs(one[np.isfinite(one)])
    return np.isclose(one, two, rtol=share, atol=share * finite.max(initial=0), equal_nan=True)
