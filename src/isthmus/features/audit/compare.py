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
"""Takes a feature and row indices of the source. Returns its encoded values after rounding, null if not rounded."""


@dataclass(frozen=True, eq=False)
class OnlineRows:
    """The online row of each key of a history, in the order of `History.keys`.

    Attributes:
        present: True if the store has a row for the key.
        event: event time in microseconds; 0 without a row.
        cells: encoded values by feature.
        unknown: number of online keys that the source lacks; 0 if only some keys were read.
    """

    present: Mask
    event: Ints
    cells: Cells
    unknown: int = 0


@dataclass(frozen=True, eq=False)
class Difference:
    """Keys whose online row differs from the source for one cause.

    Attributes:
        kind: the symptom, such as "stale".
        cause: its explanation, a key of `CAUSES`.
        keys: indices in `History.keys`.
        features: number of keys with a difference, by feature; empty if whole rows differ.
    """

    kind: str
    cause: str
    keys: Ints
    features: dict[str, int]


def compare(
    history: History, online: OnlineRows, ttl: int | None, now: int, rounded: Rounded
) -> tuple[dict[str, int], list[Difference]]:
    """Compare each key's latest row with its online row. `ttl` is in microseconds; None if rows never expire.

    Return the number of keys whose online value differs, by feature, and the differences with their causes.
    """
    keys, resolution = np.flatnonzero(online.present), history.resolution
    expired = np.zeros(len(history), bool) if ttl is None else now - history.event[history.latest] > ttl
    cells = {name: values.take(keys) for name, values in online.cells.items()}
    event, target = online.event[keys], history.latest[keys]
    exact, timed = history.find(keys, event, cells)
    # Any of several rows with the same times is right. The audit reports them as a tie.
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
    """Explain online values that differ from the source row with the same key and time, at the places `base`."""
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
