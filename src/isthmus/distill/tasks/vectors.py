"""Parts of tasks whose students learn a teacher's vectors, of texts or of images: losses, and a search as quality."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from isthmus.distill.evaluation.metrics import NEAREST, retrieval
from isthmus.distill.losses.embeddings import cosine, info_nce
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.ranking import lists
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Answers
from isthmus.features.errors import DataError

VECTOR = "vector"
"""Name of the graph's output."""
TEMPERATURE, RANKING, PAIRS = 0.05, 0.02, 0.002
"""Temperature of cosines, and the weights of two losses beside the cosine, which has weight 1."""
TOLERANCE: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
"""Largest difference of a number in a vector of length 1."""
COMPARED = 256
"""Rows on which an export compares a package with its student."""


def require_searchable(material: Material, keys: Sequence[str]) -> None:
    """Raise a DataError if the validation or test part is too small for a search.

    `keys` has the names of the vectors. With a single one, a row is not its own candidate, so one more row is needed.
    """
    least = NEAREST + 1 + (len(keys) == 1)
    for part in ("validation", "test"):
        if (rows := len(getattr(material.parts, part))) < least:
            found = f"the {part} part has {rows:,} rows"
            raise DataError(material.declaration.where, found, expected=f"at least {least}, to find {NEAREST} of",
                            remedy="use more rows or other shares in split")  # fmt: skip


def vector_objective(keys: Sequence[str]) -> Objective:
    """Return the terms: the teacher's vectors, its ranking of a batch's candidates, and the pairs, if any."""
    terms = {f"cosine of {name}": Term(cosine, student=f"student.{name}", teacher=f"teacher.{name}") for name in keys}
    first, second = keys[0], keys[-1]
    ours = {"queries": f"student.{first}", "candidates": f"student.{second}"}
    theirs = {"taught_queries": f"teacher.{first}", "taught_candidates": f"teacher.{second}"}
    terms["ranking"] = Term(partial(ranking, alone=len(keys) == 1), RANKING, **ours, **theirs)
    if len(keys) > 1:
        terms["pairs"] = Term(partial(info_nce, temperature=TEMPERATURE), PAIRS, **ours)
    return Objective(terms)


def search(answers: Answers, teacher: Answers, keys: Sequence[str]) -> dict[str, float]:
    """Measure a search by each row's vector of the first key among all vectors of the last one (see `retrieval`).

    With a single key, a row searches among the other rows.
    """
    first, second = keys[0], keys[-1]
    return retrieval(answers[first], answers[second], teacher[first], teacher[second], alone=len(keys) == 1)


def ranking(
    queries: Tensor, candidates: Tensor, taught_queries: Tensor, taught_candidates: Tensor, *, alone: bool
) -> Tensor:
    """Compare each query's ranking of the batch's candidates with the teacher's. Return the loss `lists`.

    All tensors are (rows, width): vectors of the student, then of the teacher. With `alone`, queries and candidates are
    the same rows, and no row is its own candidate.
    """
    if len(queries) < 2:  # the last batch of an epoch may have one row
        return queries.sum() * 0
    mask = ~torch.eye(len(queries), dtype=torch.bool, device=queries.device) if alone else None
    scores, taught = queries @ candidates.T, taught_queries @ taught_candidates.T
    return lists(scores, taught, temperature=TEMPERATURE, mask=mask)
