"""A teacher's cached outputs for the rows of a task, and the cost of a teacher."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from threadpoolctl import threadpool_limits

from isthmus.distill.accelerator import threads
from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.outputs.cache import OutputCache
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


def open_outputs(task: Task, teacher: Teacher, rows: Index, cache: Path, progress: Progress) -> OutputCache:
    """Open the cache of a teacher's outputs for some rows of a task, before training or counting missing outputs.

    Create the cache's folder in `cache` if needed. The result is indexed by position in `rows`, which are row indexes
    of the task's table. It computes a missing output when it is first read. Outputs per class get the order of the
    task's classes. Raise ConfigurationError if `teacher` is not a `Teacher`, or if its labels are unknown or are not
    exactly the task's classes.
    """
    if not isinstance(teacher, Teacher):
        raise ConfigurationError(
            f"{task.material.declaration.where}: task",
            [Problem("its teacher", f"a {type(teacher).__name__}", "a Teacher of isthmus.distill.teachers")],
            remedy="wrap it: NetworkTeacher, PretrainedTeacher, EstimatorTeacher or FunctionTeacher (docs/teachers.md)",
        )
    if task.classes is not None and not {*BY_CLASS}.isdisjoint(teacher.keys):
        teacher = teacher.relabelled(task.classes)
    return OutputCache(
        cache, teacher, task.identities()[rows], lambda places: task.asked(rows[places]),
        contract=task.material.contract, form=task.form, options=task.options(), batch=task.at_once,
        note=lambda text: progress(text, 0.0),
    )  # fmt: skip


def remaining_calls(teacher: Teacher, outputs: OutputCache, first: Index) -> str:
    if not (teacher.costly and outputs.missing):
        return ""
    extra = [(2, "to check that outputs repeat"), (0 if (outputs.path / _FILE).exists() else 1, "to time a row")]
    calls = outputs.calls(first)
    words = "".join(f", {count} {why}" for count, why in extra if count)
    return f"{calls + sum(count for count, _ in extra):,} calls: {calls:,} for {outputs.missing:,} rows{words}"


def complete_outputs(  # noqa: PLR0913 - all parts of a pass
    task: Task, teacher: Teacher, rows: Index, cache: Path, progress: Progress, outputs: OutputCache | None = None,
    *, paused: Callable[[float], None] = lambda _seconds: None,
) -> tuple[OutputCache, TeacherCost]:  # fmt: skip
    """Compute the teacher's outputs that the cache lacks, and measure the teacher's cost. Return outputs and cost.

    Training calls this first, since a loss needs the outputs of all its rows. Both results are written to the folder
    `cache`, and a second call only reads them. Pause while servers on this machine need its cores.

    `rows` are row indexes of the task's table. `outputs` is the result of `open_outputs` for the same arguments, if the
    caller already has it. `paused` is called with the seconds of each pause.

    Raises:
        ConfigurationError: the teacher does not fit the task, is not frozen, or lacks an output.
        DataError: an output is not finite, does not fit float16, or has another size than before; or outputs are
            missing and the teacher itself is not available.
        DependencyError: the cache cannot be written.
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
