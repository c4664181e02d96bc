"""What is tried before the first step, with a student that has learned nothing: all that will be asked at the end."""

from collections.abc import Callable, Collection

import onnx
import torch
from torch import nn

from isthmus.distill.declaration import EXECUTORCH
from isthmus.distill.outputs.outputs import TeacherOutputs
from isthmus.distill.pte import converted, running
from isthmus.distill.runtime import described, predict, session
from isthmus.distill.settings import Settings
from isthmus.distill.split import Index
from isthmus.distill.task import Task, asked_all
from isthmus.distill.teaching import Facts
from isthmus.features.contract import one_of
from isthmus.features.errors import ConfigurationError, GateFailed, Problem

_MEASURED = ("parameters", "bytes", "p50_us", "p99_us")


def rehearse(
    task: Task,
    outputs: TeacherOutputs,
    facts: Facts,
    settings: Settings,
    references: Collection[str],
    note: Callable[[str], None],
) -> None:
    """Measures a new student on the validation part, and runs its graph.

    Args:
        task: what will be trained.
        outputs: of the teacher for all rows.
        facts: of the teacher.
        settings: of the training.
        references: names of the others that are measured.
        note: is told which runtime the package will have no model for.

    Raises:
        ConfigurationError: the student is no smaller than its teacher, nothing is to be learned at a step, there is no
            such metric, or a gate is about a figure that no model has.
    """
    where, rows = task.material.declaration.where, task.material.parts.validation
    with torch.random.fork_rng(devices=[]):
        student, objective = task.student().eval(), task.objective()
    size = sum(weights.nbytes for weights in student.parameters())
    if facts.bytes is not None and size >= facts.bytes:
        raise ConfigurationError(
            f"{where}: student",
            [Problem("its weights", f"{size:,} bytes", f"less than the teacher's {facts.bytes:,}")],
            remedy="make the student smaller: nothing would be gained by it",
        )
    steps = settings.total(len(task.material.parts.train))
    objective.require_weight(steps, f"{where}: student")
    objective.alone(where).require_weight(steps, f"{where}: control")

    theirs = {key: tensor.float().numpy() for key, tensor in outputs[rows].items()}
    ours = asked_all(task, student, rows, torch.device("cpu"))
    quality = {*task.quality(theirs, rows, theirs), *task.quality(ours, rows, theirs)}
    if task.metric not in quality:
        raise ConfigurationError(f"{where}: metric", [Problem("of the task", repr(task.metric), one_of(quality))])
    pupils = {*quality, *_MEASURED, *task.agreement(ours, theirs)}
    known = {f"{model}.{figure}" for model in ("teacher", *references) for figure in (*quality, *_MEASURED)}
    known |= {f"{model}.{figure}" for model in ("student", "control") for figure in pupils}
    # What the task's own measures will be called is known at the end only.
    wrong = [
        gate.metric for gate in task.material.declaration.required if "." in gate.metric and gate.metric not in known
    ]
    if wrong:
        raise ConfigurationError(where, [Problem("gate", repr(metric), one_of(sorted(known))) for metric in wrong])
    model = task.model(student)
    predict(session(model.SerializeToString(), 1), task.feeds(rows[:1]))
    if EXECUTORCH in task.material.declaration.runtimes:
        try:
            _run(task, student, rows[:1], model)
        except GateFailed as error:
            note(f"the package will have no model for {EXECUTORCH}: {error}")


def _run(task: Task, student: nn.Module, row: Index, model: onnx.ModelProto) -> None:
    tensors, outputs = ([*map(described, values)] for values in (model.graph.input, model.graph.output))
    program = converted(task, student, row, tensors, outputs)
    with running(program, tensors, outputs) as run:
        run(task.feeds(row))
