"""The NumPy core against the oracle of the time rule, on plain integers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.pointintime.asof import AsOfQueries
from isthmus.features.values.columns import Ints

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
MOMENTS = st.integers(-4, 4) | st.sampled_from([LEAST, LEAST + 1, -(1 << 62), 1 << 62, GREATEST - 1, GREATEST])
KEYS = st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "aa"]))
ROWS = st.lists(st.tuples(KEYS, MOMENTS, MOMENTS, st.integers(0, 2)), max_size=12)
QUESTIONS = st.lists(st.tuples(st.none() | KEYS, MOMENTS), max_size=12)


def _columns(keys: list[Any], *, dictionaries: bool) -> list[pa.ChunkedArray]:
    numbers = pa.chunked_array([[key and key[0] for key in keys]], pa.int64())
    texts = pa.chunked_array([[key and key[1] for key in keys]], pa.string())
    return [numbers, texts.dictionary_encode() if dictionaries else texts]


def _offer(questions: AsOfQueries, rows: list[Any], first: int, *, dictionaries: bool = False) -> None:
    keys, event, known, _ = zip(*rows, strict=True) if rows else ((), (), (), ())
    columns = _columns(list(keys), dictionaries=dictionaries)
    questions.offer(columns, np.array(event, np.int64), np.array(known, np.int64), first)


def _content(rows: list[Any]) -> Callable[[Ints], Ints]:
    """The content hashes of rows by their places, and a check that they are asked for as promised."""

    def content(places: Ints) -> Ints:
        assert (np.diff(places) > 0).all()
        own = [rows[place] for place in places]
        # Each of them has key and times of another one.
        assert all(sum(other[:3] == row[:3] for other in own) > 1 for row in own)
        return np.array([row[3] for row in own], np.int64)

    return content


@given(ROWS, QUESTIONS, st.lists(st.integers(0, 12), max_size=3), st.booleans())
@example([((0, ""), 0, 2, 0)], [((0, ""), 1)], [], False)  # not known yet
@example([((0, ""), 2, 0, 0)], [((0, ""), 1)], [], False)  # known, and not true yet
@example([((0, ""), 1, 1, 0)], [((0, ""), 1)], [], False)  # at that moment
def test_answers_are_the_time_rule_in_whatever_blocks_the_rows_come(
    rows: list[Any], asked: list[Any], cuts: list[int], dictionaries: bool
) -> None:
    at = np.array([moment for _, moment in asked], np.int64)
    questions = AsOfQueries(_columns([key for key, _ in asked], dictionaries=False), at, _content(rows))
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for first, end in pairwise(ends):
        _offer(questions, rows[first:end], first, dictionaries=dictionaries)
    places, events = questions.answers()
    for n, (key, moment) in enumerate(asked):
        own = [clock.Row(row[1], row[2], row[3], ()) for row in rows if row[0] == key]
        winner, _ = clock.as_of(own, moment, None)
        if winner is None:
            assert places[n] == -1
        else:
            assert rows[places[n]] == (key, winner.event, winner.known, winner.content)
            assert events[n] == winner.event


def test_of_rows_with_the_same_key_and_times_the_content_decides() -> None:
    rows = [((1, "a"), 0, 0, 6), ((1, "a"), 0, 0, 5), ((1, "a"), 0, 0, 7)]
    for cut in range(4):
        questions = AsOfQueries(_columns([(1, "a")], dictionaries=False), np.array([0]), _content(rows))
        _offer(questions, rows[:cut], 0)
        _offer(questions, rows[cut:], cut)
        assert questions.answers()[0].tolist() == [2]


def test_many_sparse_composite_keys_stay_apart() -> None:
    chance = np.random.default_rng(0)
    parts = [chance.integers(-(1 << 60), 1 << 60, 9000) for _ in range(3)]
    questions = AsOfQueries([pa.chunked_array([part]) for part in parts], np.full(9000, 10), _content([]))
    order = chance.permutation(9000)
    zeros, ones = np.zeros(9000, np.int64), np.ones(9000, np.int64)
    shuffled = [pa.chunked_array([part[order]]) for part in parts]
    questions.offer(shuffled, zeros, zeros, 0)
    strangers = [shuffled[0], shuffled[1], pa.chunked_array([np.roll(parts[2][order], 1)])]
    questions.offer(strangers, ones, ones, 9000)
    places, _ = questions.answers()
    assert order[places].tolist() == list(range(9000))
