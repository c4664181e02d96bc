"""Losses of self-attention: relations between the positions of a sequence."""

import math

import torch
from torch import Tensor

from isthmus.distill.losses.logits import divergence
from isthmus.distill.shapes import agree, average, booleans, floats, precise
from isthmus.features.errors import Problem


def attention_relations(student: Tensor, teacher: Tensor, *, heads: int, mask: Tensor | None = None) -> Tensor:
    """Return the divergence of self-attention relations (MiniLMv2, Wang et al., 2021, arXiv:2012.15828).

    Pass the queries of one layer of each model for the relation of queries to queries; the paper adds terms for the
    keys and for the values. The concatenated vectors of all attention heads are split again into `heads` relation
    heads, so widths and numbers of attention heads of the models may differ. With X_a, (tokens, width / heads), of
    relation head a::

        R_a = softmax(X_a X_aᵀ / sqrt(width / heads))

    The loss is the mean over relation heads and over the positions in the mask of all sequences of KL(teacher's R_a ‖
    student's R_a) of that position. Positions outside the mask are ignored as columns too.

    The queries, keys or values are (batch, tokens, width), finite where the mask, (batch, tokens), is True; `heads`
    must divide the widths of both models.
    """
    where = "attention relations"
    agree(
        where,
        None if heads > 0 else Problem("heads", str(heads), "a number above 0"),
        student=floats(student, "batch tokens student"),
        teacher=floats(teacher, "batch tokens teacher"),
        mask=booleans(mask, "batch tokens"),
    )
    uneven = [
        Problem(party, f"width {vectors.shape[-1]}", f"a multiple of the {heads} relation heads")
        for party, vectors in (("student", student), ("teacher", teacher))
        if vectors.shape[-1] % heads
    ]
    agree(where, *uneven)
    if mask is None:
        mask = torch.ones(student.shape[:2], dtype=torch.bool, device=student.device)
    rows = divergence(_scores(student, heads, mask), _scores(teacher.detach(), heads, mask))
    return average(rows.transpose(1, 2)[mask])


def _scores(vectors: Tensor, heads: int, mask: Tensor) -> Tensor:
    """Return (batch, heads, tokens, tokens) scaled products; the smallest number at positions outside the mask.

    Minus infinity would give NaN for a sequence without a position in the mask.
    """
    cut = precise(vectors).masked_fill(~mask[..., None], 0).reshape(*mask.shape, heads, -1).transpose(1, 2)
    scores = cut @ cut.mT / math.sqrt(cut.shape[-1])
    return scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
