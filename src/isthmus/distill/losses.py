"""The distillation loss."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy


def distillation_loss(
    logits: torch.Tensor, labels: torch.Tensor, teacher: torch.Tensor, *, temperature: float, soft_weight: float
) -> torch.Tensor:
    """Temperature-scaled distillation loss for two classes (Hinton, Vinyals and Dean, 2015, arXiv:1503.02531).

    With student logits s, teacher logits t, labels y, temperature T, soft weight a, and H(p, q) the cross
    entropy -p log q - (1 - p) log(1 - q), the mean over the rows of::

        (1 - a) H(y, sigmoid(s)) + a T² H(sigmoid(t / T), sigmoid(s / T))

    The gradient of the soft term shrinks as 1/T²; the factor T² keeps the balance of the two terms when T changes.

    Args:
        logits: (n,) of the student.
        labels: (n,) 0 or 1, as floats.
        teacher: (n,) logits of the teacher.
        temperature: T, above 0.
        soft_weight: a, 0 to 1; with 0 the teacher has no part in the loss.
    """
    hard = cross_entropy(logits, labels)
    if soft_weight == 0:
        return hard
    soft = cross_entropy(logits / temperature, torch.sigmoid(teacher / temperature)) * temperature**2
    return (1 - soft_weight) * hard + soft_weight * soft
