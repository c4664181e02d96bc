"""Losses of logits: cross entropy with labels, and soft targets."""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import kl_div, log_softmax

from isthmus.distill.shapes import (
    average,
    below,
    booleans,
    check_pair,
    check_tensors,
    floats,
    integers,
    optional,
    positive,
    select,
)
from isthmus.features.errors import Problem

IGNORED = -100
"""Label that leaves an element out of the loss, as in torch."""

LEAST_PROBABILITY = 2.0**-24
"""Lower bound of the teacher's probability of a class or the tail; the smallest positive float16."""


def hard_targets(student: Tensor, labels: Tensor, *, ignored: int = IGNORED, weights: Tensor | None = None) -> Tensor:
    """Return the cross entropy with true labels, to train a classifier: the mean of -log softmax(student)[label].

    `student` has logits, (..., classes), and `labels` integers below the number of classes, (...). Elements whose label
    equals `ignored` do not count; the loss is 0 if no element counts. `weights`, floats (...) of at least 0, weigh the
    elements in the mean; None means equal weights. Raises a ConfigurationError if types, shapes or labels do not fit.
    """
    where = "hard targets"
    check_tensors(
        where, student=floats(student, "... classes"), labels=integers(labels, "..."), weights=optional(weights)
    )  # fmt: skip
    wanted, counts = _counting(labels, ignored)
    check_tensors(where, below("labels", wanted, student.shape[-1]))
    costs = functional.cross_entropy(select(student, counts), wanted, reduction="none")
    return average(costs, weights, counts)


