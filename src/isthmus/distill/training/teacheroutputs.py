"""A teacher's cached outputs for the rows of a task, and the cost of a teacher."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from threadpoolctl import threadpool_limits

from isthmus.distill.accelerator import threads
from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.teacher import BY_CLASS, Teacher
from isthmus.distill.throttle.policy import throttled
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.files import write_atomically
from isthmus.features.progress import Progress

_FILE = "facts.json"


class TeacherCost(msgspec.Struct, frozen=True):
    """The cost of a teacher: its size (None if unknown), and the latency of one row on one thread, in microseconds."""

    parameters: int | None
    bytes: int | None
    p50_us: float
    p99_us: float
    runtime: str

    @property
    def most_parameters(self) -> int | None:
        return None if self.parameters is None or self.bytes is None else most_parameters(self.parameters, self.bytes)


def most_parameters(parameters: int, size: int) -> int:
    """Return the maximum number of parameters that a student of this teacher may have.

    It is the teacher's own number, `parameters`, or `size` / 4 if that is more. `size` is the teacher's size in bytes,
    so `size` / 4 counts float32 numbers. Trees have more numbers than parameters, since each node is a record.
    """
    return max(parameters, size // 4)


def open_outputs(task: Task, teacher: Teacher, rows: Index, cache: Path, progress: Progress) -> TeacherOutputs:
    """Open the cached outputs of a teacher for the given rows of a task. Create their folder in `cache` if needed.

    The result is indexed by position in `rows`, and computes missing outputs when they are first read. If the task has
    classes, outputs per class get the task's order. Raise ConfigurationError if `teacher` is not a `Teacher`, or if it
    has outputs per class whose labels differ from the task's classes.
    """
    if not isinstance(teacher, Teacher):
        raise ConfigurationError(
            f"{task.material.declaration.where}: task",
            [Problem("its teacher", f"a {type(teacher).__name__}", "a Teacher of isthmus.distill.teachers")],
            remedy="wrap it: NetworkTeacher, PretrainedTeacher, EstimatorTeacher or FunctionTeacher (docs/teachers.md)",
        )
    if task.classes is not None and not {*BY_CLASS}.isdisjoint(teacher.keys):
        teacher = teacher.relabelled(task.classes)
    return TeacherOutputs(
        cache, teacher, task.identities()[rows], lambda places: task.asked(rows[places]),
        contract=task.material.contract, form=task.form, options=task.options(), batch=task.at_once,
        note=lambda text: progress(text, 0.0),
    )  # fmt: skip


def remaining_calls(teacher: Teacher, outputs: TeacherOutputs, first: Index) -> str:
    """Describe how many calls a `FunctionTeacher` still needs, to announce their cost before training.

    `first` has the indexes of the rows that are computed first. Return "" for other teachers, and if no output is
    missing.
    """
    if not (teacher.costly and outputs.missing):
        return ""
    extra = [(2, "to check that outputs repeat"), (0 if (outputs.path / _FILE).exists() else 1, "to time a row")]
    calls = outputs.calls(first)
    words = "".join(f", {count} {why}" for count, why in extra if count)
    return f"{calls + sum(count for count, _ in extra):,} calls: {calls:,} for {outputs.missing:,} rows{words}"


def complete_outputs(  # noqa: PLR0913 - all parts of a pass
    task: Task, teacher: Teacher, rows: Index, cache: Path, progress: Progress, outputs: TeacherOutputs | None = None,
    *, paused: Callable[[float], None] = lambda _seconds: None,
) -> tuple[TeacherOutputs, TeacherCost]:  # fmt: skip
    """Compute a teacher's missing outputs for some rows of a task, and measure the teacher's cost. Return both.

    Write both to `cache`. If both are already there, the teacher is not even loaded. Pass `outputs` if `open_outputs`
    was already called with the same arguments. Pause while servers need the machine, and call `paused` with the seconds
    of each pause. Raise the errors of `open_outputs` and of `TeacherOutputs.fill`.
    """
    outputs = outputs or open_outputs(task, teacher, rows, cache, progress)
    if outputs.missing:
        with throttled(task.material.latency, progress, torch.get_num_threads(), paused) as on_progress:
            outputs.fill(on_progress)
    else:
        progress(f"cached outputs {outputs.path.name[:12]}", 1.0)
    file = outputs.path / _FILE
    with suppress(OSError, msgspec.MsgspecError):
        return outputs, msgspec.json.decode(file.read_bytes(), type=TeacherCost)
    with threadpool_limits(1), threads(1):
        row = task.asked(rows[:1])
        # A function may be a service that charges per call, so call it once. Large teachers stop after 0.5 s.
        calls = 1 if teacher.costly else 200
        (times,) = interleaved({"": lambda: teacher.ask(row)}, calls=calls, rounds=1, seconds=0.5).values()
    parameters, size = teacher.size() or (None, None)
    cost = TeacherCost(parameters, size, times["p50_us"], times["p99_us"], f"{teacher.runtime}, 1 thread")
    write_atomically(file, msgspec.json.encode(cost))
    return outputs, cost
