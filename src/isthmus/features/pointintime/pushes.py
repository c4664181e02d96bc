"""Pushed rows in a replay: the decisions of Redis's scripts, recomputed from the log of pushes."""

import numpy as np
import pyarrow as pa

from isthmus.features.contract.schema import ViewContract
from isthmus.features.offline.latest import LatestRows, matches
from isthmus.features.offline.pushes import ACCEPTED
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.columns import Mask
from isthmus.features.values.rows import RowCodec

Order = tuple[int, int, int]
"""Event time, known time and content hash of a row. The greater of two is the newer."""


class ServedPushes:
    """The pushed rows of a view. Each was served from its push on, if it was newer than the served row.

    A run then overrules all rows known by its horizon. Pushed rows that became known later stay if they are newer than
    the run's row.

    Attributes:
        keys: the m keys that have pushed rows.
    """

    def __init__(self, view: ViewContract, pushed: pa.Table) -> None:
        self.rows = pushed.sort_by(ACCEPTED.name)
        names = [column.name for column in view.keys]
        self.keys = self.rows.select(names).group_by(names).aggregate([]).combine_chunks()
        self._key = matches(self.keys, self.rows.select(names))
        values = {column.name: from_arrow(self.rows[column.name], column.dtype) for column in view.fields}
        content = RowCodec(view).content(values, len(self.rows))
        times = (micros(self.rows[name]) for name in ("event_timestamp", "known_at"))
        self._order: list[Order] = list(zip(*(column.tolist() for column in (*times, content)), strict=True))
        self._accepted = self.rows[ACCEPTED.name].to_numpy()
        self._next = 0
        self._served: list[Order | None] = [None] * len(self.keys)
        self._ahead = np.zeros(len(self.keys), bool)
        """Keys whose served row is a pushed row that no run has overruled yet."""

    def skip(self, moment: int) -> None:
        self._next = int(np.searchsorted(self._accepted, moment, "right"))

    def until(self, moment: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the indices of the next rows that pushes made readable up to `moment`, in order."""
        end = int(np.searchsorted(self._accepted, moment, "right"))
        readable: dict[tuple[int, int], int] = {}
        for place in range(self._next, end):
            key, order = int(self._key[place]), self._order[place]
            served = self._served[key]
            if served is None or order > served:
                self._served[key], self._ahead[key] = order, True
                # If several rows were pushed at the same time, the newest counts.
                readable[key, int(self._accepted[place])] = place
        self._next = max(self._next, end)
        return np.array(list(readable.values()), np.int64)

    def decide(self, state: LatestRows, horizon: int) -> tuple[Mask, Mask]:
        """Apply a materialization run with latest rows `state` to the served rows.

        Return masks, shape (m,): keys whose pushed row stays, since it became known after `horizon` and is newer, and
        keys whose pushed row another row replaces.
        """
        stays, loses = np.zeros(len(self.keys), bool), np.zeros(len(self.keys), bool)
        for key, place in enumerate(matches(state.keys, self.keys.cast(state.keys.schema)).tolist()):
            row = None if place < 0 else (int(state.event[place]), int(state.known[place]), int(state.content[place]))
            served = self._served[key]
            if self._ahead[key] and served is not None and served[1] > horizon and (row is None or served > row):
                stays[key] = True
                continue
            loses[key] = self._ahead[key] and row != served
            self._served[key], self._ahead[key] = row, False
        return stays, loses
