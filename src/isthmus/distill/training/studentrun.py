"""Batches with teacher outputs, and the training run of a student."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from isthmus.distill.accelerator import accelerator, cores, enough_memory, threads
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.answers import student_answers
from isthmus.distill.tasks.task import Task, TeacherBatch
from isthmus.distill.training.checkpoint import RunState
from isthmus.distill.training.loop import Training
from isthmus.distill.training.parts import Parts, losses
from isthmus.distill.training.sharding import is_sharded, shard, whole
from isthmus.distill.training.studentstep import StudentStep
from isthmus.distill.types import Array, Index
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.progress import Progress

IN_MEMORY_BYTES = 256 << 20
"""Teacher outputs up to this size stay in memory during training."""


class TeacherBatches:
    """Training rows of a task as batches on `device`, indexed by position in `rows` (row numbers of the task).

    `with_teacher` adds the teacher's outputs, and computes missing ones. They are loaded at once if memory allows it.
    """

    def __init__(
        self, task: Task, rows: Index, outputs: OutputCache, device: torch.device, *, with_teacher: bool
    ) -> None:
        self._task, self._rows, self._outputs, self._device = task, torch.from_numpy(rows), outputs, device
        self._with_teacher = with_teacher
        self._in_memory: dict[str, Tensor] | None = None
        if with_teacher and len(rows):
            # Outputs of one batch may be missing: read them at once, since a call of the teacher may cost money.
            few = rows if len(rows) <= task.at_once else rows[:1]
            read = outputs[few]
            if sum(tensor.nbytes for tensor in read.values()) * len(rows) <= IN_MEMORY_BYTES * len(few):
                self._in_memory = read if few is rows else outputs[rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, places: Tensor) -> TeacherBatch:
        rows = self._rows[places]
        inputs, labels = self._task.batch(rows)
        teacher: Mapping[str, Tensor] = {}
        if self._in_memory is not None:
            teacher = {key: tensor.index_select(0, places) for key, tensor in self._in_memory.items()}
        elif self._with_teacher:
            teacher = self._outputs[rows.numpy()]
        return TeacherBatch(
            tuple(self._to_device(tensor) for tensor in inputs),
            None if labels is None else self._to_device(labels),
            {key: self._to_device(tensor) for key, tensor in teacher.items()},
        )

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


class _Student(nn.Module):
    """A student with its objective, whose losses may have weights too, so that one optimizer trains both."""

    def __init__(self, student: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.student, self.objective = student, objective

    def forward(self, *inputs: Tensor) -> Any:
        return self.student(*inputs)


@dataclass(frozen=True)
class StudentRun:
    """The result of `train_student`.

    `best` is the best metric on the validation rows. `planned` is the number of steps without early stopping. `rows`
    counts a row each time it was used. `flops` counts only matrix products and convolutions. `waited` is the seconds of
    pauses for servers since the run last resumed.
    """

    state: RunState
    best: float
    planned: int = 0
    rows: int = 0
    flops: float = 0.0
    waited: float = 0.0
    threads: int = 1


def train_student(  # noqa: PLR0913 - all parts of a run
    task: Task, student: nn.Module, objective: Objective, outputs: OutputCache, settings: TrainingSettings,
    folder: Path, progress: Progress,
) -> StudentRun:  # fmt: skip
    """Train a student in place on a task's training rows, and leave it on the CPU with the best weights.

    Write checkpoints and event files to `folder`, and keep them. Resume if `folder` has a checkpoint of the same run.
    At the end, call `Task.after_training`. `objective` is the loss, and `outputs` are the teacher's cached outputs.
    Without a teacher in the objective, train on the rows with a label alone, for as many steps as on all rows.

    Raise ConfigurationError, before the first step, if student, objective, outputs and settings do not fit. Raise
    DependencyError if memory or disk is full, GateFailed if a number is not finite, and Stopped on SIGINT or SIGTERM.
    After Stopped, the student has the best weights so far.
    """
    parts, accelerated, where = task.material.parts, accelerator(task.material.profile), task.material.declaration.where
    device = accelerated.device
    data_id = sha256({"content": task.content(), "outputs": outputs.path.name, "terms": [*objective.terms]})
    train = parts.train if objective.asks_teacher else task.labeled(parts.train)
    if len(train) < len(parts.train):
        every = settings.evaluate_every or math.ceil(len(parts.train) / settings.batch)
        settings = replace(settings, epochs=None, steps=settings.total(len(parts.train)), evaluate_every=every)
    batches = TeacherBatches(task, train, outputs, device, with_teacher=objective.asks_teacher)
    name = f"validation_{task.metric}"
    processes = accelerated.num_processes
    sharded = task.material.profile.shard and processes > 1
    learner = _sharded(task, student, device) if sharded else student
    step = StudentStep(task, learner, objective, settings.total(len(batches)))
    expected = outputs.float32(parts.validation)

    def evaluate(module: nn.Module) -> dict[str, float]:
        outputs = _validated(task, module, accelerated)
        if not accelerated.is_main_process:
            return {name: 0.0}  # that of the first process counts
        finite = all(np.isfinite(array).all() for array in outputs.values())
        return {name: task.score(outputs, parts.validation, expected) if finite else math.nan}

    numbers = task.groups(train)
    groups = None if numbers is None else torch.from_numpy(numbers)
    module = _Student(learner, objective)
    share = replace(settings, accumulation=settings.accumulation * processes)
    flops = _checked(module, batches, replace(step, steps=None), share, device)
    used = min(task.material.profile.threads, 1 + settings.batch // processes // task.rows_per_thread)
    if processes > 1:  # all processes of this machine share its cores
        used = min(used, max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    try:
        with threads(used):
            _, state, waited = Training(
                module, batches, step, settings, accelerated, evaluate, folder, data_id,
                where, progress, task.material.latency, groups,
            ).train()  # fmt: skip
    finally:
        (objective if sharded else module).cpu()
    if sharded:
        weights = whole(learner.state_dict(), keep=accelerated.is_main_process)
        student.load_state_dict(weights, strict=accelerated.is_main_process)
    task.after_training(student)
    metrics = [entry[name] for entry in state.history]
    epochs, steps = divmod(state.step, math.ceil(len(batches) / settings.batch))
    rows = epochs * len(batches) + steps * settings.batch
    best = max(metrics) if task.more else min(metrics)
    return StudentRun(state, best, settings.total(len(batches)), rows, flops * rows, waited, used)


def _sharded(task: Task, student: nn.Module, device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        learner = task.student()
    learner.load_state_dict(student.state_dict())
    return shard(learner, device)


def _validated(task: Task, module: nn.Module, accelerated: Accelerator) -> dict[str, Array]:
    """Return the outputs for all validation rows; each of several processes computes a share of them."""
    rows = task.material.parts.validation
    if not 1 < accelerated.num_processes <= len(rows):
        return student_answers(task, module, rows, accelerated.device)
    parts = Parts(torch.from_numpy(rows), 1, accelerated.num_processes, accelerated.process_index)
    own = parts.indexes[0]  # of the same length in all processes, which run a sharded student at the same time
    own = torch.cat([own, own[: max(parts.shares) - len(own)]])
    outputs = student_answers(task, module, own.numpy(), accelerated.device)
    outputs = {key: array[: parts.shares[accelerated.process_index]] for key, array in outputs.items()}
    gathered = {key: parts.gather(torch.from_numpy(array).to(accelerated.device)) for key, array in outputs.items()}
    return {key: tensor.cpu().numpy() for key, tensor in gathered.items()}


def first_parts(task: Task, settings: TrainingSettings, rows: int) -> Parts:
    """Return the parts to compute in a check of a batch: all parts if the objective sees them together, else the first.

    `rows` is the number of rows from which the first batch is taken.
    """
    full = min(settings.batch, rows)
    if task.separable:
        return Parts(torch.arange(math.ceil(full / min(settings.accumulation, full))), 1)
    return Parts(torch.arange(full), settings.accumulation)


def _checked(
    module: _Student, batches: TeacherBatches, step: StudentStep, settings: TrainingSettings, device: torch.device
) -> float:
    """Try the largest and the smallest batch, to check that all parts fit; return floating-point operations per row."""
    where = step.task.material.declaration.where
    parts = first_parts(step.task, settings, len(batches))
    full, last = min(settings.batch, len(batches)), len(batches) % settings.batch or settings.batch
    if step.whole:
        least = Parts(torch.arange(min(last, full)), settings.accumulation)
    else:
        sizes = (count // min(settings.accumulation, count) for count in (full, min(last, full)))
        least = Parts(torch.arange(min(sizes)), 1)
    (module.objective if is_sharded(module) else module).to(device)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.random.fork_rng(), enough_memory(f"{where}: step 1", device, settings, len(parts.indexes[0])):
        step.check(module, batches, parts)
        with FlopCounterMode(display=False) as counter:
            for loss, _ in losses(step, module, batches, parts, 0.5):
                loss.backward()  # type: ignore[no-untyped-call]
        if len(least.rows) < len(parts.rows):
            _require_least(module, batches, step, least)
    module.zero_grad()
    module.load_state_dict(state)  # batch norm has updated its statistics
    return float(counter.get_total_flops()) / len(parts.rows)


def _require_least(module: _Student, batches: TeacherBatches, step: StudentStep, parts: Parts) -> None:
    kind = "batch" if step.whole else "part"
    place, remedy = f"smallest {kind} of an epoch, {len(parts.rows)} rows", "change batch or accumulation"
    try:
        step.check(module, batches, parts)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error.where}: {place}", error.problems, remedy=remedy) from error
    except (ValueError, RuntimeError) as error:  # from the student's modules
        where = f"{step.task.material.declaration.where}: student"
        raise ConfigurationError(where, [Problem(place, str(error))], remedy=remedy) from error
