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
"""Texts whose first words are prompts; how many words; the most tokens of a letter, which has so many bytes."""


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of all rows, and which are of the domain, bool (rows,)."""

    texts: Sequence[str]
    domain: Array
    where: str

    @classmethod
    def of(cls, material: Material, name: str | None) -> "Texts":
        """The texts of the input of this name, or of the only one.

        Raises:
            ConfigurationError: the student has no such input, or several texts.
            DataError: a text is missing or empty, or a label is neither 0 nor 1.
        """
        where = material.declaration.where
        known = [item.name for item in material.student_inputs if item.dtype == String]
        chosen = known if name is None else [each for each in known if each == name]
        if len(chosen) != 1:
            found = repr(name) if name else f"the student has {len(known)} texts"
            problem = Problem("text", found, one_of(known) if known else "an input of type String")
            raise ConfigurationError(f"{where}: task", [problem])
        (name,) = chosen
        texts: list[Any] = required_column(material.table, name, "the texts").to_pylist()
        if empty := [row for row, text in enumerate(texts) if not text.strip()]:
            raise DataError(
                f"{where}: column {name}",
                f"{len(empty):,} empty texts, the first in row {empty[0]}",
                expected="texts",
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
        """The first words of some of these texts, of at most so many tokens, each once."""
        found: dict[str, None] = {}
        for row in rows.tolist():
            found[_beginning(self.texts[row], vocabulary, most)] = None
            if len(found) == PROMPTS:
                break
        return (*found,)

    def require_tokens(self, tokens: Sequence[Sequence[int]], begin: int) -> None:
        """Raises a DataError if the tokenizer makes nothing of a text, before which it puts so many tokens."""
        if none := [row for row, text in enumerate(tokens) if len(text) == begin]:
            found = f"the tokenizer makes no token of {len(none):,} texts, the first in row {none[0]}"
            raise DataError(self.where, found, expected="at least one token in each")


def _beginning(text: str, vocabulary: Vocabulary, most: int) -> str:
    words = [found.end() for found in islice(re.finditer(r"\S+", text), WORDS)]
    for end in reversed(words):
        if len(vocabulary.tokens([text[:end]])[0]) <= most:
            return text[:end]
    return text[: max(1, most // LETTER)]
