"""What a distillation may read, held against the contract: by a model, and by a model on a device."""

from collections.abc import Iterable

from isthmus.distill.declaration import Distillation
from isthmus.distill.language.causal import Causal
from isthmus.features.contract.contract import Contract
from isthmus.features.errors import Problem, nearest, one_of
from isthmus.features.types import INPUTS


def input_problems(
    distillation: Distillation, distillations: Iterable[Distillation], contract: Contract
) -> list[Problem]:
    """Each input that a model cannot read, or a device not have; `distillations` are all of the project."""
    problems = _unreadable(distillation, contract) + _beyond_the_device(distillation, contract)
    if isinstance(distillation.task, Causal):
        problems += distillation.task.unknown(distillation.where, contract, distillation.student.name)
    return problems + _unfit_instead(distillation, distillations, contract)


def _unreadable(distillation: Distillation, contract: Contract) -> list[Problem]:
    """Inputs of teacher and student that are bytes or arrays, and arrays that the student's graph would need."""
    return [
        Problem(f"distillation {distillation.name}, {role}", f"reads {column.name}, of type {column.dtype}",
                "numbers, times and Strings")
        for role, service in (("teacher", distillation.teacher), ("student", distillation.student))
        for column in contract.inputs(service.name)
        if column.dtype not in INPUTS
    ] + [
        Problem(f"distillation {distillation.name}, student",
                f"reads request transform {transform.name}, which takes {column.name}, an Array",
                "request transforms of numbers, times and Strings: a package is fed no arrays")
        for transform in contract.used(distillation.student.name)
        for column in contract.transform_inputs(transform)
        if column.dtype.element is not None
    ]  # fmt: skip


def _unfit_instead(
    distillation: Distillation, distillations: Iterable[Distillation], contract: Contract
) -> list[Problem]:
    """A distillation that is to answer for another one's student, and cannot."""
    known = {each.name: each for each in distillations}
    name, where = distillation.stale, f"distillation {distillation.name}: stale"
    if not isinstance(name, str):
        return []
    if name not in known or name == distillation.name:
        others = [other for other in known if other != distillation.name]
        return [Problem(where, f"no other distillation {name!r}{nearest(name, others)}", one_of(others))]
    if stored := [f"{view}:{feature}" for view, feature in contract.read(known[name].student.name)]:
        return [Problem(where, f"the student of {name} reads {', '.join(stored[:3])}",
                        "a student without stored features: they are what is missing")]  # fmt: skip
    return []


def _beyond_the_device(distillation: Distillation, contract: Contract) -> list[Problem]:
    """A student that reads what only a server has."""
    beyond = [c.name for c in contract.inputs(distillation.student.name) if c.available == "server"]
    if not beyond:
        return []
    uses = f"uses {', '.join(beyond)}"
    for transform in contract.used(distillation.student.name):
        # The results of a transform exist only where all of its inputs do.
        if inputs := [c.name for c in contract.transform_inputs(transform) if c.available == "server"]:
            uses += f", where request transform {transform.name} takes {', '.join(inputs)}"
    expected = 'fields with available="device" and request fields, computed or not'
    return [Problem(f"distillation {distillation.name}, student", uses, expected)]
