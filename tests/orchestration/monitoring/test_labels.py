"""Labels of answers, against an oracle that looks at every row."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from isthmus.orchestration.monitoring.labels import CODES, Without, clock_went_back, match_labels, nearest_answers

TIME = pa.timestamp("us", tz="UTC")
KEYS = st.sampled_from(["a", "b", None])
MOMENTS = st.integers(0, 12)
NOW, WITHIN = 10, 2

LABELS = st.lists(st.tuples(KEYS, MOMENTS, MOMENTS, st.sampled_from([0, 1, None])), max_size=12)
ANSWERS = st.lists(st.tuples(KEYS, MOMENTS), min_size=1, max_size=8)


def spine(rows: list[tuple[Any, ...]]) -> pa.Table:
    key, event, known, label = zip(*rows, strict=True) if rows else ((),) * 4
    columns = {
        "key": pa.array(key, pa.string()),
        "event_timestamp": pa.array(event, pa.int64()).cast(TIME),
        "known_at": pa.array(known, pa.int64()).cast(TIME),
        "late": pa.array(label, pa.int64()),
    }
    return pa.table(columns)


def naively(rows: list[tuple[Any, ...]], key: Any, at: int) -> int | Without:
    """The label of an answer, by the rule and nothing else."""
    own = [row for row in rows if row[0] == key and abs(row[1] - at) <= WITHIN]
    if not own:
        return Without.UNMATCHED
    moment = min((abs(row[1] - at), row[1]) for row in own)[1]
    labels = {row[2:] for row in own if row[1] == moment and row[3] is not None}
    if any(known <= at for known, _ in labels):
        return Without.EARLY
    known = {pair for pair in labels if pair[0] <= NOW}
    if not known:
        return Without.LATE
    last = [label for known_at, label in known if known_at == max(known)[0]]
    return last[0] if len(last) == 1 else Without.SEVERAL


@given(LABELS, ANSWERS)
def test_the_label_of_an_answer_is_that_of_the_rule(
    rows: list[tuple[Any, ...]], answers: list[tuple[Any, int]]
) -> None:
    table = spine(rows)
    asked = pa.table({"key": pa.array([key for key, _ in answers], pa.string())})
    at = np.array([moment for _, moment in answers], np.int64)
    found = match_labels(table, "late", asked, at, tolerance=WITHIN, now=NOW)
    codes = {code: why for why, code in CODES.items()}
    labels = table["late"].to_pylist()
    for place, (key, moment) in enumerate(answers):
        said = codes[found.why[place]] if found.row[place] < 0 else labels[found.row[place]]
        assert said == naively(rows, key, moment)


def test_of_answers_to_one_moment_the_nearest_counts_and_of_several_the_first() -> None:
    table = spine([("a", 5, 9, 1), ("a", 8, 9, 0)])
    at = np.array([3, 4, 6, 8])
    found = match_labels(table, "late", pa.table({"key": pa.array(["a"] * 4)}), at, tolerance=WITHIN, now=NOW)
    assert nearest_answers(found, at).tolist() == [False, True, False, True]


def test_a_clock_that_went_back_makes_moments_that_it_had_twice() -> None:
    minute = 60_000_000
    at = np.array([0, 10, 20, 5, 15, 30]) * minute
    run = np.zeros(6, np.int64)
    assert clock_went_back(run, np.arange(6), at).tolist() == [False, True, True, True, True, False]
    # Another process has a clock, too; and a slow request is no step.
    assert not clock_went_back(np.array([0, 0, 0, 1, 1, 0]), np.arange(6), at).any()
    assert not clock_went_back(run[:2], np.arange(2), np.array([minute, 1])).any()
