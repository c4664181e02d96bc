"""What a student learns from: batches with what the teacher says of them. And how one is trained on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.distill.device import enough_memory, threads
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.task import Task, answers, student_answers
from isthmus.distill.training.loop import Training
from isthmus.distill.types import Index
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.progress import Progress

HELD_BYTES = 256 << 20
"""Outputs of a teacher that are not larger are held in memory while a student learns from them."""


class TeacherBatch(NamedTuple):
    """A batch on the training's device."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None
    teacher: Mapping[str, Tensor]


class TeacherBatches:
    """Rows to learn from, in the order of their numbers.

    Args:
        task: gives the batches.
        rows: numbers of the rows.
        outputs: of the teacher.
        device: where a batch must be.
        with_teacher: whether the teacher's outputs are wanted at all.
    """

    def __init__(
        self, task: Task, rows: Index, outputs: TeacherOutputs, device: torch.device, *, with_teacher: bool
    ) -> None:
        self._task, self._rows, self._outputs, self._device = task, torch.from_numpy(rows), outputs, device
        self._with_teacher = with_teacher
        self._held: dict[str, Tensor] | None = None
        if with_teacher and len(rows):
            one = sum(tensor.nbytes for tensor in outputs[rows[:1]].values())
            self._held = outputs[rows] if one * len(rows) <= HELD_BYTES else None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, places: Tensor) -> TeacherBatch:
        rows = self._rows[places]
        inputs, labels = self._task.batch(rows)
        taught: Mapping[str, Tensor] = {}
        if self._held is not None:
            taught = {key: tensor.index_select(0, places) for key, tensor in self._held.items()}
        elif self._with_teacher:
            taught = self._outputs[rows.numpy()]
        return TeacherBatch(
            tuple(self._there(tensor) for tensor in inputs),
            None if labels is None else self._there(labels),
            {key: self._there(tensor) for key, tensor in taught.items()},
        )

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


