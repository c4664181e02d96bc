"""A model file before it is shipped: opened as it is served, and compared with the student in torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import onnxruntime
from torch import nn

from isthmus.distill.onnx.footprint import Footprint, footprint
from isthmus.distill.onnx.runtime import Run, ask, predict, session
from isthmus.distill.tasks.answers import graph_answers
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import Answers, Array, Index, spread
from isthmus.features.errors import ConfigurationError, PackageError, Problem
from isthmus.features.package.inputs import Feeds
from isthmus.features.package.manifest import Package


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

    def compare(self, run: Run, *, core: bool = False) -> tuple[list[dict[str, Array]], float]:
        """The outputs of a model, or of its core, for the golden cases, and the largest difference in any case.

        Raises a ConfigurationError if `Task.expected` lacks an output of the graph.
        """
        cases = (*self.golden, *self.sample)
        outputs = [run(case.core if core else case.feeds) for case in cases]
        if lacking := outputs[0].keys() - cases[0].expected.keys():
            says = f"the student says {', '.join(cases[0].expected)}"
            problem = Problem(f"output {min(lacking)} of its graph", says, "what `expected` says")
            raise ConfigurationError(self.task.material.declaration.where, [problem])
        # np.max: Python's max loses a NaN.
        worst = np.max([difference(case.expected, answer) for case, answer in zip(cases, outputs, strict=True)])
        return outputs[: len(self.golden)], float(worst)

    def quality(self, run: Run, *, core: bool = False) -> dict[str, float]:
        """The task's measures of the answers of a model, or of its core, for `rows`."""
        return self.task.quality(graph_answers(self.task, run, self.rows, core=core), self.rows, self.teacher)


def sample_cases(task: Task, student: nn.Module, rows: Index) -> list[Case]:
    """As many of the rows as the verdict compares, evenly spread."""
    sample = rows[spread(len(rows), task.compared)]
    return [task.case(student, batch) for batch in task.graph_batches(sample)]


def difference(expected: Answers, outputs: Answers) -> float:
    """The largest absolute difference; NaN if a number is missing or an output has another shape."""
    if any(values.shape != expected[name].shape for name, values in outputs.items()):
        return math.nan
    differences = [np.abs(values.astype(np.float64) - expected[name]).max(initial=0.0)
                   for name, values in outputs.items()]  # fmt: skip
    return float(np.max(differences))


def require_student(package: Package, student: str) -> None:
    """Raises a PackageError, with both identities, if a package is of another student."""
    if (made := package.manifest.model) != student:
        raise PackageError(
            str(package.files.folder), f"made from student {made}", expected=student, remedy="export the student again"
        )
