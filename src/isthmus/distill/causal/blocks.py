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
    """Texts that were packed, each ended by a token of its own.

    Attributes:
        tokens: int64 (n, context).
        positions: int64 (n, context): of each token in its text. Where it is 0, a text begins, or goes on that was cut.
        targets: int64 (n, context): the next token; IGNORED at the end of a text, and where a block is filled up.
        first: int64 (n,): the number of the first text of each block.
    """

    tokens: Index
    positions: Index
    targets: Index
    first: Index

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, count: int) -> "Blocks":
        """The first of them."""
        return Blocks(self.tokens[:count], self.positions[:count], self.targets[:count], self.first[:count])


def together(parts: Sequence[Blocks]) -> Blocks:
    """All blocks of the parts, one part after the other."""
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
    """The blocks of the texts, in their order.

    A text ends with the token `end`, which is learned. What follows does not attend to it, and is not predicted from
    it. A text that is cut goes on in the next block: its next token is predicted at the end of the block before, and
    what comes after sees nothing of that block.

    Args:
        texts: tokens of each, at least one.
        rows: int64, the number of each text.
        context: tokens of a block.
        end: the token that ends a text.
        cut: whether a text may be cut; if not, a block is filled up where the next text does not fit.
        where: for messages.

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
                expected=f"at most {context - 1:,}, and the one that ends it, in a context of {context:,}",
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
    """As many of the general blocks as their share of both says.

    Raises:
        DataError: there are too few.
    """
    wanted = round(len(domain) * replay / (1 - replay))
    if len(general) < wanted:
        raise DataError(
            where,
            f"{len(general):,} blocks of general texts beside {len(domain):,} of the domain",
            expected=f"at least {wanted:,}, for a replay of {replay:g}",
            remedy="add texts with the label 0, or set a smaller replay",
        )
    return general.take(wanted)
