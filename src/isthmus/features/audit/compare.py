"""Compare the latest rows of a source with the rows of an online store, and name the cause of each difference."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.audit.history import EMPTY, Cells, History, same
from isthmus.features.values.columns import Ints, Mask

_ZONE, _FARTHEST = 15 * 60_000_000, 14 * 3_600_000_000
"""Time zones differ by multiples of 15 minutes, and from UTC by at most 14 hours."""

Rounded = Callable[[str, Ints], pa.Array]
"""Returns the encoded values of a feature after rounding, for rows of the source."""


@dataclass(frozen=True, eq=False)
class OnlineRows:
    """The online rows of the keys of a history, in its order: which exist, their event times, and their values."""

    present: Mask
    event: Ints
    cells: Cells
    unknown: int = 0  # rows of keys that the source does not have, if the store was read whole


@dataclass(frozen=True, eq=False)
class Difference:
    """Keys, as indices of the history's, whose online row differs from the source for one cause.

    `kind` is what a reader of the store sees, and `cause` why, a key of `CAUSES`. `features` counts the features that
    differ; it is empty if whole rows do.
    """

    kind: str
    cause: str
    keys: Ints
    features: dict[str, int]


def compare(
    history: History, online: OnlineRows, ttl: int | None, now: int, rounded: Rounded
) -> tuple[dict[str, int], list[Difference]]:
    """Compare each key's latest row with its online row. `ttl` is in microseconds; None if rows never expire.

    Return the number of keys with another value online for each feature, and the differences with their causes.
    """
    keys, resolution = np.flatnonzero(online.present), history.resolution
    expired = np.zeros(len(history), bool) if ttl is None else now - history.event[history.latest] > ttl
    cells = {name: values.take(keys) for name, values in online.cells.items()}
    event, target = online.event[keys], history.latest[keys]
    exact, timed = history.find(keys, event, cells)
    # Any of several rows with the same times is a right answer: which one is chance, and reported as a tie.
    right = (exact >= 0) & (history.event[exact] == history.event[target])
    right &= history.created[exact] == history.created[target]
    shifted = (exact < 0) & history.equal(target, cells)
    shift = event - history.event[target] // resolution * resolution
    created = event == history.created[target] // resolution * resolution
    zone = shifted & ~created & (shift % _ZONE == 0) & (np.abs(shift) <= _FARTHEST)
    strange = np.flatnonzero((exact < 0) & ~shifted & (timed < 0))
    foreign = history.has_rows({name: values.take(strange) for name, values in cells.items()}, event[strange])
    other = np.flatnonzero((exact < 0) & ~shifted & (timed >= 0))
    found = [
        Difference("missing online", "missing key", np.flatnonzero(~online.present & ~expired), {}),
        Difference("stale", "stale row", keys[(exact >= 0) & ~right], {}),
        Difference("expired but served", "expired", keys[right & expired[keys]], {}),
        Difference("differing", "wrong time zone", keys[zone], {}),
        Difference("differing", "late ttl", keys[shifted & ~zone & (shift > 0)], {}),
        Difference("differing", "wrong time", keys[shifted & ~zone & (shift <= 0)], {}),
        Difference("differing", "another entity's row", keys[strange[foreign]], {}),
        Difference("differing", "unknown row", keys[strange[~foreign]], {}),
    ]
    for name, values in cells.items():
        absent = values.is_null().to_numpy(zero_copy_only=False)
        found.append(Difference("missing online", "missing feature", keys[absent], {name: int(absent.sum())}))
    theirs = {name: values.take(other) for name, values in cells.items()}
    found += _values(history, keys[other], timed[other], theirs, event[other], rounded)
    mine = history.at(target)
    differing = {name: int((~same(mine[name], values)).sum()) for name, values in cells.items()}
    return differing, [difference for difference in found if len(difference.keys)]


def _values(
    history: History, keys: Ints, base: Ints, cells: Cells, event: Ints, rounded: Rounded
) -> Iterator[Difference]:
    """Name the causes of values that the row of the same key and time, at `base`, does not have."""
    expected, explained = history.at(base), np.ones(len(keys), bool)
    causes: dict[tuple[str, str], dict[str, Mask]] = {}
    for name, values in cells.items():
        differs = ~same(expected[name], values) & ~values.is_null().to_numpy(zero_copy_only=False)
        null = pc.equal(expected[name], EMPTY).to_numpy(zero_copy_only=False)
        lost = pc.fill_null(pc.equal(values, EMPTY), False).to_numpy(zero_copy_only=False)
        near, places = np.zeros(len(keys), bool), np.flatnonzero(differs & ~null & ~lost)
        near[places] = same(rounded(name, history.row[base[places]]), values.take(places))
        for kind, cause, mask in (
            ("rounded", "rounded", near),
            ("differing", "null as a value", null),
            ("differing", "value lost", lost & ~null),
            ("differing", "other value", ~near & ~null & ~lost),
        ):
            causes.setdefault((kind, cause), {})[name] = mask & differs
        explained &= ~differs | near | null
    foreign = ~explained & history.has_rows(cells, event)
    yield Difference("differing", "another entity's row", keys[foreign], {})
    for (kind, cause), masks in causes.items():
        parts = {name: mask & ~foreign for name, mask in masks.items()}
        features = {name: int(mask.sum()) for name, mask in parts.items() if mask.any()}
        yield Difference(kind, cause, keys[np.logical_or.reduce([*parts.values()])], features)
