"""Checks of the terms that a `Tabular`, a `Text` or an `Image` declares as its objective."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.distill.labels import Label
from isthmus.distill.language.teachers import abstains
from isthmus.features.errors import Problem, one_of

if TYPE_CHECKING:
    from isthmus.distill.declaration import Predictor
    from isthmus.distill.losses.objective import Term as Term
else:
    Term = object  # definitions must not import torch, except to write terms


def objective_problems(declared: "Predictor", where: str) -> list[Problem]:
    """Return a problem for each invalid term of `objective`. Call it only if label and teacher are valid."""
    if declared.objective is None or not isinstance(declared.label, Label):
        return []
    from isthmus.distill.losses.objective import Term, named_terms

    place, terms, gaps = f"{where}: objective", declared.objective, abstains(declared.teacher)
    if not isinstance(terms, Sequence) or not terms or not all(isinstance(term, Term) for term in terms):
        return [Problem(place, repr(terms), "a list of Term, from isthmus.losses")]
    student, teacher = f"student.{declared.label.key}", f"teacher.{declared.label.key}"
    known = (student, teacher, *(["teacher.answered"] if gaps else []), "labels")
    weighs = declared.weight is not None or declared.class_weight is not None
    checks = []
    for name, term in named_terms(terms).items():
        sources = term.arguments
        checks += [
            *((name, f"{key}={source!r}", source in known, one_of(known)) for key, source in sources.items()),
            (name, "no argument from the student", student in sources.values(), f'an argument of "{student}"'),
            (name, "a loss with parameters", not [*term.parameters()], "none, or a task of your own"),
            (name, "a loss without weights", not weighs or term.takes("weights"),
             "the argument weights, floats (rows,), since weight or class_weight is set"),
        ]  # fmt: skip
    if gaps and all(term.asks_teacher for term in terms):
        checks.append(("teacher", 'missing="labels"', False, "a term without the teacher, for rows without an answer"))
    for name in ("soft_weight", "temperature"):
        holds = getattr(declared, name) == getattr(type(declared), name)
        checks.append((name, "has no effect beside terms", holds, "none: set weights and options of the terms"))
    return [Problem(f"{place}, {name}", found, expected) for name, found, holds, expected in checks if not holds]
