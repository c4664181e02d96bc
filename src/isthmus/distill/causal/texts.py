"""The texts of a training set, and their tokens in blocks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from isthmus.distill.causal.tokenizer import Vocabulary
from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.tasks.split import required_column, whole_numbers
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Array, Index
from isthmus.features.errors import ConfigurationError, DataError, Problem, one_of
from isthmus.features.types import String

PROMPTS, WORDS, LETTER = 3, 6, 4
"""Number of prompts, words per prompt, and the most tokens that one letter can become (its UTF-8 bytes)."""


@dataclass(frozen=True, eq=False)
class Texts:
    """All texts of a training set; `domain`, bool (rows,), is True for texts of the domain."""

    texts: Sequence[str]
    domain: Array
    where: str

    @classmethod
    def of(cls, material: Material, name: str | None) -> "Texts":
        """Read the texts and their labels from a training set, to train a language model.

        A label is 1 for a text of the domain and 0 for a general text. `name` is the input that holds the texts; None
        means the only input of type String. Raises a ConfigurationError if the student does not have this input, or if
        `name` is None and the student does not have exactly one text input. Raises a DataError if a text is missing or
        empty, or if a label is neither 0 nor 1.
        """
        where = material.declaration.where
        inputs = [item.name for item in material.student_inputs if item.dtype == String]
        chosen = inputs if name is None else [each for each in inputs if each == name]
        if len(chosen) != 1:
            found = repr(name) if name else f"the student has {len(inputs)} text inputs"
            problem = Problem("text", found, one_of(inputs) if inputs else "an input of type String")
            raise ConfigurationError(f"{where}: task", [problem])
        (name,) = chosen
        texts: list[Any] = required_column(material.table, name, "the texts").to_pylist()
        if empty := [row for row, text in enumerate(texts) if not text.strip()]:
            raise DataError(
                f"{where}: column {name}",
                f"{len(empty):,} empty texts, the first in row {empty[0]}",
                expected="non-empty texts",
                remedy="leave these rows out of the spine",
            )
        labels = whole_numbers(material.table, material.label, pa.int64())
        if wrong := [row for row, label in enumerate(labels.tolist()) if label not in (0, 1)]:
            raise DataError(
                f"{where}: label {material.label}",
                f"{len(wrong):,} values such as {labels[wrong[0]]}",
                expected="1 for a text of the domain, 0 for a general one",
            )
        return cls(texts, np.asarray(labels == 1), f"{where}: column {name}")

    def beginnings(self, vocabulary: Vocabulary, rows: Index, most: int) -> tuple[str, ...]:
        prompts: dict[str, None] = {}
        for row in rows.tolist():
            prompts[_beginning(self.texts[row], vocabulary, most)] = None
            if len(prompts) == PROMPTS:
                break
        return (*prompts,)

    def require_tokens(self, tokens: Sequence[Sequence[int]], begin: int) -> None:
        if empty := [row for row, text in enumerate(tokens) if len(text) == begin]:
            found = f"{len(empty):,} texts have no tokens, the first in row {empty[0]}"
            raise DataError(self.where, found, expected="at least one token per text")


def _beginning(text: str, vocabulary: Vocabulary, most: int) -> str:
    words = [match.end() for match in islice(re.finditer(r"\S+", text), WORDS)]
    for end in reversed(words):
        if len(vocabulary.tokens([text[:end]])[0]) <= most:
            return text[:end]
    return text[: max(1, most // LETTER)]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Packed texts, each followed by an end token: `tokens`, `positions` and `targets`, int64 (n, context).

    `positions` count from 0 where a text begins, and where it continues from the previous block. `targets` are the next
    tokens; IGNORED at the end of a text and in padding. `first`, int64 (n,), is the training set row of the first text
    in each block.
    """

    tokens: Index
    positions: Index
    targets: Index
    first: Index

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, count: int) -> "Blocks":
        return Blocks(self.tokens[:count], self.positions[:count], self.targets[:count], self.first[:count])


def concatenate(parts: Sequence[Blocks]) -> Blocks:
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


def pack(texts: Sequence[Sequence[int]], rows: Index, context: int, end: int, *, cut: bool, where: str) -> Blocks:
    """Pack texts into blocks of equal length for training, in order, with the token `end` after each text.

    Args:
        texts: token ids of each text.
        rows: row number of each text in the training set, for messages and for the result.
        context: number of tokens per block.
        end: token that ends a text; also fills the rest of a block, which then does not count in the loss.
        cut: True if a text may continue in the next block, where the model does not see its beginning. False to start a
            new block if the next text does not fit.
        where: name of the declaration in error messages.

    Raises:
        DataError: `cut` is False, and a text is longer than a block.
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


def select_replay(domain: Blocks, general: Blocks, replay: float, where: str) -> Blocks:
    count = round(len(domain) * replay / (1 - replay))
    if len(general) < count:
        raise DataError(
            where,
            f"{len(general):,} blocks of general texts beside {len(domain):,} of the domain",
            expected=f"at least {count:,}, for a replay of {replay:g}",
            remedy="add texts with the label 0, or set a smaller replay",
        )
    return general.take(count)
