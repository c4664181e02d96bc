"""Match answers with rows of a spine, and select the labels that count. `Without`: why an answer has no label."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Ints, Mask
from isthmus.orchestration.recording.nearest import closest, nearest_per_match, number_rows

_NEVER = np.iinfo(np.int64).max
EVENT, KNOWN = "event_timestamp", "known_at"


class Without(StrEnum):
    """Reasons why an answer has no label that counts. If several apply, the first in this order is reported."""

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
class LabelMatches:
    """Labels of n answers. Each attribute has shape (n,).

    Attributes:
        row: index of the spine's row whose label counts; -1 if no label counts.
        distance: microseconds from the answer to the nearest event time with equal columns.
        why: code, in `CODES`, of the reason why no label counts; -1 if a label counts.
    """

    row: Ints
    distance: Ints
    why: Ints


CODES: Mapping[Without, int] = {why: code for code, why in enumerate(Without)}


def match_labels(spine: pa.Table, label: str, answers: pa.Table, at: Ints, *, tolerance: int, now: int) -> LabelMatches:
    """Find the label of each recorded answer: the row of `spine` with equal columns that is nearest in time.

    All columns of `answers` are compared. `at` has the time of each answer in microseconds since 1970 UTC. The event
    time of the row is at most `tolerance` microseconds from it; in a tie, the earlier time wins. If several rows have
    that time, the one whose label became known last, but not after `now` (microseconds since 1970 UTC), is used. An
    answer has no label if two such rows became known together, or if a label for that time was already known when the
    answer was given. `label` is the name of the label column.
    """
    rows = _distinct(spine.select(list(dict.fromkeys([*answers.column_names, EVENT, KNOWN, label]))))
    event = micros(rows[EVENT])
    known = np.where(pc.is_valid(rows[label]).to_numpy(), micros(rows[KNOWN]), _NEVER)
    number = number_rows(rows.select(answers.column_names), answers)
    own, query = number[: len(rows)], number[len(rows) :]
    order = np.lexsort((known, event, own))
    own, event, known = own[order], event[order], known[order]
    first = np.flatnonzero(np.append(True, (np.diff(own) != 0) | (np.diff(event) != 0))[: len(own)])
    moment, distance = closest(own[first], event[first], query, at)
    near = (moment >= 0) & (distance <= tolerance)
    moment = np.where(near, moment, -1)
    if not len(first):
        none = np.full(len(at), -1)
        return LabelMatches(none, distance, np.full(len(at), CODES[Without.UNMATCHED]))
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
    return LabelMatches(np.where(why < 0, places, -1), distance, why)


def _distinct(rows: pa.Table) -> pa.Table:
    number = number_rows(rows)
    first = np.unique(number, return_index=True)[1]
    return rows if len(first) == len(rows) else rows.take(pa.array(np.sort(first)))


def _places(spine: pa.Table, rows: pa.Table) -> Ints:
    number = number_rows(spine.select(rows.column_names))
    return np.sort(np.unique(number, return_index=True)[1])


def clock_went_back(run: Ints, sequence: Ints, at: Ints, slack: int = 60_000_000) -> Mask:
    """Mark answers whose time is ambiguous because the clock of their server was set back, so that they get no label.

    Each answer has the index of its server process in `run`, its sequence number in that process in `sequence`, and its
    time in `at`, in microseconds since 1970 UTC. Backward steps of up to `slack` microseconds are ignored: a slow
    request ends after faster ones that began later.
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


def nearest_answers(matches: LabelMatches, at: Ints) -> Mask:
    return nearest_per_match(np.where(matches.why < 0, matches.row, -1), matches.distance, at)
