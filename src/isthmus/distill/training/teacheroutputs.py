"""A teacher's cached outputs for the rows of a task, and the cost of a teacher."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
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

    def opened(of: Teacher, part: Index) -> OutputCache:
        return OutputCache(
            cache, of, task.identities()[part], lambda places: task.asked(part[places]),
            contract=task.material.contract, form=task.form, options=task.options(), batch=task.at_once,
            note=lambda text: progress(text, 0.0),
        )  # fmt: skip

    outputs = opened(teacher, rows)
    if outputs.missing and teacher.parts:
        everything = np.arange(task.material.table.num_rows)  # a part is read by row numbers
        parts = [None if part is None else opened(part, everything) for part in teacher.parts]
        reading = teacher.reading([None if part is None else part.float32 for part in parts])
        outputs.compute_from(reading, [part for part in parts if part is not None])
    return outputs


def announce_calls(teacher: Teacher, outputs: OutputCache, first: Index, note: Callable[[str], None]) -> Teacher:
    """Announce the calls of each costly teacher; return the teacher with which to check that outputs repeat.

    It reads the parts whose outputs are all cached instead of asking them again. `first` has the positions of the rows
    that are read first.
    """
    if not outputs.missing:
        return teacher
    complete = {}
    for each in outputs.parts or [outputs]:
        of = each.teacher if outputs.parts else teacher
        calls, rows = outputs.calls(first, each if outputs.parts else None)
        if not rows:
            complete[of] = each.float32
        repeated, timed = 2 if rows else 0, 0 if (each.path / _FILE).exists() else 1
        if isinstance(of, Teacher) and of.costly and (total := calls + repeated + timed):
            extra = [(repeated, "to check that outputs repeat"), (timed, "to time a row")]
            words = "".join(f", {count} {why}" for count, why in extra if count)
            note(f"teacher {of.name} runs in {total:,} calls: {calls:,} for {rows:,} rows{words}")
    return (
        teacher.reading([None if part is None else complete.get(part) for part in teacher.parts])
        if complete
        else teacher
    )


def complete_outputs(  # noqa: PLR0913 - all parts of a pass
    task: Task, teacher: Teacher, rows: Index, cache: Path, progress: Progress, outputs: OutputCache | None = None,
    *, paused: Callable[[float], None] = lambda _seconds: None, processes: int = 1,
) -> tuple[OutputCache, TeacherCost]:  # fmt: skip
    """Compute the teacher's outputs that the cache lacks, and measure the teacher's cost. Return outputs and cost.

    Training calls this first, since a loss needs the outputs of all its rows. Both results are written to the folder
    `cache`, and a second call only reads them. Pause while servers on this machine need its cores.

    `rows` are row indexes of the task's table. `outputs` is the result of `open_outputs` for the same arguments, if the
    caller already has it. `paused` is called with the seconds of each pause. With several `processes`, compute the
    share of the first one.

    Raises:
        ConfigurationError: the teacher does not fit the task, is not frozen, or lacks an output.
        DataError: an output is not finite, does not fit float16, or has another size than before; or outputs are
            missing and the teacher itself is not available.
        DependencyError: the cache cannot be written.
    """
    outputs = outputs or open_outputs(task, teacher, rows, cache, progress)
    if outputs.missing:
        with throttled(task.material.latency, progress, torch.get_num_threads(), paused) as on_progress:
            outputs.fill(on_progress, processes=processes)
    else:
        progress(f"cached outputs {outputs.path.name[:12]}", 1.0)
    return outputs, _cost(task, teacher, rows, outputs)


def _cost(task: Task, teacher: Teacher, rows: Index, outputs: OutputCache) -> TeacherCost:
    file = outputs.path / _FILE
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(file.read_bytes(), type=TeacherCost)
    parameters, size = teacher.size() or (None, None)
    parts = [_cost(task, part.teacher, rows, part) for part in outputs.parts if isinstance(part.teacher, Teacher)]
    if parts:
        p50, p99 = sum(part.p50_us for part in parts), sum(part.p99_us for part in parts)
    else:
        p50, p99 = _times(task, teacher, rows)
    cost = TeacherCost(parameters, size, p50, p99, f"{teacher.runtime}, 1 thread")
    write_atomically(file, msgspec.json.encode(cost))
    return cost


def _times(task: Task, teacher: Teacher, rows: Index) -> tuple[float, float]:
    with threadpool_limits(1), threads(1):
        row = task.asked(rows[:1])
        # A function may be a service that charges per call, so call it once. Large teachers stop after 0.5 s.
        calls = 1 if teacher.costly else 200
        (times,) = interleaved({"": lambda: teacher.ask(row)}, calls=calls, rounds=1, seconds=0.5).values()
    return times["p50_us"], times["p99_us"]
