"""Shared parts of a verdict: names of compared rows, samples of rows, and `OnlineSide` to ask Redis and the API."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.types import Index, evenly_spaced
from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.offline.history import ViewHistory, latest_known_time
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import key_values
from isthmus.features.redis.connection import translate_errors
from isthmus.features.types import DataType
from isthmus.features.values.columns import Mask, Values, objects
from isthmus.features.values.entitykey import KeyValue
from isthmus.orchestration.verification.client import Client
from isthmus.package.verdict import FeatureVerdict, Sample, compare

# Rows that are also requested one at a time: a row must have the same bits alone and in a batch.
SINGLES = 256

# Keys of a view, or rows of a training set, that are compared without `all_keys`.
SAMPLE = 500

# Rows of the training set that a full verdict requests from the API.
CHECKED_ROWS = 2000


@dataclass(frozen=True)
class ComparedRows:
    """Names of n rows in a verdict's examples, and their event times (microseconds since 1970 UTC, or None)."""

    keys: np.ndarray[Any, Any]
    times: np.ndarray[Any, Any]

    @classmethod
    def of(cls, table: pa.Table, keys: Sequence[str], times: Iterable[int | None]) -> "ComparedRows":
        names = [str(row) for row in table.select(list(keys)).to_pylist()]
        return cls(objects(names, len(names)), objects(times, len(names)))

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, rows: np.ndarray[Any, Any]) -> "ComparedRows":
        return ComparedRows(self.keys[rows], self.times[rows])

    def compare(self, offline: Values, online: Values, dtype: DataType, tolerance: float = 0.0) -> FeatureVerdict:
        return compare(self.keys.tolist(), offline, online, dtype, tolerance, self.times.tolist())


@dataclass(frozen=True)
class OnlineSide:
    """Redis and a private API server that a verdict compares with tables, as of `at` (microseconds since 1970 UTC)."""

    store: OnlineStore
    url: str
    api: Client
    at: int

    def keys(self, view: ViewContract) -> Mapping[str, Sequence[KeyValue]]:
        with translate_errors(self.url):
            return self.store.keys(view)

    def newer_than_table(self, history: ViewHistory, keys: pa.Table) -> Mask:
        return self.stored(history, keys)[0]

    def stored(self, history: ViewHistory, keys: pa.Table) -> tuple[Mask, Values, Values]:
        with translate_errors(self.url):
            answer = self.store.read(history.view, key_values(history.view, keys), self.at)
        # A key without a row is compared, since training has a row.
        ahead: Mask = (answer.known > latest_known_time(history, self.at)) & (answer.status != clock.Status.NOT_FOUND)
        valid = (answer.status == clock.Status.PRESENT) | (answer.status == clock.Status.NULL)
        known, content = (
            Values(np.where(valid, data, 0), valid)
            for data in (answer.known, answer.columns.packed["content"].astype(np.int64))
        )
        return ahead, known, content


def questions_at(keys: pa.Table, at: int) -> pa.Table:
    moments = pa.array(np.full(len(keys), at), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return keys.append_column("event_timestamp", moments)


def sample_with_keys(table: pa.Table, keys: Sequence[str], count: int) -> pa.Table:
    rows = _with_keys(table, keys)
    return table.take(pa.array(rows[evenly_spaced(len(rows), count)] if len(rows) else rows))


def sample_of(compared: pa.Table, table: pa.Table, keys: Sequence[str]) -> Sample:
    return Sample(len(compared), min(len(_with_keys(table, keys)), CHECKED_ROWS))


def _with_keys(table: pa.Table, keys: Sequence[str]) -> Index:
    return np.flatnonzero(
        np.logical_and.reduce([np.ones(len(table), bool), *(table[name].is_valid().to_numpy() for name in keys)])
    )
