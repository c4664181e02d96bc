"""Losses of scores that order candidates, as a search does.

The two by which cross-encoders teach retrievers in practice, beside `similarities` of embeddings. Margins need a known
relevant candidate and learn from its lead alone; lists need none and learn from all scores at once. Pairwise logistic
losses (RankNet) learn part of what lists do, at the square of their cost, and are left out.
"""

import torch
from torch import Tensor

from isthmus.distill.losses.logits import divergence
from isthmus.distill.shapes import agree, agree_pair, average, booleans, floats, integers, positive, precise
from isthmus.features.errors import Problem

_NO_GAIN = -1e4


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


def grouped_lists(student: Tensor, teacher: Tensor, groups: Tensor, *, temperature: float) -> Tensor:
    """`lists` of rows whose queries are numbered, times T², which keeps the size of the gradient when T changes.

    The finite scores of student and teacher are (rows,), the groups (rows,) integers. A group of a single row has no
    order, and adds 0.
    """
    problem = positive("temperature", temperature)
    agree_pair("grouped lists", "rows", student, teacher, problem, groups=integers(groups, "rows"))
    place, shape = _places(groups)
    mask = torch.zeros(shape, dtype=torch.bool, device=student.device).index_put(place, torch.ones_like(groups).bool())
    pair = [precise(scores).new_zeros(shape).index_put(place, precise(scores)) for scores in (student, teacher)]
    return lists(*pair, temperature=temperature, mask=mask) * temperature**2


def graded_lists(student: Tensor, relevance: Tensor, groups: Tensor) -> Tensor:
    """Cross entropy of each group's softmax with its gains (Bruch et al., ICTIR 2019), less the entropy of the gains.

    The mean over the groups with a relevant row of KL(p ‖ softmax(s)), p_i = g_i / Σ g and g_i = 2**relevance_i - 1.
    The finite scores s are (rows,), relevance and groups (rows,) integers of at least 0.
    """
    agree(
        "graded lists", student=floats(student, "rows"), relevance=integers(relevance, "rows"),
        groups=integers(groups, "rows"),
    )  # fmt: skip
    place, shape = _places(groups)
    scores = precise(student)
    gains = scores.new_zeros(shape).index_put(place, relevance.to(scores.dtype).exp2() - 1)
    mask = torch.zeros(shape, dtype=torch.bool, device=student.device).index_put(place, torch.ones_like(groups).bool())
    mask = mask & (gains.sum(-1, keepdim=True) > 0)
    # A row without gain has no part in p: e to the power of this is 0, and finite numbers have no NaN as a product.
    wanted = gains.log().clamp(min=_NO_GAIN)
    return lists(scores.new_zeros(shape).index_put(place, scores), wanted, mask=mask)


def _places(groups: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Where each row is in a matrix with a row for each group, and the shape of that matrix, at least two wide."""
    _, numbers, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    order = numbers.argsort(stable=True)
    column = torch.empty_like(numbers)
    starts = (sizes.cumsum(0) - sizes)[numbers[order]]
    column[order] = torch.arange(len(numbers), device=groups.device) - starts
    return (numbers, column), (len(sizes), max(2, int(sizes.max())))
