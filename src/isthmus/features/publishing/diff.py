"""What has changed between two states of a view: by key, time and content hash, without reading a value.

A state is what each key answers with at one moment, by one version of the offline table.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from isthmus.features.offline.snapshot import Places, Snapshot, matches
from isthmus.features.values.stamp import Stamp


@dataclass(frozen=True)
class SnapshotDiff:
    """How a state follows from an earlier one that Redis holds.

    Attributes:
        sent: which rows of the later state have to be written.
        changed: how many of its keys are new or have another content.
        removed: join keys that the later state lacks.
        stamp: what tells the times of the unchanged rows, if they need one.
    """

    sent: Places
    changed: int
    removed: pa.Table
    stamp: Stamp | None

    @classmethod
    def between(
        cls, before: Snapshot, after: Snapshot, *, stamp: Stamp | None, horizon: int, suspect: pa.Table
    ) -> "SnapshotDiff | None":
        """The changes, or None if the stamp in force would give a written row other times than its own.

        Where every unchanged row has been given the same new times, a new stamp tells them, and only rows whose content
        changed are sent. Any other new times have to be written.

        Args:
            before: what Redis holds.
            after: what it is to hold.
            stamp: the stamp in force.
            horizon: the latest known time of all that Redis was told from the table.
            suspect: join keys which others have written: they are sent, whatever `before` says, and Redis decides.
        """
        matched = matches(before.keys, after.keys)
        old = np.maximum(matched, 0)
        same = (matched >= 0) & (before.content[old] == after.content) if len(before.content) else matched >= 0
        moved = np.zeros(len(same), bool)
        if same.any():
            moved = same & ((before.event[old] != after.event) | (before.known[old] != after.known))
        sent = ~same
        sent[_found(suspect, after.keys)] = True
        if moved.any():
            first = int(np.flatnonzero(moved)[0])
            fresh = Stamp(horizon, int(after.event[first]), int(after.known[first]))
            alike = (after.event[same] == fresh.event).all() and (after.known[same] == fresh.known).all()
            if alike and not fresh.alters(after.event[sent], after.known[sent]).any():
                stamp = fresh
            else:
                sent |= moved
        chosen = np.flatnonzero(sent)
        if stamp is not None and stamp.alters(after.event[chosen], after.known[chosen]).any():
            return None
        gone = np.ones(len(before.content), bool)
        gone[matched[matched >= 0]] = False
        lost = suspect.filter(pa.array(matches(after.keys, suspect) < 0))
        removed = pa.concat_tables([before.keys.filter(pa.array(gone)), lost])
        return cls(chosen, int(np.count_nonzero(~same)), removed, stamp)


def _found(keys: pa.Table, among: pa.Table) -> Places:
    """Where some keys are among others, those of them that are."""
    places = matches(among, keys)
    return places[places >= 0]
