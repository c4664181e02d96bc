"""What a teacher of tables and its student answer to rows that their table may not have."""

import numpy as np
from torch import nn

from isthmus.distill.labels import Binary, Number
from isthmus.distill.tabular.student import Student, core_feeds
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tabular.teacher import Boosting
from isthmus.distill.tabular.tensors import seen
from isthmus.distill.tasks.samples import Columns
from isthmus.distill.tasks.task import Case, Task
from isthmus.distill.types import Array
from isthmus.features.errors import RequestError
from isthmus.package.inputs import feeds


class Scores:
    """The scores of a teacher and its student, in the form of the graph's answer: a number for each row, float64 (n,).

    Attributes:
        task: theirs.
        student_inputs: the inputs of the student's graph.

    Raises:
        RequestError: the task answers with something else than one number for a row, or teacher and student with
            numbers that have no scale in common.
    """

    def __init__(self, task: Task, student: nn.Module) -> None:
        if not isinstance(task, TabularTask) or not isinstance(task.declared.label, Binary | Number):
            material = task.material
            kind = type(task.declared.label).__name__ if isinstance(task, TabularTask) else material.declaration.kind
            raise RequestError(
                material.declaration.where, f"teacher and student of {kind} have no score in common",
                expected="a Tabular with a label that is Binary or a Number",
            )  # fmt: skip
        teacher = task.teacher()
        assert isinstance(student, Student)  # noqa: S101 - of such a task
        assert isinstance(teacher, Boosting)  # noqa: S101 - likewise
        self.task, self._student, self.boosting = task, student, teacher
        self._material = task.material
        self.student_inputs = task.material.request_inputs.fed(task.material.student_inputs)

    def teacher(self, rows: Columns) -> Array:
        """Of rows with a column for each of the teacher's inputs."""
        count = len(next(iter(rows.values())).data)
        return self.scores(self.boosting.answers(seen(rows, self._material.teacher_inputs, count)))

    def scores(self, answers: Array) -> Array:
        """Of a teacher's answers, such as those that are kept."""
        return self._student.answer.computed(answers)

    def student(self, rows: Columns) -> tuple[Array, Case]:
        """Of rows with a column for each input of the graph, in torch; NaN where a request transform refuses the row.

        With the case that asks the model files of a package the same.
        """
        complete, refused = self._material.request_inputs.complete(rows)
        data = seen(complete, self._material.student_inputs, len(refused))
        core = core_feeds(*self._student.prepare(data))
        scores = self._student.answer.computed(self._student.logits(data)).astype(np.float64)
        scores[refused] = np.nan
        return scores, Case(feeds(self.student_inputs, rows), {}, core=core)
