"""Losses of embeddings: of each one (`cosine`), of similarities within a batch, and of pairs (`info_nce`)."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, normalize

from isthmus.distill.losses.logits import divergence
from isthmus.distill.shapes import average, booleans, check_pair, check_tensors, floats, positive, select, to_float32
from isthmus.features.errors import Problem


def cosine(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Return the mean of 1 - cos(s, t), from 0 to 2, so that embeddings of the student point where the teacher's do.

    s and t are the (..., width) embeddings of student and teacher; DistilBERT uses this loss (Sanh et al., 2019,
    arXiv:1910.01108). `mask`, bool (...), is True for the embeddings that count; None means all. The loss is 0 if the
    mask has no True. The cosine with a zero vector is 0.
    """
    check_pair("cosine", "... width", student, teacher, mask=booleans(mask, "..."))
    return average(1 - cosine_similarity(select(student, mask), select(teacher.detach(), mask), dim=-1))


def similarities(student: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
    """Return how much the similarities within a batch differ between student and teacher, whose widths may differ.

    Used to distill embeddings without a projection (Passalis and Tefas, 2018, arXiv:1803.10837; SEED, Fang et al.,
    2021, arXiv:2101.04731). With c_ij the cosine of the embeddings of rows i and j in one model, the loss is the mean
    over i of::

        KL over j ≠ i of (softmax(teacher's c_ij / T) ‖ softmax(student's c_ij / T))

    The embeddings are (batch, width), with at least three rows. T is `temperature`, usually below 0.1, since cosines
    differ by little. The loss has no factor T².
    """
    check_tensors(
        "similarities",
        positive("temperature", temperature),
        student=floats(student, "batch student"),
        teacher=floats(teacher, "batch teacher"),
    )
    rows = len(student)
    check_tensors("similarities", Problem("batch", f"{rows} rows", "at least 3") if rows < 3 else None)
    others = ~torch.eye(rows, dtype=torch.bool, device=student.device)

    def neighbors(embeddings: Tensor) -> Tensor:
        unit = normalize(to_float32(embeddings), dim=-1)
        return (unit @ unit.mT)[others].view(rows, rows - 1) / temperature

    return divergence(neighbors(student), neighbors(teacher)).mean()


def info_nce(queries: Tensor, candidates: Tensor, *, temperature: float) -> Tensor:
    """Return how far each query is from having its own candidate as the nearest (InfoNCE, 2018, arXiv:1807.03748).

    With c_ij the cosine of query i and candidate j, the loss is the mean over i of -log softmax_j(c_ij / T)_i. Queries
    and candidates are (batch, width), where row i of both belongs together. T is `temperature`.
    """
    check_tensors(
        "InfoNCE", positive("temperature", temperature), queries=floats(queries, "batch width"),
        candidates=floats(candidates, "batch width"),
    )  # fmt: skip
    ours, theirs = (normalize(to_float32(each), dim=-1) for each in (queries, candidates))
    return cross_entropy(ours @ theirs.mT / temperature, torch.arange(len(queries), device=queries.device))
