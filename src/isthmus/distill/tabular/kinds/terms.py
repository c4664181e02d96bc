"""Objectives whose terms leave out the rows that lack a label or an answer of the teacher."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from isthmus.distill.language.objective import DeclaredTerm, named_terms
from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.teachers.teacher import ANSWERED
from isthmus.features.errors import ConfigurationError


def declared_objective(declared: Sequence[DeclaredTerm], usual: Objective) -> Objective:
    """Return the objective of declared terms.

    If all of them use the teacher, the control is trained like that of `usual`, if it has one.
    """
    terms = [term for term in declared if isinstance(term, Term)]
    control = usual.without_teacher() if all(term.asks_teacher for term in terms) else None
    return Objective(named_terms(terms), None if control is None else control.terms)


def over_known_rows(objective: Objective, *, labels: bool, answers: bool) -> Objective:
    """Return an objective of which each term gets only the rows that have what it reads.

    `labels` is True if rows may lack a label (NaN or `IGNORED`). `answers` is True if the teacher may not answer a row,
    which its output "answered" tells.
    """
    return objective.changed(lambda term: _over_known_rows(term, labels, answers))


def _over_known_rows(term: Term, labels: bool, answers: bool) -> Term:
    named = [name for name, source in term.arguments.items() if source == "labels" and labels]
    answered = {"answered_rows": f"teacher.{ANSWERED}"} if answers and term.asks_teacher else {}
    if not named and not answered:
        return term
    return Term(partial(_on_rows, term.loss, named), term.weight, **term.arguments, **answered)


def _on_rows(
    loss: Callable[..., Tensor], labels: Sequence[str], /, *, answered_rows: Tensor | None = None, **tensors: Tensor
) -> Tensor:
    known = [_are_known(tensors[name]) for name in labels]
    rows = torch.stack(known if answered_rows is None else [*known, answered_rows.bool()]).all(0)
    if rows.any():
        try:
            return loss(**{name: tensor[rows] for name, tensor in tensors.items()})
        except ConfigurationError:
            if rows.sum() > 2 or rows.all():
                raise
            # Losses that compare rows, such as `similarities`, may need three.
    zero = rows.new_zeros((), dtype=torch.float32)
    return sum((tensor.sum() * 0.0 for tensor in tensors.values() if tensor.requires_grad), zero)


def _are_known(labels: Tensor) -> Tensor:
    known = labels.isfinite() if labels.is_floating_point() else labels != IGNORED
    return known if known.ndim == 1 else known.all(1)
