"""`materialize`: writes the latest row of every key to Redis."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.features import columns as columnar
from isthmus.features.address import without_credentials
from isthmus.features.contract import ViewContract
from isthmus.features.entitykey import KeyValue
from isthmus.features.errors import DependencyError
from isthmus.features.offline import OfflineStore
from isthmus.features.online import EVERYTHING, OnlineStore, WriteCounts, answering, connect
from isthmus.features.pointintime import horizon, latest
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables import Progress, selected, silent

PART = 1 << 16
"""Rows that are turned from Arrow into values at a time."""


@dataclass(frozen=True)
class Materialized:
    """What one view's write to Redis did.

    Attributes:
        compared: keys of the view.
        changed: keys whose content is not what Redis had.
        written: keys whose row was replaced, be it only by newer times.
        expired: keys whose row is older than the ttl; they answer so.
        removed: keys that Redis had and the view does not have any more.
        seconds: how long it took.
    """

    compared: int
    changed: int
    written: int
    expired: int
    removed: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return asdict(self)


def materialize(
    project: Project, views: Sequence[str] | None = None, *, full: bool = False, progress: Progress = silent
) -> dict[str, Materialized]:
    """Writes what each key answers with now, and removes keys that are gone; what Redis holds already is not written.

    Args:
        project: the project, applied and built.
        views: names of the views, or None for all.
        full: replace whatever differs in Redis and remove what the view lacks, also what claims to be newer.
        progress: told the view at hand and the share that is done.
    """
    contract = project.applied()
    names = selected(project, views)
    offline = OfflineStore(project.offline)
    # Every table is opened before the first row is written.
    histories = {name: offline.history(contract.views[name]) for name in names}
    at = project.now()
    done = {}
    with project.redis() as url, connect(url) as client:
        store = OnlineStore(client, contract)
        with answering(url):
            runs = store.runs()
        for n, (name, history) in enumerate(histories.items()):
            progress(f"writing {name}", n / len(names))
            started = time.perf_counter()
            view = contract.views[name]
            with offline.reading(name):
                rows = latest(history, at)
                decided = horizon(history, at)
            event = columnar.micros(rows["event_timestamp"])
            with answering(url):
                until = store.claim(view, decided, offline.built(history))
                until = EVERYTHING if full else until
                counts = _write(store, view, rows, until)
                removed = 0 if until is None else store.remove_others(view, key_values(view, rows), until)
                _check_runs(url, runs, store.runs())
            expired = 0 if view.ttl is None else int(np.count_nonzero(at - event > view.ttl))
            seconds = round(time.perf_counter() - started, 3)
            done[name] = Materialized(counts.compared, counts.changed, counts.written, expired, removed, seconds)
    progress("all rows are written", 1.0)
    return done


def _write(store: OnlineStore, view: ViewContract, rows: pa.Table, until: int | None) -> WriteCounts:
    """Writes rows a part at a time: their form outside of Arrow takes several times the memory."""
    changed = written = 0
    for start in range(0, len(rows), PART):
        part = rows.slice(start, PART)
        values = {column.name: columnar.from_arrow(part[column.name], column.dtype) for column in view.fields}
        event, known = columnar.micros(part["event_timestamp"]), columnar.micros(part["known_at"])
        counts = store.write(view, key_values(view, part), event, known, values, horizon=until)
        changed, written = changed + counts.changed, written + counts.written
    return WriteCounts(len(rows), changed, written)


def _check_runs(url: str, before: frozenset[str], after: frozenset[str]) -> None:
    """Refuses a Redis that was started again meanwhile: it may have lost rows that it had confirmed."""
    if not before <= after:
        raise DependencyError(
            f"Redis at {without_credentials(url)}", "was started again, or has changed its primaries, in the middle",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        )  # fmt: skip


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    """The join keys of rows as Python values."""
    return {
        column.name: columnar.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys
    }
