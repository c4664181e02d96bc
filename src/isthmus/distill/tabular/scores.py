"""Scores of a tabular teacher and its student for rows outside the training set."""

import numpy as np
from torch import nn

from isthmus.distill.labels import Binary, Number
from isthmus.distill.tabular.student import Student, core_feeds
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tabular.tensors import network_inputs
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import Array
from isthmus.features.errors import RequestError
from isthmus.package.inputs import feeds


class Scores:
    """Computes scores of a Tabular's teacher and student, float64 (n,): probabilities of a 1, or numbers.

    Used to compare both on rows outside the training set. Raises a RequestError for other tasks, and for labels that
    are classes or ranks.
    """

    def __init__(self, task: Task, student: nn.Module) -> None:
        if not isinstance(task, TabularTask) or not isinstance(task.declared.label, Binary | Number):
            material = task.material
            kind = type(task.declared.label).__name__ if isinstance(task, TabularTask) else material.declaration.kind
            raise RequestError(
                material.declaration.where, f"teacher and student of {kind} do not share a score",
                expected="a Tabular with a label that is Binary or a Number",
            )  # fmt: skip
        teacher = task.teacher()
        assert isinstance(student, Student)  # noqa: S101 - the task is tabular
        self.task, self._student, self.teacher_model = task, student, teacher
        self._material = task.material
        self.student_inputs = task.material.request_inputs.graph_inputs(task.material.student_inputs)

    def teacher(self, rows: Columns) -> Array:
        if isinstance(self.teacher_model, UserTeacher):
            return self.from_outputs(self.teacher_model.answers(rows))
        count = len(next(iter(rows.values())).data)
        return self.from_outputs(self.teacher_model.answers(network_inputs(rows, self._material.teacher_inputs, count)))

    def from_outputs(self, answers: Array) -> Array:
        return self._student.answer.from_scores(answers)

    def student(self, rows: Columns) -> tuple[Array, Case]:
        """Return the student's scores for rows outside the training set, and inputs to run its package on these rows.

        `rows` has a column of values per raw input of the graph. Scores are NaN in rows that a request transform
        rejects. The returned case has the inputs of the graph, but no expected outputs.
        """
        complete, refused = self._material.request_inputs.complete(rows)
        data = network_inputs(complete, self._material.student_inputs, len(refused))
        core = core_feeds(*self._student.prepare(data))
        scores = self._student.answer.from_scores(self._student.logits(data)).astype(np.float64)
        scores[refused] = np.nan
        return scores, Case(feeds(self.student_inputs, rows), {}, core=core)
