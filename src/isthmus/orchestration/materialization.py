"""`materialize`: writes the latest row of every key to Redis."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.features import columns as columnar
from isthmus.features.contract import ViewContract
from isthmus.features.embedded import EmbeddedRedis
from isthmus.features.offline import OfflineStore
from isthmus.features.online import EVERYTHING, KeyValue, OnlineStore, answering, connect
from isthmus.features.pointintime import latest
from isthmus.orchestration.project import Project
from isthmus.orchestration.tables import Progress, selected, silent


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
    with redis_url(project) as url, connect(url) as client:
        store = OnlineStore(client, contract)
        for n, (name, history) in enumerate(histories.items()):
            progress(f"writing {name}", n / len(names))
            started = time.perf_counter()
            view = contract.views[name]
            with offline.reading(name):
                rows = latest(history, at)
            keys = key_values(view, rows)
            event, known = columnar.micros(rows["event_timestamp"]), columnar.micros(rows["known_at"])
            values = {column.name: columnar.from_arrow(rows[column.name], column.dtype) for column in view.fields}
            with answering(url):
                horizon = store.claim(view, int(known.max(initial=0)), offline.built(history))
                horizon = EVERYTHING if full else horizon
                counts = store.write(view, keys, event, known, values, horizon=horizon)
                removed = 0 if horizon is None else store.remove_others(view, keys, horizon)
            expired = 0 if view.ttl is None else int(np.count_nonzero(at - event > view.ttl))
            seconds = round(time.perf_counter() - started, 3)
            done[name] = Materialized(counts.compared, counts.changed, counts.written, expired, removed, seconds)
    progress("all rows are written", 1.0)
    return done


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    """The join keys of rows as Python values."""
    return {
        column.name: columnar.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys
    }


@contextmanager
def redis_url(project: Project) -> Iterator[str]:
    """The URL of the project's Redis; an embedded one runs at least as long as the block."""
    configured = project.settings.stores.online
    if configured != "embedded":
        yield configured
        return
    with EmbeddedRedis(project.state / "redis") as server:
        yield server.url
