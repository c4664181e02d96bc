"""A model file before it is shipped: opened as it is served, and compared with the student in torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import onnxruntime
from torch import nn

from isthmus.distill.onnx.footprint import Footprint, footprint
from isthmus.distill.onnx.runtime import Run, ask, predict, session
from isthmus.distill.tasks.answers import graph_answers
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import Answers, Array, Index, spread, usual
from isthmus.features.errors import ConfigurationError, PackageError, Problem
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import Package
from isthmus.package.replay import Deviation, deviation

SCALE_ROWS, MIDDLE = 256, (0.025, 0.975)
"""Rows and quantiles between which the scale of an output is measured."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model in ONNX or ORT format, in ONNX Runtime."""

    model: bytes
    threads: int

    @cached_property
    def _session(self) -> onnxruntime.InferenceSession:
        return session(self.model, self.threads)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """All outputs by name."""
        return ask(self._session, feeds)

    def call(self, row: Feeds) -> Callable[[], Array]:
        """What is timed: the first output for a row."""
        return partial(predict, self._session, row)

    def footprint(self, row: Feeds, max_load_ms: float | None) -> Footprint:
        """Memory and load time, in a fresh process."""
        return footprint(self.model, row, self.threads, max_load_ms)


@dataclass(frozen=True, eq=False)
class Limits:
    """The largest differences of model files from their student, by precision and output.

    A declared tolerance is the limit of every output. The default, `Task.tolerance`, is multiplied by the scale of
    each output. Two float32 steps at the output's largest number are added for rounding. Numbers like the -1e9 of a
    mask, which are much larger than the others, count for neither.

    Attributes:
        tolerances: by precision.
        scales: scale and rounding of each floating-point output; empty for declared tolerances.
    """

    task: Task
    tolerances: Mapping[str, float]
    scales: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, task: Task, student: nn.Module, rows: Index) -> "Limits":
        """Return the limits of a student. Measure the scales of its outputs on some of these rows."""
        tolerances = task.tolerances(student)
        if tolerances is not Task.tolerance:
            return cls(task, tolerances, {})
        batches = task.graph_batches(rows[spread(len(rows), SCALE_ROWS)])
        answers = [task.case(student, batch).expected for batch in batches]
        scales = {}
        for name in answers[0]:
            values = np.concatenate([answer[name].ravel() for answer in answers])
            if values.dtype.kind == "f" and (values := values[usual(values)].astype(np.float64)).size:
                low, high = np.quantile(values, MIDDLE)
                scales[name] = max(1.0, float(high - low)), 2 * float(np.spacing(np.float32(np.abs(values).max())))
        return cls(task, tolerances, scales)

    def limit(self, precision: str, output: str) -> float:
        """Return the largest difference allowed for an output in a precision."""
        scale, rounding = self.scales.get(output, (1.0, 0.0))
        return self.tolerances[precision] * scale + rounding

    def largest(self, precision: str) -> float:
        """Return the largest limit of all outputs."""
        return max((self.limit(precision, name) for name in self.scales), default=self.tolerances[precision])

    def compare(self, precision: str, case: Case, outputs: Answers) -> list[Deviation]:
        """Return, for each output of a case, the number that is farthest from its expected value."""
        return [
            deviation(name, case.expected[name], values, self.limit(precision, name), widths=True,
                      row_name=case.row_name)
            for name, values in outputs.items()
        ]  # fmt: skip

    def source(self, precision: str) -> str:
        """Say in words where a limit comes from."""
        if isinstance(self.task.material.declaration.task, str):
            name = f'tolerance["{precision}"]'
            scaled = f"the default {name}, {self.tolerances[precision]:g}, times the scale of the output"
            return scaled if self.scales else f"{name} of {type(self.task).__name__}"
        return f"the tolerance of this kind of task in {precision}"

    def line(self, precision: str, apart: float) -> str:
        """Return the `tolerance` line of a task that lets a difference of `apart` pass; empty for built-in tasks."""
        if not isinstance(self.task.material.declaration.task, str) or not math.isfinite(apart):
            return ""
        largest = {name: self.largest(name) for name in self.tolerances} | {precision: 1.2 * apart}
        values = ", ".join(f'"{name}": {_rounded_up(value):g}' for name, value in largest.items())
        return f"tolerance = {{{values}}} in class {type(self.task).__name__}"


def _rounded_up(value: float) -> float:
    digits = 1 - math.ceil(math.log10(value))
    return math.ceil(value * 10**digits) / 10**digits if digits < 300 else value


@dataclass(frozen=True, eq=False)
class Reference:
    """What the model files of a student are compared with.

    Quality is measured on `rows`, with the teacher's outputs for them; differences in the golden cases, whose outputs a
    package records, and in a sample of others.
    """

    task: Task
    rows: Index
    teacher: Answers
    golden: Sequence[Case]
    sample: Sequence[Case]

    def compare(
        self, run: Run, limits: Limits, precision: str, *, core: bool = False
    ) -> tuple[list[dict[str, Array]], list[Deviation]]:
        """The outputs of a model, or of its core, for the golden cases, and the farthest numbers of all cases.

        Raises a ConfigurationError if `Task.expected` lacks an output of the graph.
        """
        cases = (*self.golden, *self.sample)
        outputs = [run(case.core if core else case.feeds) for case in cases]
        if lacking := outputs[0].keys() - cases[0].expected.keys():
            says = f"the student says {', '.join(cases[0].expected)}"
            problem = Problem(f"output {min(lacking)} of its graph", says, "what `expected` says")
            raise ConfigurationError(self.task.material.declaration.where, [problem])
        apart = [far for case, answer in zip(cases, outputs, strict=True)
                 for far in limits.compare(precision, case, answer)]  # fmt: skip
        return outputs[: len(self.golden)], apart

    def quality(self, run: Run, *, core: bool = False) -> dict[str, float]:
        """The task's measures of the answers of a model, or of its core, for `rows`."""
        return self.task.quality(graph_answers(self.task, run, self.rows, core=core), self.rows, self.teacher)


def sample_cases(task: Task, student: nn.Module, rows: Index) -> list[Case]:
    """As many of the rows as the verdict compares, evenly spread."""
    sample = rows[spread(len(rows), task.compared)]
    return [task.numbered_case(student, batch) for batch in task.graph_batches(sample)]


def require_student(package: Package, student: str) -> None:
    """Raises a PackageError, with both identities, if a package is of another student."""
    if (made := package.manifest.model) != student:
        raise PackageError(
            str(package.files.folder), f"made from student {made}", expected=student, remedy="export the student again"
        )
