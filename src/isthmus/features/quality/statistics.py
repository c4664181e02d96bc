"""Statistics of features, in a single pass and bounded memory. The same rows in order give the same numbers."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.offline.scan import rebatch
from isthmus.features.types import DataType
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.rows import mix

# Counts, extremes, means and deviations cover all rows. The shape (points, top values) comes from a sample of at most
# `SAMPLE` rows, drawn without replacement: a share in it is off by more than 0.0077 once in a thousand times (Massart
# 1990, "The tight constant in the Dvoretzky-Kiefer-Wolfowitz inequality"), and exact if there are fewer rows. The
# number of distinct values is exact below `DISTINCT`. From there, it is estimated from the smallest hashes with a
# standard error of 1.6 % (Beyer et al. 2007, "On synopses for distinct-value estimation under multiset operations",
# SIGMOD).

FORMAT = 1
SAMPLE = 65_536
DISTINCT = 4_096
POINTS = 256
"""Number of values of equal weight that represent a distribution: shares are off by at most half of 1/256."""

TOP = 256
"""Maximum number of named categories."""

_TEXT = 80
"""Maximum characters of a category's name; a longer name is cut and ends with its digest."""

_CATEGORIES = ("Bool", "String", "Bytes")
_BATCH = 65_536
_TIME = ARROW["UnixTimestamp"]
_Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class FeatureStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of a feature's values. Times count as numbers of microseconds, and arrays as their lengths.

    Attributes:
        distinct: number of distinct values without null, estimated from `DISTINCT` on; all NaN count as a single value.
        not_finite: number of NaN and infinite values. The fields below exclude them.
        mean: mean of the numbers; None without any, or beyond the range of floats.
        deviation: standard deviation of the population; None like `mean`.
        points: at most `POINTS` numbers, ascending, each for an equal part of the distribution.
        top: share of all rows by category, most frequent first; at most `TOP`.
    """

    dtype: str
    rows: int
    nulls: int
    distinct: int
    not_finite: int = 0
    low: int | float | None = None
    high: int | float | None = None
    mean: float | None = None
    deviation: float | None = None
    points: tuple[float, ...] = ()
    top: dict[str, float] = {}

    @property
    def categorical(self) -> bool:
        return self.dtype in _CATEGORIES

    def quantile(self, share: float) -> float | None:
        return self.points[min(int(share * len(self.points)), len(self.points) - 1)] if self.points else None


class ViewStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a view's rows. `first` and `last` are event times in microseconds, or None without rows."""

    view: str
    contract: str
    version: int
    fingerprint: str
    rows: int
    first: int | None
    last: int | None
    features: dict[str, FeatureStatistics]
    format: int = FORMAT


