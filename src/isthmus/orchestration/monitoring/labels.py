"""Which row of a spine each answer was about, and which label of it counts by now."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Ints, Mask
from isthmus.orchestration.recording.nearest import closest, first_of_each, identities

_NEVER = np.iinfo(np.int64).max
EVENT, KNOWN = "event_timestamp", "known_at"


class Without(StrEnum):
    """Why an answer has no label that counts, in the order in which it is asked."""

    FUTURE = "its moment is still to come"
    CLOCK = "the clock of its server went back"
    SCORE = "the model had no answer"
    UNREAD = "its request cannot be read any more"
    UNMATCHED = "no label has its keys, fields and moment"
    EARLY = "its label was known before the answer"
    LATE = "its label is not known yet"
    SEVERAL = "several labels have its keys, fields and moment"
    AGAIN = "another answer was nearer to the moment of its label"


@dataclass(frozen=True)
class Found:
    """For each of n answers, shape (n,) each.

    Attributes:
        row: of the spine, whose label counts; -1 without one.
        apart: microseconds between the nearest moment and the answer.
        why: there is no row, as the place of a `Without`; -1 where there is one.
    """

    row: Ints
    apart: Ints
    why: Ints


CODES: Mapping[Without, int] = {why: code for code, why in enumerate(Without)}


def find(spine: pa.Table, label: str, answers: pa.Table, at: Ints, *, within: int, now: int) -> Found:
    """The labels of answers: of the spine's rows with the same columns as `answers`, and by its moments.

    The moment of a row that is nearest to that of the answer counts, of two as near the earlier. Of several rows of it,
    the one that became known last by `now`; if that is several, none. A label of which any row was known by the moment
    of the answer is no label of it: the answer may have rested on it.
    """
    rows = _distinct(spine.select(list(dict.fromkeys([*answers.column_names, EVENT, KNOWN, label]))))
    event = micros(rows[EVENT])
    known = np.where(pc.is_valid(rows[label]).to_numpy(), micros(rows[KNOWN]), _NEVER)
    number = identities(rows.select(answers.column_names), answers)
    own, wanted = number[: len(rows)], number[len(rows) :]
    order = np.lexsort((known, event, own))
    own, event, known = own[order], event[order], known[order]
    first = np.flatnonzero(np.append(True, (np.diff(own) != 0) | (np.diff(event) != 0))[: len(own)])
    moment, apart = closest(own[first], event[first], wanted, at)
    near = (moment >= 0) & (apart <= within)
    moment = np.where(near, moment, -1)
    if not len(first):
        none = np.full(len(at), -1)
        return Found(none, apart, np.full(len(at), CODES[Without.UNMATCHED]))
    begin, end = first[moment], np.append(first, len(own))[moment + 1]
    counts = np.append(0, np.cumsum(known <= now))
    last = begin + (counts[end] - counts[begin]) - 1
    late = last < begin
    last = np.maximum(last, begin)
    several = (last > begin) & (known[last] == known[last - 1])
    why = np.full(len(at), -1)
    for code, holds in (
        (Without.SEVERAL, several), (Without.LATE, late), (Without.EARLY, known[begin] <= at),
        (Without.UNMATCHED, ~near),
    ):  # fmt: skip
        why[holds] = CODES[code]
    places = _places(spine, rows)[order[last]] if len(rows) < len(spine) else order[last]
    return Found(np.where(why < 0, places, -1), apart, why)


def _distinct(rows: pa.Table) -> pa.Table:
    number = identities(rows)
    first = np.unique(number, return_index=True)[1]
    return rows if len(first) == len(rows) else rows.take(pa.array(np.sort(first)))


def _places(spine: pa.Table, rows: pa.Table) -> Ints:
    """Of each of the distinct rows the place of the first like it in the spine."""
    number = identities(spine.select(rows.column_names))
    return np.sort(np.unique(number, return_index=True)[1])


def clock_went_back(run: Ints, sequence: Ints, at: Ints, slack: int = 60_000_000) -> Mask:
    """Answers of a moment that their server's clock has had twice: which of both was right nobody can tell.

    `run` are the numbers of processes, within which answers have a `sequence`. A slow request is of an earlier moment
    than what was answered meanwhile, so steps of less than `slack` microseconds are not seen.
    """
    twice = np.zeros(len(at), bool)
    order = np.lexsort((sequence, run))
    starts = np.flatnonzero(np.append(True, np.diff(run[order]) != 0)[: len(order)])
    for part in np.split(order, starts[1:]):
        moments = at[part]
        if not len(moments):
            continue
        before = np.maximum.accumulate(moments)
        after = np.minimum.accumulate(moments[::-1])[::-1]
        twice[part] = (moments < before - slack) | (moments > after + slack)
    return twice


def nearest_answers(found: Found, at: Ints) -> Mask:
    """Of the answers of a model to the moment of one label, the nearest, and of several the first in time and place."""
    return first_of_each(np.where(found.why < 0, found.row, -1), found.apart, at)
