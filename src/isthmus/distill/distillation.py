"""The step: a teacher, and over several seeds a student and the same student without the teacher, side by side."""

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.account import Progress
from isthmus.distill.checkpoint import discard
from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.device import accelerator
from isthmus.distill.head import Head
from isthmus.distill.lessons import teach
from isthmus.distill.preparation import Learn
from isthmus.distill.rehearsal import rehearse
from isthmus.distill.report import PUPILS, Trained, report
from isthmus.distill.settings import Settings
from isthmus.distill.split import split_table
from isthmus.distill.tabular import TabularTask
from isthmus.distill.task import Material, Task
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teaching import taught
from isthmus.features.contract import sha256
from isthmus.features.errors import ConfigurationError, DependencyError, Problem
from isthmus.features.files import publish
from isthmus.features.manifest import ModelInput
from isthmus.features.profiles import TrainingProfile
from isthmus.transforms.steps import described


@dataclass(frozen=True)
class DistillationReport:
    """What a distillation gave: `report.json`.

    Attributes:
        path: folder of the student.
        data: everything it says, as plain data (docs/evaluation.md).
    """

    path: Path
    data: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Of the trained student: a digest of everything it depends on."""
        found: str = self.data["id"]
        return found

    def as_dict(self) -> dict[str, Any]:
        """The report with the path."""
        return {**self.data, "path": str(self.path)}


def distill(
    declaration: Distillation,
    table: pa.Table,
    *,
    teacher_inputs: Sequence[ModelInput],
    student_inputs: Sequence[ModelInput],
    label: str,
    profile: TrainingProfile,
    folder: Path,
    cache: Path,
    runs: Path,
    contract: str,
    training_set: str,
    learn: Learn,
    head: Head | None = None,
    progress: Progress = lambda _text, _done: None,
) -> DistillationReport:
    """Trains students and controls, measures all models, and writes the best student to `folder/<id>`.

    Args:
        declaration: how.
        table: the training set: a column per input, `event_timestamp`, `known_at` (when the label became known) and
            the label.
        teacher_inputs: what the teacher sees.
        student_inputs: what the student, the control and the references see.
        label: column of the label.
        profile: device, precision, batch, epochs and threads.
        folder: of the trained students.
        cache: of the outputs of teachers and references.
        runs: event files of each training for TensorBoard, in `<id>/<model>-<seed>`, and its checkpoints until all is
            done.
        contract: hash of the contract of the features.
        training_set: what identifies the table; the same identity must mean the same rows.
        learn: what learns the student's preparation from the training part.
        head: the request transforms in the student's graph; None if it has none.
        progress: is told what is done and the share of all that is done.

    Raises:
        ConfigurationError: values of the declaration are wrong, or models do not fit each other.
        DataError: the table does not hold what was declared.
        DependencyError: the profile asks for what this machine lacks, or memory or the disk is full.
        GateFailed: a loss is not finite.
        Stopped: by SIGINT or SIGTERM while a model learned; the same call goes on from there.
    """
    if problems := declaration.problems():
        raise ConfigurationError(declaration.where, problems)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise DependencyError(
            declaration.where,
            f"was started as {processes} processes, which would all train the teacher and write the student",
            expected="one process",
            remedy="launch a script of your own that runs a Training (docs/training.md)",
        )
    stages, settings = _Stages(progress), declaration.trained(profile)
    material = Material(
        declaration, table, split_table(table, declaration.split, declaration.split_by), teacher_inputs, student_inputs,
        label, training_set, contract, profile, head or Head(), learn,
    )  # fmt: skip
    task = _kind(declaration)(material)
    stages.done("prepare", 0.1)
    asked = [("teacher", task.teacher(), np.arange(table.num_rows), 0.35)]
    asked += [(name, other, material.parts.test, 0.5) for name, other in task.references().items()]
    outputs, facts = {}, {}
    for name, teacher, rows, done in asked:
        outputs[name], facts[name] = taught(task, teacher, rows, cache, stages.within(name, done))
        stages.done(name, done)
    rehearse(task, outputs["teacher"], facts["teacher"], settings, [name for name in outputs if name != "teacher"])

    identity = _identity(task, settings, outputs["teacher"].path.name)
    seeds = range(declaration.seed, declaration.seed + declaration.seeds)
    settings = replace(settings, gate=f"validation_{task.metric}", best="max" if task.more else "min")
    trained: dict[tuple[str, int], Trained] = {}
    for seed in seeds:
        for name in PUPILS:
            place = f"{name}-{seed}"
            done = 0.5 + 0.45 * (len(trained) + 1) / (len(PUPILS) * len(seeds))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                student, objective = task.student(), task.objective()
            if name == "control":
                objective = objective.alone(declaration.where)
            run = teach(
                task, student, objective, outputs["teacher"], replace(settings, seed=seed), accelerator(profile),
                runs / identity / place, stages.within(place, done),
            )  # fmt: skip
            trained[name, seed] = Trained(student, run)
            stages.done(place, done)
    data = report(task, identity, trained, outputs, facts, stages.seconds)
    chosen = {name: trained[name, data["shipped"]].model for name in PUPILS}
    try:
        publish(folder / identity, lambda fresh: _write(fresh, chosen, data, task.files(identity)))
    except (OSError, SafetensorError) as error:
        raise DependencyError(
            str(folder),
            f"student {identity} cannot be written: {error}",
            remedy="make room there; the same command goes on from where training ended",
        ) from error
    # Those of earlier settings, too: they are large, and nothing goes on from them any more.
    for old in runs.glob("*/*"):
        discard(old)
    found = data["models"]["student"]["quality"][task.metric]
    shown = "not known" if found is None else f"{found:.4f}"
    progress(f"student {identity}: test {task.metric} {shown}", 1.0)
    return DistillationReport(folder / identity, data)


def _kind(declaration: Distillation) -> type[Task]:
    """The task's class."""
    if isinstance(declaration.task, Tabular):
        return TabularTask
    module, _, name = declaration.task.partition(":")
    where = f"{declaration.where}: task"
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigurationError(where, [Problem(declaration.task, f"cannot be imported ({error})")]) from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigurationError(
            where, [Problem(declaration.task, f"is {found!r}", "a subclass of isthmus.distill.task.Task")]
        )
    return found


