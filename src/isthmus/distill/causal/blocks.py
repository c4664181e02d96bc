"""Texts as blocks of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.types import Index
from isthmus.features.errors import DataError


@dataclass(frozen=True, eq=False)
class Blocks:
    """Packed texts, each followed by an end token.

    Attributes:
        tokens: int64 (n, context).
        positions: int64 (n, context), position of each token in its text. 0 where a text begins, or continues from the
            block before.
        targets: int64 (n, context), the next token; IGNORED at the end of a text and in padding.
        first: int64 (n,), index of the first text of each block.
    """

    tokens: Index
    positions: Index
    targets: Index
    first: Index

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, count: int) -> "Blocks":
        return Blocks(self.tokens[:count], self.positions[:count], self.targets[:count], self.first[:count])


def together(parts: Sequence[Blocks]) -> Blocks:
    return Blocks(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.targets for part in parts]),
        np.concatenate([part.first for part in parts]),
    )


class _Block(NamedTuple):
    tokens: list[int]
    positions: list[int]
    targets: list[int]
    first: int


def packed(texts: Sequence[Sequence[int]], rows: Index, context: int, end: int, *, cut: bool, where: str) -> Blocks:
    """Pack texts into blocks, in order.

    Each text is followed by the token `end`, which the model learns to predict. The next text in the block does not
    attend to it and is not predicted from it. A text that is cut continues in the next block: its next token is
    predicted at the end of the block before, and the continuation does not see that block.

    Args:
        texts: tokens of each text, at least one.
        rows: int64, index of each text.
        context: tokens of a block.
        end: token that ends a text.
        cut: True to cut texts; if False, a block is padded where the next text does not fit.
        where: place named in messages.

    Raises:
        DataError: a text that may not be cut is longer than a block.
    """
    blocks = [_Block([], [], [], -1)]
    for row, text in zip(rows.tolist(), texts, strict=True):
        left = [*text, end]
        if not cut and len(left) > context:
            raise DataError(
                where,
                f"the text of row {row} has {len(text):,} tokens",
                expected=f"at most {context - 1:,} and the end token, in a context of {context:,}",
                remedy="shorten the text, set a larger context, or cut=True",
            )
        if not cut and len(blocks[-1].tokens) + len(left) > context:
            blocks.append(_Block([], [], [], -1))
        while left:
            if len(blocks[-1].tokens) == context:
                blocks.append(_Block([], [], [], -1))
            room = context - len(blocks[-1].tokens)
            piece, left = left[:room], left[room:]
            blocks[-1].tokens.extend(piece)
            blocks[-1].positions.extend(range(len(piece)))
            blocks[-1].targets.extend([*piece[1:], left[0] if left else IGNORED])
            if blocks[-1].first < 0:
                blocks[-1] = blocks[-1]._replace(first=row)
    blocks = [block for block in blocks if block.tokens]
    for block in blocks:
        room = context - len(block.tokens)
        block.tokens.extend([end] * room)
        block.positions.extend(range(room))
        block.targets.extend([IGNORED] * room)
    tokens, positions, targets = (
        np.array([block[part] for block in blocks], np.int64).reshape(len(blocks), context) for part in range(3)
    )
    return Blocks(tokens, positions, targets, np.array([block.first for block in blocks], np.int64))


def replayed(domain: Blocks, general: Blocks, replay: float, where: str) -> Blocks:
    """Return enough of the general blocks to make up the share `replay` of all training blocks.

    Raises:
        DataError: there are not enough general blocks.
    """
    count = round(len(domain) * replay / (1 - replay))
    if len(general) < count:
        raise DataError(
            where,
            f"{len(general):,} blocks of general texts beside {len(domain):,} of the domain",
            expected=f"at least {count:,}, for a replay of {replay:g}",
            remedy="add texts with the label 0, or set a smaller replay",
        )
    return general.take(count)
