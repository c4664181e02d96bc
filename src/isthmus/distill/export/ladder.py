"""The parity ladder: from a student in torch to its package in each runtime, and the first rung that breaks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from isthmus.distill.export.candidate import Limits, require_student
from isthmus.distill.restore import Restored, restored
from isthmus.distill.tasks.task import Case, Material
from isthmus.distill.teachers.teacher import named
from isthmus.features.errors import DependencyError, GateFailed, PackageError
from isthmus.package.checksums import GOLDEN
from isthmus.package.golden import TensorBytes, read_golden
from isthmus.package.inspect import Runtime
from isthmus.package.manifest import Manifest, Package
from isthmus.package.replay import Answers


class Rung(msgspec.Struct, frozen=True):
    """A form of the student, such as a model file, in a runtime.

    Attributes:
        worst: the largest difference from the student in torch; None without answers, infinite where a number is
            missing.
        case: the golden case that differs most.
        holds: whether `worst` is within `tolerance`; None where the form does not exist or its runtime is missing.
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
    """All rungs, the student's own first."""

    package: Path
    rungs: Sequence[Rung]

    @property
    def broken(self) -> Rung | None:
        """The first rung that breaks."""
        return next((rung for rung in self.rungs if rung.holds is False), None)

    def require(self) -> None:
        """Raises GateFailed for the first rung that breaks; runtimes that are not installed do not count."""
        if (rung := self.broken) is not None:
            raise GateFailed(
                f"{self.package.name}: {rung.form} in {rung.runtime}", rung.outcome,
                expected=f"the student's answers within {rung.tolerance:g}",
                remedy="every rung before it holds: look at what it does to the form before",
            )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """The ladder as plain data."""
        first = self.broken
        return {
            "package": str(self.package),
            "passed": first is None,
            "broken": first and {"form": first.form, "runtime": first.runtime},
            "rungs": [msgspec.to_builtins(rung) for rung in self.rungs],
        }


def climb(
    material: Material, package: Package, model_folder: Path, runtimes: Mapping[str, Callable[[], Runtime]]
) -> Ladder:
    """Feeds the golden cases to each form of a student, and compares the answers with the student in torch.

    The runtimes are created in their order, each when its turn comes.

    Raises:
        PackageError: the package is of another student.
        ContractMismatch: the student was trained with something else.
        DataError: the student cannot be read.
    """
    manifest, trained = package.manifest, restored(material, model_folder)
    golden, cases = read_golden(package), trained.task.cases(trained.student)
    require_student(package, trained.id)
    feeds = [{name: TensorBytes.of(array) for name, array in case.feeds.items()} for case in cases]
    core = [{tensor.name: TensorBytes.of(case.core[tensor.name]) for tensor in manifest.core} for case in cases]
    if [(dict(case.tensors), dict(case.core)) for case in golden.cases] != [*zip(feeds, core, strict=True)]:
        raise PackageError(
            f"package {manifest.name}: {GOLDEN}", "is of other rows than the student's test part and edges",
            expected="the cases that export makes of them", remedy="export the student again",
        )  # fmt: skip
    rungs = [Rung("student", "torch", 0.0, 0.0, None, holds=True, outcome="the reference of all rungs")]
    limits = Limits.of(trained.task, trained.student, trained.task.material.parts.test)
    rungs.append(_exported(trained, manifest, cases, limits))
    for name, create in runtimes.items():
        try:
            runtime = create()
        except DependencyError as error:
            rungs.append(Rung("", name, 0.0, None, None, holds=None, outcome=f"not climbed: {error}"))
            continue
        # In the order of conversion: INT8 in ONNX comes before any file in another format.
        files = sorted(runtime.files(manifest), key=lambda file: (file.format != "onnx", file.precision))
        for file in files:
            ask = partial(runtime.ask, package, file, golden.cases)
            rungs.append(_rung(file.file, name, limits, file.precision, cases, ask))
    return Ladder(package.files.folder, rungs)


def _rung(
    form: str, runtime: str, limits: Limits, precision: str, cases: Sequence[Case],
    ask: Callable[[], Sequence[Answers]],
) -> Rung:  # fmt: skip
    tolerance = limits.largest(precision)
    unmeasured = partial(Rung, form, runtime, tolerance, None, None)
    try:
        answers = ask()
    except (GateFailed, PackageError) as error:
        return unmeasured(holds=False, outcome=error.found)
    except DependencyError as error:  # the runtime is installed, but cannot be used
        return unmeasured(holds=None, outcome=f"not climbed: {error}")
    apart = [(far, number) for number, (case, outputs) in enumerate(zip(cases, answers, strict=True))
             for far in limits.compare(precision, case, outputs)]  # fmt: skip
    far, number = max(apart, key=lambda each: each[0].share)
    case = number if far.by else None
    text = "the student's answers" if case is None else f"{far.place}: {far.says('the student in torch')}"
    return Rung(form, runtime, tolerance, max(each.by for each, _ in apart), case, holds=far.share <= 1, outcome=text)


def _exported(trained: Restored, manifest: Manifest, cases: Sequence[Case], limits: Limits) -> Rung:
    """The result of torch.export, run with the sizes of each case."""
    form, tolerance = "exported program", limits.largest("fp32")
    network = trained.task.network(trained.student)
    if network is None:
        return Rung(form, "torch", tolerance, None, None, holds=None, outcome="the graph is written node by node")
    keys = trained.task.keys if network is trained.student else [output.name for output in manifest.outputs]

    def ask() -> list[Answers]:
        answers: list[Answers] = []
        try:
            for case in cases:
                tensors = tuple(map(torch.from_numpy, case.feeds.values()))
                outputs = named(torch.export.export(network, tensors).module()(*tensors), keys, form)
                answers.append({key: outputs[key].numpy() for key in case.expected})
        except Exception as error:  # of any kind: torch's have nothing in common
            raise GateFailed(form, f"torch.export refuses it: {error}"[:300]) from error
        return answers

    return _rung(form, "torch", limits, "fp32", cases, ask)