def _identity(task: Task, settings: Settings, outputs: str) -> str:
    """Of a student: a digest of everything it depends on."""
    material, declared = task.material, task.material.declaration
    kind: Any = fingerprint(type(task))
    if isinstance(declared.task, Tabular):
        plan = declared.task.plan(material.student_inputs)
        steps = {name: [described(step) for step in chain] for name, chain in plan.numbers.items()}
        kind = {
            **dataclasses.asdict(dataclasses.replace(declared.task, preparation={})),
            "preparation": {**steps, **{name: described(text) for name, text in plan.texts.items()}},
        }
    return sha256({
        "contract": material.contract,
        "training_set": material.training_set,
        "label": material.label,
        "inputs": [[item.name, item.dtype.name] for item in material.student_inputs],
        "split": [*declared.split, declared.split_by],
        "seeds": [declared.seed, declared.seeds],
        "settings": settings.identity(),
        "task": kind,
        "outputs": outputs,
        "profile": dataclasses.asdict(material.profile),
        "torch": torch.__version__,
    })[:12]  # fmt: skip


class _Stages:
    """Seconds per stage, and the share of the whole that is done."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress, self.share, self._since = progress, 0.0, time.perf_counter()

    def note(self, text: str) -> None:
        self._progress(text, self.share)

    def within(self, stage: str, end: float) -> Progress:
        start = self.share
        return lambda text, done: self._progress(f"{stage}, {text}", start + (end - start) * done)

    def done(self, stage: str, share: float) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._since, self.share = round(now - self._since, 3), now, share
        self._progress(f"{stage} done", share)


def _write(
    folder: Path, students: Mapping[str, nn.Module], data: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, student in students.items():
        # Copies, laid out as a file takes them: a student may share weights between layers.
        weights = {key: value.clone().contiguous() for key, value in student.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")
    (folder / "report.json").write_text(json.dumps(data, indent=2, allow_nan=False), encoding="utf-8")
