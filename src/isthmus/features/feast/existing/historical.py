"""Join a few keys and times through Feast's offline store, and compare the result with the rows of the source."""

from contextlib import chdir
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from isthmus.features.audit.history import EMPTY, History, same
from isthmus.features.feast.existing import encoding
from isthmus.features.feast.existing.repository import FeastTable, View
from isthmus.features.values.columns import Ints, Mask

KEYS = 200
"""Number of keys to join, each at up to three times: after its latest row, after a middle row, and now."""

_ROW, _TIME = "isthmus_audit_row", "event_timestamp"


@dataclass(frozen=True, eq=False)
class Joined:
    """The rows of an entity dataframe, compared with the result of the offline store's join.

    Attributes:
        place: for each entity row, the place in the history of the row to join.
        at: time of each entity row.
        expired: True for entity rows whose row is older than the ttl, so that the join should return nulls.
        returned: number of result rows for each entity row.
        wrong: indices of the entity rows whose value differs from the source, by feature.
        near: mask of `wrong`, by feature: True if the value is the rounded value of the source.
    """

    place: Ints
    at: Ints
    expired: Mask
    returned: Ints
    wrong: dict[str, Ints]
    near: dict[str, Mask]


def join(view: View, source: FeastTable, history: History, now: int) -> Joined:
    """Choose entity rows and join them through Feast's own offline store. Raise DependencyError if the join fails."""
    place, at = _entity_rows(history, now)
    keys = {name: source.table[name].take(history.row[place]).to_pandas() for name in view.keys}
    times = pd.Series(pd.to_datetime(at, unit="us", utc=True))
    frame, where = pd.DataFrame({**keys, _TIME: times, _ROW: np.arange(len(at))}), f"{view.where}, offline store"
    # Feast's DuckDB and Spark stores take paths from the current folder.
    with view.repository.reaching(where), chdir(view.repository.folder):
        references = [f"{view.name}:{name}" for name in history.cells]
        result = view.repository.store.get_historical_features(frame, references).to_arrow()
    rows = result[_ROW].to_numpy().astype(np.int64)
    expired = np.zeros(len(at), bool) if view.ttl is None else at - history.event[place] > view.ttl
    expected, wrong, near = history.at(place[rows]), dict[str, Ints](), dict[str, Mask]()
    for name in history.cells:
        values = encoding.encode(result[name], view.types[name], f"{where}, feature {name}")
        null = pa.array([EMPTY.as_py()] * len(rows), values.type)
        differs = np.flatnonzero(~np.where(expired[rows], same(null, values), same(expected[name], values)))
        wrong[name], first = np.unique(rows[differs], return_index=True)
        near[name] = same(view.rounded(source, name, history.row[place[wrong[name]]]), values.take(differs[first]))
    return Joined(place, at, expired, np.bincount(rows, minlength=len(at)), wrong, near)


def _entity_rows(history: History, now: int) -> tuple[Ints, Ints]:
    """Choose distinct keys and times. Return the place of the row to join, and the time, for each."""
    some = np.unique(np.linspace(0, len(history) - 1, min(KEYS, len(history))).astype(np.int64))
    chosen = dict[tuple[int, int], int]()
    for first, last in zip(np.searchsorted(history.code, some).tolist(), history.latest[some].tolist(), strict=True):
        events = history.event[first : last + 1]
        # A microsecond later, because sources may have nanoseconds, and Feast compares them.
        for at in (events[-1] + 1, events[len(events) // 2] + 1, now):
            at = min(int(at), now)
            if (place := int(first + np.searchsorted(events, at, "right")) - 1) >= first:
                chosen[int(history.code[first]), at] = place
    return np.array([*chosen.values()], np.int64), np.array([at for _, at in chosen], np.int64)
