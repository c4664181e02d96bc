"""Losses of scores that order candidates, as a search does.

The two by which cross-encoders teach retrievers in practice, beside `similarities` of embeddings. Margins need a known
relevant candidate and learn from its lead alone; lists need none and learn from all scores at once. Pairwise logistic
losses (RankNet) learn part of what lists do, at the square of their cost, and are left out.
"""

import torch
from torch import Tensor

from isthmus.distill.losses.logits import divergence
from isthmus.distill.shapes import agree, agree_pair, average, booleans, positive, precise
from isthmus.features.errors import Problem


def margins(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Squared difference of margins, Margin-MSE (Hofstätter et al., 2020, arXiv:2010.02666).

    The first candidate of each query is the relevant candidate. The mean over the remaining candidates j that count
    of::

        ((s_0 - s_j) - (t_0 - t_j))²

    The scores s of the student and t of the teacher and the mask are (queries, candidates), of at least two candidates.
    A query counts if its first candidate does.
    """
    _agree("margins", student, teacher, mask)
    gap = precise(student) - precise(teacher.detach())
    if mask is None:
        return average((gap[:, :1] - gap[:, 1:]).square())
    return average((gap[:, :1] - gap[:, 1:])[mask[:, 1:] & mask[:, :1]].square())


def lists(student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Divergence from the teacher's top-1 probabilities (ListNet, Cao et al., ICML 2007).

    The paper has the cross entropy, whose gradient is the same. The mean over the queries with a candidate that counts
    of::

        KL over the candidates that count of (softmax(t / T) ‖ softmax(s / T))

    The finite scores s of the student and t of the teacher and the mask are (queries, candidates), of at least two
    candidates.
    """
    _agree("lists", student, teacher, mask, positive("temperature", temperature))
    scores = [precise(scores) / temperature for scores in (student, teacher)]
    if mask is None:
        return average(divergence(*scores))
    scores = [row.masked_fill(~mask, torch.finfo(row.dtype).min) for row in scores]
    return average(divergence(*scores)[mask.any(-1)])


def _agree(where: str, student: Tensor, teacher: Tensor, mask: Tensor | None, problem: Problem | None = None) -> None:
    agree_pair(where, "queries candidates", student, teacher, problem, mask=booleans(mask, "queries candidates"))
    if student.shape[-1] < 2:
        agree(where, Problem("candidates", "a single candidate of each query", "at least two, to be ordered"))
