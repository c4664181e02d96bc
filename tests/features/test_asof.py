"""The NumPy core against the oracle of the time rule, on plain integers."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.asof import Block, Questions, Tie

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
MOMENTS = st.integers(-4, 4) | st.sampled_from([LEAST, LEAST + 1, -(1 << 62), 1 << 62, GREATEST - 1, GREATEST])
KEYS = st.tuples(st.integers(0, 2), st.sampled_from(["", "a", "aa"]))
ROWS = st.lists(st.tuples(KEYS, MOMENTS, MOMENTS, st.integers(0, 2)), max_size=12)
QUESTIONS = st.lists(st.tuples(st.none() | KEYS, MOMENTS), max_size=12)


def _columns(keys: list[Any], *, dictionaries: bool) -> list[pa.ChunkedArray]:
    numbers = pa.chunked_array([[key and key[0] for key in keys]], pa.int64())
    texts = pa.chunked_array([[key and key[1] for key in keys]], pa.string())
    return [numbers, texts.dictionary_encode() if dictionaries else texts]


def _since(row: Any, delay: int) -> int:
    """When a row answers, if each takes so long, at most, to become readable."""
    event, known, content = map(int, row[1:])
    return min(max(event, known) + delay * content, GREATEST)


def _block(rows: list[Any], first: int, *, content: bool, dictionaries: bool, delay: int = 0) -> Block:
    keys, event, known, hashes = zip(*rows, strict=True) if rows else ((), (), (), ())
    usable = [_since(row, delay) for row in rows]
    numbers = [np.array(column, np.int64) for column in (event, known, hashes, usable)]
    place = np.arange(first, first + len(rows))
    return Block(_columns(list(keys), dictionaries=dictionaries), numbers[0], numbers[1], numbers[3], place,
                 numbers[2] if content else None)  # fmt: skip


@given(ROWS, QUESTIONS, st.lists(st.integers(0, 12), max_size=3), st.booleans(), st.sampled_from([0, 2]))
def test_answers_are_the_time_rule_in_whatever_blocks_the_rows_come(
    rows: list[Any], asked: list[Any], cuts: list[int], dictionaries: bool, delay: int
) -> None:
    at = np.array([moment for _, moment in asked], np.int64)
    questions = Questions(_columns([key for key, _ in asked], dictionaries=False), at)
    ends = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for first, end in pairwise(ends):
        questions.offer(_block(rows[first:end], first, content=True, dictionaries=dictionaries, delay=delay))
    places, events = questions.answers()
    for n, (key, moment) in enumerate(asked):
        own = [clock.Row(row[1], row[2], row[3], ()) for row in rows if row[0] == key and _since(row, delay) <= moment]
        winner, _ = clock.as_of(own, moment, None)
        if winner is None:
            assert places[n] == -1
        else:
            assert rows[places[n]] == (key, winner.event, winner.known, winner.content)
            assert events[n] == winner.event


@given(ROWS, QUESTIONS, st.integers(0, 12))
def test_without_content_rows_that_only_it_can_tell_apart_are_refused(
    rows: list[Any], asked: list[Any], cut: int
) -> None:
    keys, at = _columns([key for key, _ in asked], dictionaries=False), np.array([m for _, m in asked], np.int64)
    exact, quick = Questions(keys, at), Questions(keys, at)
    for first, end in ((0, min(cut, len(rows))), (min(cut, len(rows)), len(rows))):
        exact.offer(_block(rows[first:end], first, content=True, dictionaries=False))
        try:
            quick.offer(_block(rows[first:end], first, content=False, dictionaries=False))
        except Tie:
            times = [(key, event, known) for key, event, known, _ in rows]
            assert len(set(times)) < len(times)
            return
    assert [part.tolist() for part in quick.answers()] == [part.tolist() for part in exact.answers()]


def test_two_rows_with_the_same_key_and_times_are_a_tie() -> None:
    rows = [((1, "a"), 0, 0, 5), ((1, "a"), 0, 0, 6)]
    asked = _columns([(1, "a")], dictionaries=False)
    with pytest.raises(Tie):
        Questions(asked, np.array([0])).offer(_block(rows, 0, content=False, dictionaries=False))
    apart = Questions(asked, np.array([0]))
    apart.offer(_block(rows[:1], 0, content=False, dictionaries=False))
    with pytest.raises(Tie):
        apart.offer(_block(rows[1:], 1, content=False, dictionaries=False))


def test_many_sparse_composite_keys_stay_apart() -> None:
    chance = np.random.default_rng(0)
    parts = [chance.integers(-(1 << 60), 1 << 60, 9000) for _ in range(3)]
    keys = [pa.chunked_array([part]) for part in parts]
    at = np.full(9000, 10)
    questions = Questions(keys, at)
    order = chance.permutation(9000)
    zeros, ones = np.zeros(9000, np.int64), np.ones(9000, np.int64)
    shuffled = [pa.chunked_array([part[order]]) for part in parts]
    questions.offer(Block(shuffled, zeros, zeros, zeros, np.arange(9000)))
    strangers = [shuffled[0], shuffled[1], pa.chunked_array([np.roll(parts[2][order], 1)])]
    questions.offer(Block(strangers, ones, ones, ones, np.arange(9000, 18000)))
    places, _ = questions.answers()
    assert order[places].tolist() == list(range(9000))
