"""The terms that a `Tabular`, a `Text` or an `Image` declares as its objective, and their checks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from isthmus.distill.labels import Label
from isthmus.distill.language.teachers import abstains
from isthmus.features.errors import Problem, one_of

STATE = "state"
"""Key of the pooled last states of a text's teacher and student, see `Text.has_states`."""


@runtime_checkable
class DeclaredTerm(Protocol):
    """A `Term` of `isthmus.losses`, which is not imported here: it needs torch, and most definitions do not."""

    @property
    def arguments(self) -> Mapping[str, str]: ...
    @property
    def asks_teacher(self) -> bool: ...
    @property
    def loss_name(self) -> str: ...
    def takes(self, argument: str) -> bool: ...
    def parameters(self) -> Iterator[Any]: ...


_Term = TypeVar("_Term", bound=DeclaredTerm)


def named_terms(terms: Sequence[_Term]) -> dict[str, _Term]:
    """Return terms by the names of their losses; a loss that comes again gets a number."""
    named: dict[str, _Term] = {}
    for term in terms:
        named[term.loss_name if term.loss_name not in named else f"{term.loss_name} {len(named) + 1}"] = term
    return named


def objective_problems(declared: Any, where: str) -> list[Problem]:
    """Return a problem for each invalid term of a task whose label and teacher are valid."""
    place, terms, gaps = f"{where}: objective", declared.objective, abstains(declared.teacher)
    if terms is None or not isinstance(declared.label, Label):
        return []
    if not isinstance(terms, Sequence) or not terms or not all(isinstance(term, DeclaredTerm) for term in terms):
        return [Problem(place, repr(terms), "a list of Term, from isthmus.losses")]
    student, teacher = f"student.{declared.label.key}", f"teacher.{declared.label.key}"
    states = [f"student.{STATE}", f"teacher.{STATE}"] if getattr(declared, "has_states", False) else []
    known = (student, teacher, *states, *(["teacher.answered"] if gaps else []), "labels")
    learns = [term for term in terms if student in term.arguments.values()]
    weighs = declared.weight is not None or declared.class_weight is not None
    checks = []
    for name, term in named_terms(terms).items():
        sources = term.arguments
        checks += [
            *((name, f"{key}={source!r}", source in known, one_of(known)) for key, source in sources.items()),
            (name, "no argument from the student", any(source.startswith("student.") for source in sources.values()),
             f'an argument of "{student}"'),
            (name, "a loss with parameters", not [*term.parameters()], "none, or a task of your own"),
            (name, "a loss without weights", not weighs or term.takes("weights"),
             "the argument weights, floats shaped like the labels, since weight or class_weight is set"),
        ]  # fmt: skip
    if gaps and all(term.asks_teacher for term in terms):
        checks.append(("teacher", 'missing="labels"', False, "a term without the teacher, for rows without an answer"))
    checks.append(("terms", f"none with {student}", bool(learns), f"a term with {student}"))
    for name in ("soft_weight", "temperature"):
        holds = getattr(declared, name) == getattr(type(declared), name)
        checks.append((name, "has no effect beside terms", holds, "none: set weights and options of the terms"))
    return [Problem(f"{place}, {name}", found, expected) for name, found, holds, expected in checks if not holds]
