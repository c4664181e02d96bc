"""The difference between the latest rows of a view at two times, by key, time and content hash. Reads no values."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from isthmus.features.offline.latest import LatestRows, Places, matches
from isthmus.features.values.stamp import Stamp


@dataclass(frozen=True)
class RowsDiff:
    """The writes that bring Redis from one state of a view to a later one.

    Attributes:
        sent: indices of the later rows to write.
        changed: number of keys that are new or have different content.
        removed: join keys that the later state lacks.
        stamp: common times of the unchanged rows, if they need a stamp.
    """

    sent: Places
    changed: int
    removed: pa.Table
    stamp: Stamp | None

    @classmethod
    def between(
        cls, before: LatestRows, after: LatestRows, *, stamp: Stamp | None, horizon: int, suspect: pa.Table
    ) -> "RowsDiff | None":
        """Compute the difference, or None if the stamp would change the times of a row to write.

        If all unchanged rows have the same new times, these become the new stamp, and only rows with changed content
        are written. Otherwise rows with new times are written, too.

        Args:
            before: the rows in Redis.
            after: the rows to publish.
            stamp: the current stamp.
            horizon: latest known time of the rows in Redis that come from the table.
            suspect: join keys of pushed rows. Their rows are always sent, and Redis decides.
        """
        matched = matches(before.keys, after.keys)
        same = before.same(matched, after, times=False)
        moved = same & ~before.same(matched, after)
        sent = ~same
        suspect_places = matches(after.keys, suspect)
        sent[suspect_places[suspect_places >= 0]] = True
        if moved.any():
            first = int(np.flatnonzero(moved)[0])
            fresh = Stamp(horizon, int(after.event[first]), int(after.known[first]))
            alike = (after.event[same] == fresh.event).all() and (after.known[same] == fresh.known).all()
            if alike and not fresh.alters(after.event[sent], after.known[sent]).any():
                stamp = fresh
            else:
                sent |= moved
        places = np.flatnonzero(sent)
        if stamp is not None and stamp.alters(after.event[places], after.known[places]).any():
            return None
        gone = before.keys.filter(pa.array(~np.isin(np.arange(len(before.content)), matched)))
        removed = pa.concat_tables([gone, suspect.filter(pa.array(suspect_places < 0))])
        return cls(places, int(np.count_nonzero(~same)), removed, stamp)
