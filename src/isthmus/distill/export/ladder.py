"""The parity ladder: compare every form of a student, from torch to each runtime, and find the first that differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from isthmus.distill.export.candidate import ParityLimits, require_student
from isthmus.distill.restore import Restored, restore
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.teachers.teacher import by_key
from isthmus.features.errors import DependencyError, GateFailed, PackageError
from isthmus.package.checksums import GOLDEN
from isthmus.package.golden import TensorBytes, read_golden
from isthmus.package.inspect import Runtime
from isthmus.package.manifest import Manifest, Package
from isthmus.package.replay import Answers


class Rung(msgspec.Struct, frozen=True):
    """One form of the student, such as a model file, in one runtime.

    `worst` is the largest difference from the student in torch, at golden case `case`: None without outputs, infinite
    if a number is missing. `holds` is None if the form or its runtime is missing.
    """

    form: str
    runtime: str
    tolerance: float
    worst: float | None
    case: int | None
    holds: bool | None
    outcome: str = msgspec.field(name="found")


@dataclass(frozen=True)
class Ladder:
    package: Path
    rungs: Sequence[Rung]

    @property
    def broken(self) -> Rung | None:
        return next((rung for rung in self.rungs if rung.holds is False), None)

    def require(self) -> None:
        if (rung := self.broken) is not None:
            raise GateFailed(
                f"{self.package.name}: {rung.form} in {rung.runtime}", rung.outcome,
                expected=f"the student's outputs within {rung.tolerance:g}",
                remedy="look at the conversion to this form: all earlier forms agree with the student",
            )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        first = self.broken
        return {
            "package": str(self.package),
            "passed": first is None,
            "broken": first and {"form": first.form, "runtime": first.runtime},
            "rungs": [msgspec.to_builtins(rung) for rung in self.rungs],
        }


def compare_forms(
    material: Material, package: Package, model_folder: Path, runtimes: Mapping[str, Callable[[], Runtime]]
) -> Ladder:
    """Find the first conversion that changes a student's outputs: run its graph and model files on the golden cases.

    The result has a rung (an entry) for each form of the student. A form that differs too much from torch raises no
    error here; `Ladder.require` raises it. `runtimes` maps a runtime's name to a function that creates it. If the
    runtime is not installed, `holds` of its rung is None. `model_folder` is the folder of the trained student.

    Raises a PackageError if the package is not from this student or has other golden cases. Raises a ContractMismatch
    if training set or declaration changed, and a DataError if the student cannot be read.
    """
    manifest, trained = package.manifest, restore(material, model_folder)
    golden, cases = read_golden(package), trained.task.cases(trained.student)
    require_student(package, trained.id)
    feeds = [{name: TensorBytes.of(array) for name, array in case.feeds.items()} for case in cases]
    core = [{tensor.name: TensorBytes.of(case.core[tensor.name]) for tensor in manifest.core} for case in cases]
    if [(dict(case.tensors), dict(case.core)) for case in golden.cases] != [*zip(feeds, core, strict=True)]:
        raise PackageError(
            f"package {manifest.name}: {GOLDEN}", "does not match the student's test part and edges",
            expected="the golden cases that export writes", remedy="export the student again",
        )  # fmt: skip
    rungs = [Rung("student", "torch", 0.0, 0.0, None, holds=True, outcome="the reference")]
    limits = ParityLimits.of(trained.task, trained.student, trained.task.material.parts.test)
    rungs.append(_exported(trained, manifest, cases, limits))
    for name, create in runtimes.items():
        try:
            runtime = create()
        except DependencyError as error:
            rungs.append(Rung("", name, 0.0, None, None, holds=None, outcome=f"skipped: {error}"))
            continue
        # Order of conversion: ONNX files in all precisions come before other formats.
        files = sorted(runtime.files(manifest), key=lambda file: (file.format != "onnx", file.precision))
        for file in files:
            ask = partial(runtime.ask, package, file, golden.cases)
            rungs.append(_rung(file.file, name, limits, file.precision, cases, ask))
    return Ladder(package.files.folder, rungs)


def _rung(
    form: str, runtime: str, limits: ParityLimits, precision: str, cases: Sequence[Case],
    ask: Callable[[], Sequence[Answers]],
) -> Rung:  # fmt: skip
    tolerance = limits.largest(precision)
    unmeasured = partial(Rung, form, runtime, tolerance, None, None)
    try:
        answers = ask()
    except (GateFailed, PackageError) as error:
        return unmeasured(holds=False, outcome=error.found)
    except DependencyError as error:  # the runtime is installed, but cannot be used
        return unmeasured(holds=None, outcome=f"skipped: {error}")
    deviations = [(far, number) for number, (case, outputs) in enumerate(zip(cases, answers, strict=True))
             for far in limits.compare(precision, case, outputs)]  # fmt: skip
    far, number = max(deviations, key=lambda each: each[0].share)
    case = number if far.by else None
    text = "same as the student" if case is None else f"{far.place}: {far.message('the student in torch')}"
    return Rung(
        form, runtime, tolerance, max(each.by for each, _ in deviations), case, holds=far.share <= 1, outcome=text
    )


def _exported(trained: Restored, manifest: Manifest, cases: Sequence[Case], limits: ParityLimits) -> Rung:
    form, tolerance = "exported program", limits.largest("fp32")
    network = trained.task.network(trained.student)
    if network is None:
        return Rung(form, "torch", tolerance, None, None, holds=None, outcome="no torch module computes the graph")
    keys = trained.task.keys if network is trained.student else [output.name for output in manifest.outputs]

    def ask() -> list[Answers]:
        answers: list[Answers] = []
        try:
            for case in cases:
                tensors = tuple(map(torch.from_numpy, case.feeds.values()))
                outputs = by_key(torch.export.export(network, tensors).module()(*tensors), keys, form)
                answers.append({key: outputs[key].numpy() for key in case.expected})
        except Exception as error:  # torch's errors share no base class
            raise GateFailed(form, f"torch.export fails: {error}"[:300]) from error
        return answers

    return _rung(form, "torch", limits, "fp32", cases, ask)
