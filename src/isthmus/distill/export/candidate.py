"""A model file before it is shipped: loaded as in serving, and compared with the student in torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import onnxruntime
from scipy.special import softmax
from torch import nn

from isthmus.distill.onnx.footprint import Footprint, footprint
from isthmus.distill.onnx.runtime import Run, ask, predict, session
from isthmus.distill.tasks.answers import graph_answers
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import Answers, Array, Index, evenly_spaced, inlier_mask
from isthmus.features.errors import ConfigurationError, PackageError, Problem
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import Package
from isthmus.package.replay import Deviation, deviation

SCALE_ROWS, MIDDLE = 256, (0.025, 0.975)
"""Number of rows, and the quantiles whose distance is the scale of an output."""
LOGITS, PROBABILITIES = "logits", "softmax(logits)"


@dataclass(frozen=True, eq=False)
class Candidate:
    model: bytes
    threads: int

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        return session(self.model, self.threads)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return ask(self._session, feeds)

    def call(self, row: Feeds) -> Callable[[], Array]:
        return partial(predict, self._session, row)

    def footprint(self, row: Feeds, max_load_ms: float | None) -> Footprint:
        return footprint(self.model, row, self.threads, max_load_ms)


@dataclass(frozen=True, eq=False)
class ParityLimits:
    """The largest allowed differences between model files and their student, by precision and output.

    A tolerance that the task declares is the limit of every output, and `scales` is empty. The default,
    `Task.tolerance`, is multiplied by the scale of each floating-point output, and two float32 steps are added for
    rounding. Numbers much larger than the others, like the -1e9 of a mask, do not affect the scale. Logits of a task
    with `classes` are compared as probabilities, which applications use: they move less.
    """

    task: Task
    tolerances: Mapping[str, float]
    scales: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, task: Task, student: nn.Module, rows: Index) -> "ParityLimits":
        tolerances = task.tolerances(student)
        if tolerances is not Task.tolerance:
            return cls(task, tolerances, {})
        batches = task.graph_batches(rows[evenly_spaced(len(rows), SCALE_ROWS)])
        answers = [task.case(student, batch).expected for batch in batches]
        logits = answers[0].get(LOGITS)
        if task.classes and logits is not None and logits.shape[-1:] == (len(task.classes),):
            answers = [*map(_as_probabilities, answers)]
        scales = {}
        for name in answers[0]:
            values = np.concatenate([answer[name].ravel() for answer in answers])
            if values.dtype.kind == "f" and (values := values[inlier_mask(values)].astype(np.float64)).size:
                low, high = np.quantile(values, MIDDLE)
                scales[name] = max(1.0, float(high - low)), 2 * float(np.spacing(np.float32(np.abs(values).max())))
        return cls(task, tolerances, scales)

    def limit(self, precision: str, output: str) -> float:
        scale, rounding = self.scales.get(output, (1.0, 0.0))
        return self.tolerances[self._key(precision)] * scale + rounding

    def largest(self, precision: str) -> float:
        limits = (self.limit(precision, name) for name in self.scales)
        return max(limits, default=self.tolerances[self._key(precision)])

    def _key(self, precision: str) -> str:
        return precision if precision in self.tolerances else "int8"

    def comparable(self, outputs: Answers) -> Answers:
        """Return the numbers to compare instead of `outputs`, by a name for messages, to which `limit` applies."""
        return _as_probabilities(outputs) if PROBABILITIES in self.scales else outputs

    def compare(self, precision: str, case: Case, outputs: Answers) -> list[Deviation]:
        expected = self.comparable(case.expected)
        return [
            deviation(name, expected[name], values, self.limit(precision, name), widths=True, row_name=case.row_name)
            for name, values in self.comparable(outputs).items()
        ]

    def source(self, precision: str) -> str:
        if isinstance(self.task.material.declaration.task, str):
            key = self._key(precision)
            name = f'tolerance["{key}"]'
            scaled = f"the default {name}, {self.tolerances[key]:g}, times the scale of the output"
            return scaled if self.scales else f"{name} of {type(self.task).__name__}"
        return f"the tolerance of this kind of task in {precision}"

    def tolerance_line(self, precision: str, difference: float) -> str:
        if not isinstance(self.task.material.declaration.task, str) or not math.isfinite(difference):
            return ""
        largest = {name: self.largest(name) for name in self.tolerances} | {precision: 1.2 * difference}
        values = ", ".join(f'"{name}": {_rounded_up(value):g}' for name, value in largest.items())
        return f"tolerance = {{{values}}} in class {type(self.task).__name__}"


def _as_probabilities(outputs: Answers) -> Answers:
    others = {name: values for name, values in outputs.items() if name != LOGITS}
    return {PROBABILITIES: softmax(np.atleast_1d(outputs[LOGITS]), -1), **others} if LOGITS in outputs else others


def _rounded_up(value: float) -> float:
    digits = 1 - math.ceil(math.log10(value))
    return math.ceil(value * 10**digits) / 10**digits if digits < 300 else value


@dataclass(frozen=True, eq=False)
class StudentReference:
    """The student's outputs, which its model files are compared with.

    Metrics are measured on `rows`, for which `teacher` has the teacher's outputs. Differences are measured on the
    `golden` cases, whose outputs the package records, and on `sample`, cases from further rows.
    """

    task: Task
    rows: Index
    teacher: Answers
    golden: Sequence[Case]
    sample: Sequence[Case]

    def compare(
        self, run: Run, limits: ParityLimits, precision: str, *, core: bool = False
    ) -> tuple[list[dict[str, Array]], list[Deviation]]:
        """Run a model file on the golden cases and further cases, and compare its outputs with the student's.

        Args:
            run: maps inputs to outputs by running the file.
            limits: largest differences allowed; a larger difference does not raise an error here.
            precision: precision of the file, which selects the limit.
            core: True if the file has only the numeric part of the graph and takes `Case.core` instead of `Case.feeds`.

        Returns:
            The file's outputs for the golden cases, and the largest deviation of each output in each case.

        Raises:
            ConfigurationError: the task's `expected` lacks an output of the file.
        """
        cases = (*self.golden, *self.sample)
        outputs = [run(case.core if core else case.feeds) for case in cases]
        if missing := outputs[0].keys() - cases[0].expected.keys():
            found = f"`expected` only returns {', '.join(cases[0].expected)}"
            problem = Problem(f"output {min(missing)} of its graph", found, "the graph's outputs from `expected`")
            raise ConfigurationError(self.task.material.declaration.where, [problem])
        deviations = [far for case, answer in zip(cases, outputs, strict=True)
                 for far in limits.compare(precision, case, answer)]  # fmt: skip
        return outputs[: len(self.golden)], deviations

    def quality(self, run: Run, *, core: bool = False) -> dict[str, float]:
        return self.task.quality(graph_answers(self.task, run, self.rows, core=core), self.rows, self.teacher)


def sample_cases(task: Task, student: nn.Module, rows: Index) -> list[Case]:
    sample = rows[evenly_spaced(len(rows), task.compared)]
    return [task.numbered_case(student, batch) for batch in task.graph_batches(sample)]


def require_student(package: Package, student: str) -> None:
    if (made := package.manifest.model) != student:
        raise PackageError(
            str(package.files.folder), f"made from student {made}", expected=student, remedy="export the student again"
        )
