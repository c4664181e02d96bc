"""The parity ladder: from a student in torch to its package in each runtime, and the first rung that breaks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from isthmus.distill.export.acceptance import difference
from isthmus.distill.restore import Restored, restored
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.teachers.teacher import named
from isthmus.features.errors import DependencyError, GateFailed, PackageError
from isthmus.features.package.checksums import GOLDEN
from isthmus.features.package.golden import Golden, TensorBytes, read_golden
from isthmus.features.package.inspect import Runtime
from isthmus.features.package.manifest import Manifest, Variant, read_package
from isthmus.features.package.replay import Answers


@dataclass(frozen=True)
class Rung:
    """One form of a student, in what runs it.

    Attributes:
        form: the model file, or what it is in torch.
        runtime: what answered.
        tolerance: the largest difference from the student in torch that holds.
        worst: the largest one found; None without answers, infinite where a number lacks.
        case: the golden case that differs most.
        holds: whether it is as the student; None if nothing can ask it: there is none, or its runtime is not installed.
        found: the answer in words.
    """

    form: str
    runtime: str
    tolerance: float
    worst: float | None
    case: int | None
    holds: bool | None
    found: str


@dataclass(frozen=True)
class Ladder:
    """All rungs, the student's own first."""

    package: Path
    rungs: Sequence[Rung]

    @property
    def broken(self) -> Rung | None:
        """The first rung that breaks."""
        return next((rung for rung in self.rungs if rung.holds is False), None)

    def require(self) -> None:
        """Passes over a ladder that holds, as far as what is installed reaches.

        Raises:
            GateFailed: the first rung that breaks.
        """
        if (rung := self.broken) is not None:
            raise GateFailed(
                f"{self.package.name}: {rung.form} in {rung.runtime}", rung.found,
                expected=f"the student's answers within {rung.tolerance:g}",
                remedy="every rung before it holds: look at what it does to the one before",
            )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The ladder as plain data."""
        first = self.broken
        return {
            "package": str(self.package),
            "passed": first is None,
            "broken": first and {"form": first.form, "runtime": first.runtime},
            "rungs": [asdict(rung) for rung in self.rungs],
        }


def climb(
    material: Material, package: Path, model_folder: Path, runtimes: Mapping[str, Callable[[], Runtime]]
) -> Ladder:
    """Feeds each form of a student its golden cases, and compares what it answers with the student in torch.

    Args:
        material: what the student was trained with.
        package: its package.
        model_folder: the student's.
        runtimes: what runs the model files, in this order, made when its turn comes.

    Raises:
        PackageError: the package is damaged, or of another student.
        ContractMismatch: the student was trained with something else.
        DataError: the student cannot be read.
    """
    manifest, found = read_package(package), restored(material, model_folder)
    golden, cases = read_golden(package, manifest), found.task.cases(found.student)
    _require_same(package, manifest, golden, cases, found.id)
    tolerance = found.task.tolerance
    rungs = [Rung("student", "torch", 0.0, 0.0, None, holds=True, found="what all others are compared with")]
    rungs.append(_exported(found, manifest, cases))
    for name, make in runtimes.items():
        try:
            runtime = make()
        except DependencyError as error:
            rungs.append(Rung("", name, 0.0, None, None, holds=None, found=f"not climbed: {error}"))
            continue
        # As they are made: of ONNX in whole numbers before any of them in another format.
        files = sorted(runtime.files(manifest), key=lambda one: (one.format != "onnx", one.precision))
        rungs += [_rung(name, runtime, package, manifest, file, golden, cases, tolerance) for file in files]
    return Ladder(package, rungs)


def _rung(
    name: str,
    runtime: Runtime,
    package: Path,
    manifest: Manifest,
    variant: Variant,
    golden: Golden,
    cases: Sequence[Case],
    tolerances: Mapping[str, float],
) -> Rung:
    allowed = tolerances[variant.precision]
    try:
        answers = runtime.ask(package, manifest, variant, golden)
    except PackageError as error:
        return Rung(variant.file, name, allowed, None, None, holds=False, found=error.found)
    except DependencyError as error:  # it is there, and cannot be used
        return Rung(variant.file, name, allowed, None, None, holds=None, found=f"not climbed: {error}")
    return _judged(variant.file, name, allowed, cases, answers)


def _exported(found: Restored, manifest: Manifest, cases: Sequence[Case]) -> Rung:
    """What torch.export makes of the student, with sizes as each case has them."""
    form, name, allowed = "exported program", "torch", found.task.tolerance["fp32"]
    network, keys = found.task.network(found.student), [output.name for output in manifest.outputs]
    if network is None:
        return Rung(form, name, allowed, None, None, holds=None, found="the graph is written node by node")
    keys = list(found.task.keys) if network is found.student else keys
    answers: list[Answers] = []
    try:
        for case in cases:
            tensors = tuple(map(torch.from_numpy, case.feeds.values()))
            given = named(torch.export.export(network, tensors).module()(*tensors), keys, form)
            answers.append({key: given[key].numpy() for key in case.expected})
    except Exception as error:  # noqa: BLE001 - of any kind: torch's have nothing in common
        return Rung(form, name, allowed, None, None, holds=False, found=f"torch.export refuses it: {error}"[:300])
    return _judged(form, name, allowed, cases, answers)


def _judged(form: str, name: str, allowed: float, cases: Sequence[Case], answers: Sequence[Answers]) -> Rung:
    apart = [_apart(case, answered) for case, answered in zip(cases, answers, strict=True)]
    worst = max(apart)
    at = apart.index(worst)
    said = f"differs by up to {worst:.3g}, in case {at}" if worst else "the student's answers"
    return Rung(form, name, allowed, worst, at if worst else None, holds=worst <= allowed, found=said)


def _apart(case: Case, found: Answers) -> float:
    """Infinite where a number lacks."""
    apart = difference(case.expected, found)
    return math.inf if math.isnan(apart) else apart


def _require_same(package: Path, manifest: Manifest, golden: Golden, cases: Sequence[Case], student: str) -> None:
    """Refuses a package that is of another student, or of other rows."""
    if manifest.model != student:
        raise PackageError(
            str(package), f"made from student {manifest.model}", expected=student, remedy="export the student again"
        )
    fed = [{name: TensorBytes.of(array) for name, array in case.feeds.items()} for case in cases]
    if [dict(case.tensors) for case in golden.cases] != fed:
        raise PackageError(
            f"package {manifest.name}: {GOLDEN}", "is of other rows than the student's test part and edges",
            expected="the cases that export makes of them", remedy="export the student again",
        )  # fmt: skip
