"""The step: a teacher, and over several seeds a student and the same student without the teacher, side by side."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.device import accelerator, resolve
from isthmus.distill.executorch.export import require_installed
from isthmus.distill.preflight import rehearse, require_measured
from isthmus.distill.reports.build import PUPILS, Trained, report
from isthmus.distill.reports.report import FORMAT
from isthmus.distill.restore import create_task, origins, require_readable
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.training.checkpoint import discard
from isthmus.distill.training.studentrun import train_student
from isthmus.distill.training.teacheroutputs import complete_outputs, open_outputs
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.files import publish
from isthmus.features.progress import Progress

UNCHANGED = "training set, settings, task and code are what it was trained with, so nothing was trained"


@dataclass(frozen=True)
class DistillationReport:
    """What a distillation gave: `report.json`.

    Attributes:
        path: folder of the student.
        data: everything it says, as plain data (docs/evaluation.md).
        trained: whether something was trained for it: False if the student was there already.
    """

    path: Path
    data: Mapping[str, Any]
    trained: bool = True

    @property
    def id(self) -> str:
        """Of the trained student: a digest of everything it depends on."""
        found: str = self.data["id"]
        return found

    def as_dict(self) -> dict[str, Any]:
        """The report with the path."""
        return {**self.data, "path": str(self.path), "trained": self.trained}


def distill(
    material: Material,
    *,
    folder: Path,
    cache: Path,
    runs: Path,
    again: bool = False,
    progress: Progress = lambda _text, _done: None,
) -> DistillationReport:
    """Trains students and controls, measures all models, and writes the best student to `folder/<id>`.

    A student that is there already, of the same training set, settings, task, teacher and code, is not trained again.

    Args:
        material: what to learn from, and how.
        folder: of the trained students.
        cache: of the outputs of teachers and references.
        runs: event files of each training for TensorBoard, in `<id>/<model>-<seed>`, and its checkpoints until all is
            done.
        again: train also a student that is there.
        progress: is told what is done and the share of all that is done.

    Raises:
        ConfigurationError: values of the declaration are wrong, or models do not fit each other.
        DataError: the table does not hold what was declared.
        DependencyError: the profile asks for what this machine lacks, or memory or the disk is full.
        GateFailed: a loss is not finite.
        Stopped: by SIGINT or SIGTERM while a model learned; the same call goes on from there.
    """
    declaration, profile = material.declaration, material.profile
    if problems := declaration.problems():
        raise ConfigurationError(declaration.where, problems)
    require_installed(declaration)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise DependencyError(
            declaration.where,
            f"was started as {processes} processes, which would all train the teacher and write the student",
            expected="one process",
            remedy="launch a script of your own that runs a Training (docs/training.md)",
        )
    stages, settings = _Stages(progress), declaration.training_settings(profile)
    task = create_task(replace(material, progress=lambda text, _done: stages.note(f"teacher, {text}")))
    stages.done("prepare", 0.1)
    teacher, whole = task.teacher(), np.arange(material.table.num_rows)
    outputs = {"teacher": open_outputs(task, teacher, whole, cache, stages.within("teacher", 0.1))}
    identity = _identity(task, settings, outputs["teacher"].path.name)
    if not again and (found := _there(task, folder / identity, progress)) is not None:
        return found
    # What this machine lacks is said before a teacher is asked, which may take hours.
    resolve(profile)
    rehearse(task, teacher, outputs["teacher"], settings, stages.note)
    others, facts, test = task.references(), {}, material.parts.test
    # A reference whose labels are not the task's is refused here, too.
    outputs |= {
        name: open_outputs(task, other, test, cache, stages.within(name, 0.35)) for name, other in others.items()
    }
    for name, model, rows, done in (
        ("teacher", teacher, whole, 0.35), *((name, other, test, 0.5) for name, other in others.items())
    ):  # fmt: skip
        told = stages.within(name, done)
        outputs[name], facts[name] = complete_outputs(
            task, model, rows, cache, told, outputs[name], paused=stages.pause
        )
        stages.done(name, done)
    require_measured(task, outputs["teacher"], facts["teacher"], others)

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
            run = train_student(
                task, student, objective, outputs["teacher"], replace(settings, seed=seed), accelerator(profile),
                runs / identity / place, stages.within(place, done),
            )  # fmt: skip
            trained[name, seed] = Trained(student, run)
            stages.pause(run.waited)
            stages.done(place, done)
    data = report(task, identity, trained, outputs, facts, stages.seconds, stages.paused).as_dict()
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
    reached = data["models"]["student"]["quality"][task.metric]
    shown = "not known" if reached is None else f"{reached:.4f}"
    progress(f"student {identity}: test {task.metric} {shown}", 1.0)
    return DistillationReport(folder / identity, data)


def _there(task: Task, path: Path, progress: Progress) -> DistillationReport | None:
    """The student of a folder, if it is there and whole."""
    if not path.exists():
        return None
    try:
        data = require_readable(task, path, PUPILS)
    except DataError as error:
        progress(f"student {path.name} is trained again: {error.where} {error.found}", 0.1)
        return None
    if (data.get("format"), data.get("id")) != (FORMAT, path.name):
        return None
    progress(f"student {path.name}: {UNCHANGED}", 1.0)
    return DistillationReport(path, data, trained=False)


def _identity(task: Task, settings: TrainingSettings, outputs: str) -> str:
    """Of a student: a digest of everything it depends on."""
    material = task.material
    return sha256({
        "contract": material.contract,
        "made_of": origins(task),
        "seeds": [material.declaration.seed, material.declaration.seeds],
        "settings": settings.identity(),
        "outputs": outputs,
        "profile": material.profile.identity(),
        "versions": [version("isthmus"), torch.__version__],
    })[:12]  # fmt: skip


class _Stages:
    """Seconds per stage, those in which it paused for servers apart, and the share of the whole that is done."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self.paused: dict[str, float] = {}
        self._waited = 0.0
        self._progress, self.share, self._since = progress, 0.0, time.perf_counter()

    def note(self, text: str) -> None:
        self._progress(text, self.share)

    def within(self, stage: str, end: float) -> Progress:
        start = self.share
        return lambda text, done: self._progress(f"{stage}, {text}", start + (end - start) * done)

    def pause(self, seconds: float) -> None:
        self._waited += seconds

    def done(self, stage: str, share: float) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._since - self._waited, 3)
        if self._waited:
            self.paused[stage] = round(self._waited, 3)
        self._waited, self._since, self.share = 0.0, now, share
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
