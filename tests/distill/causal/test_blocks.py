from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.causal.texts import Blocks, pack, select_replay
from isthmus.distill.losses.logits import IGNORED
from isthmus.features.errors import DataError

END = 99
TEXTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


def blocks(texts: Sequence[Sequence[int]], context: int, *, cut: bool = True) -> Blocks:
    return pack(texts, np.arange(len(texts)), context, END, cut=cut, where="writer")


@given(TEXTS, st.integers(2, 9))
def test_what_is_cut_is_a_stream_that_was_folded(texts: list[list[int]], context: int) -> None:
    stream = [(token, place, row) for row, text in enumerate(texts) for place, token in enumerate([*text, END])]
    found = blocks(texts, context)
    assert len(found) == -(-len(stream) // context)
    begun = 0
    for number, (token, place, row) in enumerate(stream):
        block, column = divmod(number, context)
        begun = place if place == 0 or column == 0 else begun
        assert found.tokens[block, column] == token
        assert found.positions[block, column] == place - begun
        ended = number + 1 == len(stream) or stream[number + 1][2] != row
        assert found.targets[block, column] == (IGNORED if ended else stream[number + 1][0])
        assert column or found.first[block] == row
    assert (found.targets.ravel()[len(stream) :] == IGNORED).all()


@given(TEXTS, st.integers(13, 20))
def test_what_is_not_cut_is_whole(texts: list[list[int]], context: int) -> None:
    found, row = blocks(texts, context, cut=False), 0
    for tokens, targets, first in zip(found.tokens.tolist(), found.targets.tolist(), found.first.tolist(), strict=True):
        assert first == row
        left = tokens
        while row < len(texts) and left[: len(texts[row]) + 1] == [*texts[row], END]:
            left, row = left[len(texts[row]) + 1 :], row + 1
        assert left == [END] * len(left)
        assert row == len(texts) or len(left) <= len(texts[row])
        assert all(target == IGNORED for target in targets[context - len(left) :])
    assert row == len(texts)


def test_a_text_longer_than_the_context_is_refused_if_it_cannot_be_cut() -> None:
    assert len(blocks([[1] * 7], 8, cut=False)) == 1
    with pytest.raises(DataError, match="the text of row 1 has 8 tokens; expected at most 7 and the end token"):
        blocks([[1], [1] * 8], 8, cut=False)


@pytest.mark.parametrize(("replay", "count"), [(0.5, 6), (0.25, 2), (0.1, 1), (0, 0)])
def test_general_blocks_have_their_share(replay: float, count: int) -> None:
    domain, general = blocks([[1] * 5] * 6, 6), blocks([[2] * 5] * 7, 6)
    found = select_replay(domain, general, replay, "writer")
    assert len(found) == count
    assert (found.tokens[:, 0] == 2).all()


def test_too_few_general_texts_are_refused() -> None:
    domain, general = blocks([[1] * 5] * 6, 6), blocks([[2] * 5] * 2, 6)
    with pytest.raises(DataError, match="2 blocks of general texts beside 6 of the domain; expected at least 6"):
        select_replay(domain, general, 0.5, "writer")
