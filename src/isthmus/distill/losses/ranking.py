"""Losses of scores that order candidates, as in search."""

import torch
from torch import Tensor

from isthmus.distill.losses.logits import divergence
from isthmus.distill.shapes import average, booleans, check_pair, check_tensors, floats, integers, positive, to_float32
from isthmus.features.errors import Problem

_NO_GAIN = -1e4


def lists(student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return how far the student's ranking of candidates is from the teacher's (ListNet, Cao et al., ICML 2007).

    For queries with equal numbers of candidates; see `grouped_lists` for different numbers. The loss is the mean over
    the queries of KL(softmax(t / T) ‖ softmax(s / T)), with T the temperature. The scores s of the student and t of the
    teacher are (queries, candidates) and finite, with at least two candidates. `mask`, bool (queries, candidates), is
    True for the candidates that count; None means all. Queries without such a candidate do not count; the loss is 0 if
    no query is left.
    """
    _agree("lists", student, teacher, mask, positive("temperature", temperature))
    scores = [to_float32(scores) / temperature for scores in (student, teacher)]
    if mask is None:
        return average(divergence(*scores))
    scores = [row.masked_fill(~mask, torch.finfo(row.dtype).min) for row in scores]
    return average(divergence(*scores)[mask.any(-1)])


def _agree(where: str, student: Tensor, teacher: Tensor, mask: Tensor | None, problem: Problem | None = None) -> None:
    check_pair(where, "queries candidates", student, teacher, problem, mask=booleans(mask, "queries candidates"))
    if student.shape[-1] < 2:
        check_tensors(where, Problem("candidates", "a single candidate per query", "at least two"))


def grouped_lists(student: Tensor, teacher: Tensor, groups: Tensor, *, temperature: float) -> Tensor:
    """Return how far the student's ranking of each query's rows is from the teacher's; queries may differ in size.

    The loss is the mean over the queries of T² KL(softmax(t / T) ‖ softmax(s / T)), with T the temperature. The scores
    s of the student and t of the teacher are (rows,) and finite. `groups`, integers (rows,), has the number of each
    row's query. T² keeps the gradient's size when T changes. A query with a single row adds 0 to the mean.
    """
    problem = positive("temperature", temperature)
    check_pair("grouped lists", "rows", student, teacher, problem, groups=integers(groups, "rows"))
    place, shape = _places(groups)
    mask = torch.zeros(shape, dtype=torch.bool, device=student.device).index_put(place, torch.ones_like(groups).bool())
    pair = [to_float32(scores).new_zeros(shape).index_put(place, to_float32(scores)) for scores in (student, teacher)]
    return lists(*pair, temperature=temperature, mask=mask) * temperature**2


def graded_lists(student: Tensor, relevance: Tensor, groups: Tensor) -> Tensor:
    """Return how far the student's scores are from ranking each query's rows by relevance (Bruch et al., ICTIR 2019).

    Used to learn a ranking from labels. The loss is the mean of KL(p ‖ softmax(s)) over the queries with a relevant
    row; 0 without such queries. In a query, g_i = 2**relevance_i - 1 is the gain of row i, and p_i = g_i / Σ g. The
    scores s are (rows,) and finite. `relevance`, at least 0, and `groups`, the query ID of each row, are integers
    (rows,).
    """
    check_tensors(
        "graded lists", student=floats(student, "rows"), relevance=integers(relevance, "rows"),
        groups=integers(groups, "rows"),
    )  # fmt: skip
    place, shape = _places(groups)
    scores = to_float32(student)
    gains = scores.new_zeros(shape).index_put(place, relevance.to(scores.dtype).exp2() - 1)
    mask = torch.zeros(shape, dtype=torch.bool, device=student.device).index_put(place, torch.ones_like(groups).bool())
    mask = mask & (gains.sum(-1, keepdim=True) > 0)
    # For a row without gain, use a finite number whose exp is 0, since log(0) would give NaN in products.
    wanted = gains.log().clamp(min=_NO_GAIN)
    return lists(scores.new_zeros(shape).index_put(place, scores), wanted, mask=mask)


def _places(groups: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return each row's position in a matrix with a row per group, and the matrix's shape, at least two columns."""
    _, numbers, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    order = numbers.argsort(stable=True)
    column = torch.empty_like(numbers)
    starts = (sizes.cumsum(0) - sizes)[numbers[order]]
    column[order] = torch.arange(len(numbers), device=groups.device) - starts
    return (numbers, column), (len(sizes), max(2, int(sizes.max())))
