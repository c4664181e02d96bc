"""The texts of a training set."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.distill.causal.tokenizer import Vocabulary
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
        """Return the texts of the named input, or of the only text input.

        Raises:
            ConfigurationError: the student has no such input, or has several texts.
            DataError: a text is missing or empty, or a label is neither 0 nor 1.
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
        """Return distinct first words of a few texts, at most `most` tokens each."""
        prompts: dict[str, None] = {}
        for row in rows.tolist():
            prompts[_beginning(self.texts[row], vocabulary, most)] = None
            if len(prompts) == PROMPTS:
                break
        return (*prompts,)

    def require_tokens(self, tokens: Sequence[Sequence[int]], begin: int) -> None:
        """Raise a DataError if a text has no token besides the `begin` tokens before it."""
        if empty := [row for row, text in enumerate(tokens) if len(text) == begin]:
            found = f"{len(empty):,} texts have no tokens, the first in row {empty[0]}"
            raise DataError(self.where, found, expected="at least one token per text")


def _beginning(text: str, vocabulary: Vocabulary, most: int) -> str:
    words = [match.end() for match in islice(re.finditer(r"\S+", text), WORDS)]
    for end in reversed(words):
        if len(vocabulary.tokens([text[:end]])[0]) <= most:
            return text[:end]
    return text[: max(1, most // LETTER)]