def read(
    data: ds.Dataset | pa.Table, columns: Sequence[str], after: int | None = None, until: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield columns of all rows whose event time is after `after` and up to `until`, to measure them.

    Both are in microseconds since 1970 UTC; None means no limit. The batches do not depend on how the rows are split
    into files, so repeated measurements give the same numbers.
    """
    event = ds.field("event_timestamp")
    where = None
    if after is not None:
        where = event > pa.scalar(after, _TIME)
    if until is not None:
        before = event <= pa.scalar(until, _TIME)
        where = before if where is None else where & before
    source = ds.dataset(data) if isinstance(data, pa.Table) else data
    batches = source.to_batches(
        columns=list(columns), filter=where, batch_size=_BATCH, batch_readahead=2, fragment_readahead=1
    )
    for rows in rebatch(batches, _BATCH):
        yield from rows.combine_chunks().to_batches()


def view_statistics(
    view: ViewContract,
    data: ds.Dataset | pa.Table,
    version: int,
    fingerprint: str,
    *,
    after: int | None = None,
    until: int | None = None,
) -> ViewStatistics:
    measurement = Measurement(view.fields)
    first, last = math.inf, -math.inf
    for batch in read(data, [*(column.name for column in view.fields), "event_timestamp"], after, until):
        if len(batch):
            times = pc.min_max(pc.cast(batch["event_timestamp"], pa.int64()))
            first, last = min(first, times["min"].as_py()), max(last, times["max"].as_py())
        measurement.add(batch)
    return ViewStatistics(
        view=view.name,
        contract=view.hash,
        version=version,
        fingerprint=fingerprint,
        rows=measurement.rows,
        first=int(first) if measurement.rows else None,
        last=int(last) if measurement.rows else None,
        features=measurement.features(),
    )


def latest_event(data: "ds.Dataset | pa.Table") -> int:
    times = [pc.max(batch["event_timestamp"]).value for batch in read(data, ["event_timestamp"])]
    return max((time for time in times if time is not None), default=0)


def measure(columns: Sequence[Column], batches: Iterable[pa.RecordBatch]) -> tuple[int, dict[str, FeatureStatistics]]:
    measurement = Measurement(columns)
    for batch in batches:
        measurement.add(batch)
    return measurement.rows, measurement.features()


class Measurement:
    """Running statistics of columns: pass every batch to `add`, then call `features`. Points come from a sample."""

    def __init__(self, columns: Sequence[Column], sample: int = SAMPLE) -> None:
        self.rows = 0
        self._columns = {column.name: _Measured(column.dtype) for column in columns}
        empty = {name: _measurable(pa.array([], ARROW[m.dtype.name]), m.dtype) for name, m in self._columns.items()}
        self._sample = _Sample(pa.table(empty), sample)

    def add(self, batch: pa.RecordBatch) -> None:
        if len(batch):
            arrays = {name: _measurable(batch[name], column.dtype) for name, column in self._columns.items()}
            for name, column in self._columns.items():
                column.add(arrays[name])
            self._sample.add(arrays, len(batch))
            self.rows += len(batch)

    def features(self) -> dict[str, FeatureStatistics]:
        sample = self._sample.rows()
        return {name: column.statistics(sample[name], self.rows) for name, column in self._columns.items()}


def category(value: bool | str | bytes) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case bytes():
            value = "0x" + value.hex()
    if len(value) <= _TEXT:
        return value
    return f"{value[:_TEXT]}… {hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def _measurable(array: pa.Array, dtype: DataType) -> pa.Array:
    if dtype.element is not None:
        return pc.cast(pc.list_value_length(array), pa.int64())
    return pc.cast(array, pa.int64()) if dtype.name == "UnixTimestamp" else array


@dataclass
class _Measured:
    """Running statistics of a column, without the sample. `squares` is the sum of squared deviations."""

    dtype: DataType
    nulls: int = 0
    not_finite: int = 0
    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: Any = None
    high: Any = None
    _smallest: _Hashes = field(default_factory=lambda: np.empty(0, np.uint64))

    def add(self, array: pa.Array) -> None:
        self.nulls += array.null_count
        values = array.drop_null()
        if not len(values):
            return
        if self.dtype.name in _CATEGORIES:
            self._see(_digests(pc.unique(values).to_pylist()))
            return
        numbers = values.to_numpy(zero_copy_only=False)
        self._see(mix(_bits(numbers)))
        if numbers.dtype.kind == "f":
            finite = np.isfinite(numbers)
            if not finite.all():
                self.not_finite += len(numbers) - int(finite.sum())
                numbers = numbers[finite]
        if len(numbers):
            self._count(numbers)

    def _count(self, numbers: np.ndarray[Any, Any]) -> None:
        low, high = numbers.min().item(), numbers.max().item()
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        # Combines means and squared deviations: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise
        # algorithm for computing sample variances".
        with np.errstate(over="ignore", invalid="ignore"):
            real = numbers.astype(np.float64)
            mean, count = float(real.mean()), self.count + len(real)
            gap = np.float64(mean) - self.mean
            self.squares += float(np.square(real - mean).sum() + gap * gap * (self.count * len(real) / count))
            self.mean += float(gap * (len(real) / count))
        self.count = count

    def _see(self, hashes: _Hashes) -> None:
        if len(self._smallest) == DISTINCT:
            hashes = hashes[hashes < self._smallest[-1]]
        if len(hashes):
            # Arrow's hash table first: sorting every batch would take longer than all other steps.
            fresh = pc.unique(pa.array(hashes)).to_numpy()
            self._smallest = np.unique(np.concatenate([self._smallest, fresh]))[:DISTINCT]

    def _distinct(self) -> int:
        if len(self._smallest) < DISTINCT:
            return len(self._smallest)
        return round((DISTINCT - 1) / (float(self._smallest[-1]) / 2.0**64))

    def statistics(self, sample: pa.ChunkedArray, rows: int) -> FeatureStatistics:
        top: dict[str, float] = {}
        points: tuple[float, ...] = ()
        if self.dtype.name in _CATEGORIES:
            counted = pc.value_counts(sample.drop_null())
            pairs = zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)
            named = sorted((-count, category(value)) for value, count in pairs)
            top = {name: -count / len(sample) for count, name in named[:TOP]}
        else:
            points = _points(sample.drop_null().to_numpy())
        deviation = math.sqrt(self.squares / self.count) if self.count else None
        return FeatureStatistics(
            dtype=self.dtype.name,
            rows=rows,
            nulls=self.nulls,
            distinct=self._distinct(),
            not_finite=self.not_finite,
            low=self.low,
            high=self.high,
            mean=self.mean if self.count and math.isfinite(self.mean) else None,
            deviation=deviation if deviation is not None and math.isfinite(deviation) else None,
            points=points,
            top=top,
        )


class _Sample:
    """A uniform sample of at most `size` rows, which does not depend on the sizes of the batches."""

    # It has the rows with the smallest random numbers: the n-th row gets the n-th number of a fixed stream.
    def __init__(self, empty: pa.Table, size: int) -> None:
        self._size = size
        self._random = np.random.PCG64(0)
        self._limit = np.uint64(2**64 - 1)
        self._numbers: list[_Hashes] = [np.empty(0, np.uint64)]
        self._parts = [empty]

    def add(self, arrays: Mapping[str, pa.Array], rows: int) -> None:
        numbers = self._random.random_raw(rows)
        places = np.flatnonzero(numbers <= self._limit)
        table = pa.table(dict(arrays))
        self._numbers.append(numbers[places])
        self._parts.append(table if len(places) == rows else table.take(pa.array(places)))
        if sum(map(len, self._numbers)) > 2 * self._size:
            self._shrink()

    def rows(self) -> pa.Table:
        self._shrink()
        return self._parts[0]

    def _shrink(self) -> None:
        numbers, table = np.concatenate(self._numbers), pa.concat_tables(self._parts)
        if len(numbers) > self._size:
            places = np.argpartition(numbers, self._size - 1)[: self._size]
            numbers, table = numbers[places], table.take(pa.array(places)).combine_chunks()
            self._limit = numbers.max()
        self._numbers, self._parts = [numbers], [table]


def _points(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Return the middle value of each of POINTS equal parts, or all values if there are fewer."""
    finite = np.sort(values[np.isfinite(values)].astype(np.float64))
    count = min(len(finite), POINTS)
    places = ((np.arange(count) + 0.5) * len(finite) / max(count, 1)).astype(np.int64)
    return tuple((finite[places] + 0.0).tolist())


def _bits(numbers: np.ndarray[Any, Any]) -> _Hashes:
    """Return 64 bits for each number, equal for 0.0 and -0.0, and for every NaN."""
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64).view(np.uint64)
    real = numbers.astype(np.float64) + 0.0
    real[np.isnan(real)] = np.nan
    return real.view(np.uint64)


def _digests(values: Sequence[bool | str | bytes]) -> _Hashes:
    named = (value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass") for value in values)
    return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in named), "<u8")