def binary_hard_targets(
    student: Tensor, labels: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the cross entropy with 0/1 labels, to train a binary classifier.

    The loss is the mean of -y log p - (1 - y) log(1 - p). p is sigmoid(student), with `student` the logits of the
    second class, in any shape. The labels y are floats from 0 to 1 in the same shape. `mask`, bool in the same shape,
    is True for the elements that count; None means all. `weights`, floats of at least 0 in the same shape, weigh the
    elements in the mean. Raises a ConfigurationError if types or shapes do not fit.
    """
    where = "binary hard targets"
    check_tensors(
        where, student=floats(student, "..."), labels=floats(labels, "..."), mask=booleans(mask, "..."),
        weights=optional(weights),
    )  # fmt: skip
    logits, wanted = select(student, mask), select(labels, mask)
    costs = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    return average(costs, weights, mask)


def soft_targets(
    student: Tensor, teacher: Tensor, *, temperature: float, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the divergence of a student from the teacher's softened probabilities, the usual loss of a distillation.

    The loss is the mean of T² KL(softmax(t / T) ‖ softmax(s / T)), with T the temperature (Hinton et al., 2015,
    arXiv:1503.02531). The logits s of the student and t of the teacher are (..., classes) and finite. The factor T²
    keeps the gradient's size when T changes. `mask`, bool (...), is True for the rows of logits that count; None means
    all. `weights`, floats (...) of at least 0, weigh the rows in the mean. Raises a ConfigurationError if types or
    shapes do not fit.
    """
    problem = positive("temperature", temperature)
    counted = {"mask": booleans(mask, "..."), "weights": optional(weights)}
    check_pair("soft targets", "... classes", student, teacher, problem, **counted)
    softened = [select(logits, mask) / temperature for logits in (student, teacher)]
    return average(divergence(*softened), weights, mask) * temperature**2


def binary_soft_targets(
    student: Tensor, teacher: Tensor, *, temperature: float, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the loss `soft_targets` for two classes, from the logits of the second class alone.

    The logits of student and teacher are (...) and finite. A probability is sigmoid(logit / temperature). `mask`, bool
    (...), is True for the elements that count; None means all. `weights`, floats (...) of at least 0, weigh the
    elements in the mean. Raises a ConfigurationError if types or shapes do not fit.
    """
    check_pair("binary soft targets", "...", student, teacher, mask=booleans(mask, "..."))
    two = [torch.stack([torch.zeros_like(logits), logits], -1) for logits in (student, teacher)]
    return soft_targets(*two, temperature=temperature, mask=mask, weights=weights)


def top_k_targets(
    student: Tensor, probabilities: Tensor, indexes: Tensor, *, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """Return the loss `soft_targets` if only the k largest probabilities of the teacher were stored.

    Let p_i = softmax(t / T)_i be the teacher's probabilities of the classes i in K, k of n classes. The missing mass r
    = max(0, 1 - Σ p_i) is spread evenly over the n - k other classes; r is 0 if k = n. (Tan et al., ICLR 2019,
    arXiv:1902.10461, instead scale the p_i up to a sum of 1.) The loss is the mean over the rows of logits of::

        T² Σ_i q_i (log q_i - log softmax(s / T)_i)
        q_i = p_i / (r + Σ p_i) in K, and r / (n - k) / (r + Σ p_i) elsewhere

    Args:
        student: (..., n) finite logits s.
        probabilities: (..., k) teacher probabilities at temperature T, not all 0.
        indexes: (..., k) integers, the class of each probability, without duplicates in a row.
        temperature: temperature T.
        mask: bool (...), True for the rows of logits that count; None for all.
    """
    in_k = _in_k("top-k targets", student, probabilities, indexes, temperature, mask)
    classes, k = student.shape[-1], indexes.shape[-1]
    known = select(probabilities.detach(), mask)
    rest = (1 - known.sum(-1)).clamp(min=0) if k < classes else torch.zeros_like(known[..., 0])
    mass = rest + known.sum(-1)
    wanted, each = known / mass[..., None], rest / mass / max(classes - k, 1)
    logs = log_softmax(select(student, mask) / temperature, -1)
    logs_in_k = logs.gather(-1, in_k)
    inside = (torch.xlogy(wanted, wanted) - wanted * logs_in_k).sum(-1)
    outside = (classes - k) * torch.xlogy(each, each) - each * (logs.sum(-1) - logs_in_k.sum(-1))
    return average(inside + outside) * temperature**2


def generalized(
    student: Tensor, teacher: Tensor, *, beta: float, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Return a divergence between forward and reverse KL; with a high `beta`, the student favors likely classes.

    Let p = softmax(t / T) be the teacher's probabilities, q = softmax(s / T) the student's, T the temperature, and m =
    beta p + (1 - beta) q. The loss (GKD, Agarwal et al., ICLR 2024, arXiv:2306.13649) is the mean of::

        T² KL(p ‖ q)                                       beta = 0: `soft_targets`, which covers all of p
        T² KL(q ‖ p)                                       beta = 1: the reverse (MiniLLM, 2023, arXiv:2306.08543)
        T² (beta KL(p ‖ m) + (1 - beta) KL(q ‖ m))         between: the generalized Jensen-Shannon divergence

    The logits s (`student`) and t (`teacher`) are (..., classes) and finite. `mask`, bool (...), is True for the rows
    that count; None means all.
    """
    problems = positive("temperature", temperature), _share("beta", beta)
    check_pair("generalized targets", "... classes", student, teacher, *problems, mask=booleans(mask, "..."))
    q, p = (log_softmax(select(logits, mask) / temperature, -1) for logits in (student, teacher.detach()))
    return average(_between(q, p, beta)) * temperature**2


def top_k_tail(
    student: Tensor,
    probabilities: Tensor,
    indexes: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the loss `generalized` if only the k largest probabilities of the teacher were stored.

    All other classes count as a single class, the tail. The loss does not constrain the order within the tail, while
    `top_k_targets` spreads the tail's probability evenly. Probabilities are raised to at least 2^-24, as 0 would make
    the reverse KL infinite.

    Args:
        student: (..., n) finite logits.
        probabilities: (..., k) teacher probabilities at the same temperature. With k = n there is no tail.
        indexes: (..., k) integers, the class of each probability.
        beta: 0 for forward KL, 1 for reverse KL, or a value between, as in `generalized`.
        temperature: temperature T of both models; the loss has the factor T².
        mask: bool (...), True for the rows that count; None for all.
    """
    in_k = _in_k("top-k targets with a tail", student, probabilities, indexes, temperature, mask, _share("beta", beta))
    classes, k = student.shape[-1], indexes.shape[-1]
    logs = log_softmax(select(student, mask) / temperature, -1)
    known, ours = select(probabilities.detach(), mask), logs.gather(-1, in_k)
    if k < classes:
        known = torch.cat([known, (1 - known.sum(-1, keepdim=True)).clamp(min=0)], -1)
        tail = logs.scatter(-1, in_k, -math.inf).logsumexp(-1, keepdim=True)
        ours = torch.cat([ours, tail], -1)
    known = known.clamp(min=LEAST_PROBABILITY)
    return average(_between(ours, (known / known.sum(-1, keepdim=True)).log(), beta)) * temperature**2


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    logs, wanted = log_softmax(student, -1), log_softmax(teacher.detach(), -1)
    return kl_div(logs, wanted, reduction="none", log_target=True).sum(-1)


def _between(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta in (0, 1):
        pair = (student, teacher) if beta == 0 else (teacher, student)
        return kl_div(*pair, reduction="none", log_target=True).sum(-1)
    mixed = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    ours, theirs = (kl_div(mixed, logs, reduction="none", log_target=True).sum(-1) for logs in (student, teacher))
    return beta * theirs + (1 - beta) * ours


def _share(name: str, value: float) -> Problem | None:
    return None if 0 <= value <= 1 else Problem(name, repr(value), "0 to 1")


def _counting(labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    wide = labels.long()  # before the comparison: among bytes, 156 is -100
    counts = wide != ignored
    return wide[counts], counts


def _in_k(
    where: str, student: Tensor, probabilities: Tensor, indexes: Tensor, temperature: float, mask: Tensor | None,
    *problems: Problem | None,
) -> Tensor:  # fmt: skip
    check_tensors(
        where,
        positive("temperature", temperature),
        *problems,
        student=floats(student, "... classes"),
        probabilities=floats(probabilities, "... k"),
        indexes=integers(indexes, "... k"),
        mask=booleans(mask, "..."),
    )
    classes, k = student.shape[-1], indexes.shape[-1]
    in_k = (indexes if mask is None else indexes[mask]).long()
    more = Problem("indexes", f"{k} a row", f"at most the student's {classes} classes") if k > classes else None
    check_tensors(where, more, below("indexes", in_k, classes))
    return in_k