class _Student(nn.Module):
    """A student with the parts of its objective that learn, too: one optimizer has the weights of both."""

    def __init__(self, student: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.student, self.objective = student, objective

    def forward(self, *inputs: Tensor) -> Any:
        """What the student answers."""
        return self.student(*inputs)


@dataclass(frozen=True)
class StudentRun:
    """A training that is over.

    Attributes:
        history: of each evaluation the step, the mean loss and terms since the one before, and the metric.
        best: the metric of the weights that were kept, on the validation part.
        steps: of the optimizer.
        rows: that were learned from, each as often as it was.
        flops: floating-point operations of all forward and backward passes, as torch counts them: those of products of
            matrices and convolutions.
        seconds: that all these steps took, without pauses.
        slowed: seconds of these on fewer cores, for servers.
        paused: seconds in which it did nothing for them.
        waited: seconds of these since it last went on.
        peak: bytes of memory (`device.peak`), whenever that was.
        threads: of the CPU, that it used.
    """

    history: list[dict[str, float]]
    best: float
    steps: int
    rows: int
    flops: float
    seconds: float
    slowed: float
    paused: float
    waited: float
    peak: int
    threads: int


def train_student(
    task: Task, student: nn.Module, objective: Objective, outputs: TeacherOutputs, settings: TrainingSettings,
    accelerator: Accelerator, folder: Path, progress: Progress,
) -> StudentRun:  # fmt: skip
    """Trains a student in place, and leaves it with the best weights on the CPU.

    Raises:
        ConfigurationError: settings, objective, student and teacher do not fit each other; said before the first step.
        DependencyError: memory or the disk is full.
        GateFailed: a loss, a gradient or an answer is not finite; the student keeps the best weights it had.
        Stopped: by SIGINT or SIGTERM.
    """
    parts, device = task.material.parts, accelerator.device
    where = task.material.declaration.where
    data_id = sha256({"content": task.content(), "outputs": outputs.path.name, "terms": [*objective.terms]})
    lessons = TeacherBatches(task, parts.train, outputs, device, with_teacher=objective.asks_teacher)
    name = f"validation_{task.metric}"

    def step(module: nn.Module, lesson: TeacherBatch, done: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        found = answers(task, module(*lesson.inputs))
        loss, terms = objective(found, lesson.teacher, lesson.labels, done)
        return loss, terms

    expected = {key: tensor.float().numpy() for key, tensor in outputs[parts.validation].items()}

    def evaluate(module: nn.Module) -> dict[str, float]:
        found = student_answers(task, module, parts.validation, device)
        finite = all(np.isfinite(array).all() for array in found.values())
        return {name: task.score(found, parts.validation, expected) if finite else math.nan}

    pupil = _Student(student, objective)
    flops = _checked(pupil, lessons, objective, task, settings, device)
    used = min(task.material.profile.threads, 1 + settings.batch // task.rows_per_thread)
    try:
        with threads(used):
            training = Training(
                pupil, lessons, step, settings, accelerator, evaluate, folder, data_id, where, progress,
                task.material.latency,
            )  # fmt: skip
            history = training.run()
    finally:
        pupil.cpu()
    metrics = [entry[name] for entry in history]
    best, steps = max(metrics) if task.more else min(metrics), int(history[-1]["step"])
    epochs, left = divmod(steps, math.ceil(len(lessons) / settings.batch))
    rows = epochs * len(lessons) + left * settings.batch
    took = training.standing
    seconds, slowed, paused = (round(one, 3) for one in (took.seconds, took.slowed, took.paused))
    return StudentRun(
        history, best, steps, rows, flops * rows, seconds, slowed, paused, training.waited, took.peak, used
    )


def _checked(
    pupil: _Student,
    lessons: TeacherBatches,
    objective: Objective,
    task: Task,
    settings: TrainingSettings,
    device: torch.device,
) -> float:
    """Floating-point operations of learning from one row, counted halfway on the first rows, where all fits each other.

    The smallest part of an epoch is tried, too: a batch norm takes no single row, some losses need neighbors.
    """
    where = task.material.declaration.where
    full, rest = min(settings.batch, len(lessons)), len(lessons) % settings.batch or settings.batch
    rows = math.ceil(full / min(settings.accumulation, full))
    least = min(count // min(settings.accumulation, count) for count in (full, min(rest, full)))
    pupil.to(device)
    state = {name: tensor.clone() for name, tensor in pupil.state_dict().items()}
    with torch.random.fork_rng(), enough_memory(f"{where}: step 1", device, settings, rows):
        first = lessons[torch.arange(rows)]
        with torch.no_grad():
            objective.check(answers(task, pupil(*first.inputs)), first.teacher, first.labels)
        with FlopCounterMode(display=False) as counter:
            objective(answers(task, pupil(*first.inputs)), first.teacher, first.labels, 0.5)[0].backward()
        if least < rows:
            _require_least(pupil, lessons[torch.arange(least)], objective, task, least)
    pupil.zero_grad()
    pupil.load_state_dict(state)  # a batch norm counts what it sees
    return float(counter.get_total_flops()) / rows


def _require_least(pupil: _Student, lesson: TeacherBatch, objective: Objective, task: Task, rows: int) -> None:
    """Refuses a part of an epoch that is too small, where a larger one has been found to fit."""
    place, remedy = f"parts of an epoch: the smallest, of {rows}", "set another batch or accumulation"
    try:
        with torch.no_grad():
            objective.check(answers(task, pupil(*lesson.inputs)), lesson.teacher, lesson.labels)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error.where}: {place}", error.problems, remedy=remedy) from error
    except (ValueError, RuntimeError) as error:  # of the student's modules
        where = f"{task.material.declaration.where}: student"
        raise ConfigurationError(where, [Problem(place, str(error))], remedy=remedy) from error
