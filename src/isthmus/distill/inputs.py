"""Check the inputs of a distillation against the contract: types, availability on devices, and the spine."""

from collections.abc import Iterable

from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.language.causal import Causal
from isthmus.distill.language.text import Text
from isthmus.features.contract.schema import SEPARATOR, Contract, optional_fields
from isthmus.features.definition.spec import FeatureProjection, RequestSource, RequestTransform
from isthmus.features.errors import Problem, did_you_mean, one_of
from isthmus.features.types import VECTOR, is_readable


def input_problems(
    distillation: Distillation, distillations: Iterable[Distillation], contract: Contract
) -> list[Problem]:
    problems = _unreadable(distillation, contract) + _unavailable_on_device(distillation, contract)
    problems += _not_in_the_spine(distillation, contract)
    if isinstance(distillation.task, Causal):
        problems += distillation.task.template_problems(distillation.where, contract, distillation.student.name)
    return problems + _unusable_fallback(distillation, distillations, contract)


def _unreadable(distillation: Distillation, contract: Contract) -> list[Problem]:
    return [
        Problem(f"distillation {distillation.name}, {role}", f"reads {column.name}, of type {column.dtype}",
                f"numbers, times and Strings, and for a Tabular or a Text {VECTOR} with a declared size")
        for role, service in (("teacher", distillation.teacher), ("student", distillation.student))
        for column in contract.inputs(service.name)
        if not is_readable(column.dtype, column.size if isinstance(distillation.task, Tabular | Text) else None)
    ] + [
        Problem(f"distillation {distillation.name}, student",
                f"reads request transform {transform.name}, which takes {column.name}, an Array",
                "request transforms of numbers, times and Strings: packages do not take arrays")
        for transform in contract.transforms_of(distillation.student.name)
        for column in contract.transform_inputs(transform)
        if column.dtype.element is not None
    ]  # fmt: skip


def _unusable_fallback(
    distillation: Distillation, distillations: Iterable[Distillation], contract: Contract
) -> list[Problem]:
    known = {each.name: each for each in distillations}
    name, where = distillation.stale, f"distillation {distillation.name}: stale"
    if not isinstance(name, str):
        return []
    if name not in known or name == distillation.name:
        others = [other for other in known if other != distillation.name]
        return [Problem(where, f"no other distillation is named {name!r}{did_you_mean(name, others)}", one_of(others))]
    if stored := [f"{view}:{feature}" for view, feature in contract.stored_features(known[name].student.name)]:
        return [Problem(where, f"the student of {name} reads {', '.join(stored[:3])}",
                        "a student without stored features, since those are missing or stale")]  # fmt: skip
    return []


def _unavailable_on_device(distillation: Distillation, contract: Contract) -> list[Problem]:
    beyond = [c.name for c in contract.inputs(distillation.student.name) if c.available == "server"]
    if not beyond:
        return []
    uses = f"uses {', '.join(beyond)}"
    for transform in contract.transforms_of(distillation.student.name):
        # A transform's results are only available where all of its inputs are.
        if inputs := [c.name for c in contract.transform_inputs(transform) if c.available == "server"]:
            uses += f", where request transform {transform.name} takes {', '.join(inputs)}"
    stored = {name for view in contract.views.values() for name in map(view.full_name, (c.name for c in view.fields))}
    named = [name.replace(SEPARATOR, ".", 1) for name in beyond if name in stored]
    expected = (
        f'fields that devices have: add available="device" to the Field of {", ".join(named)}, or remove them from '
        f"service {distillation.student.name}"
        if named
        else 'fields with available="device" and request fields, computed or not'
    )
    return [Problem(f"distillation {distillation.name}, student", uses, expected)]


def _not_in_the_spine(distillation: Distillation, contract: Contract) -> list[Problem]:
    spine, services = distillation.spine, (distillation.teacher, distillation.student)
    there = {key for entity in spine.entities for key in entity.join_keys}
    there |= {field.name for field in spine.request.schema} if spine.request else set()
    used = [transform for service in services for transform in contract.transforms_of(service.name)]
    needed = {c.name for service in services for c in contract.raw_inputs(service.name) if c.available == "request"}
    missing = sorted(needed - there - (optional_fields(used) if used else set()))
    parts: list[object] = [part for each in services for part in each.features]
    for part in parts:
        part = part.view if isinstance(part, FeatureProjection) else part
        parts += part.inputs if isinstance(part, RequestTransform) else ()
    requests = [part for part in parts if isinstance(part, RequestSource)]
    sources = {part.name for part in requests if {field.name for field in part.schema} & {*missing}}
    return [
        Problem(
            f"distillation {distillation.name}, spine {spine.name}",
            f"has no column {', '.join(missing)}, which its models read from the request",
            f"@spine(..., request={name}), and these columns in the result of the spine function",
        )
        for name in sorted(sources)[:1]
    ]
