"""Distill a teacher: for each seed, train a student and a control, which is the same student without the teacher."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.accelerator import resolve
from isthmus.distill.declaration import Distillation
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.preflight import STEADY, rehearse, require_measured
from isthmus.distill.reports.build import PUPILS, Trained, report
from isthmus.distill.reports.report import FORMAT
from isthmus.distill.restore import create_task, require_readable, student_identity, training_identity
from isthmus.distill.runtimes.conversions import require_runtimes
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.answers import require_steady, student_answers
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.training.checkpoint import RunState, discard
from isthmus.distill.training.studentrun import StudentRun, train_student
from isthmus.distill.training.teacheroutputs import TeacherCost, complete_outputs, open_outputs
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.files import publish, write_atomically
from isthmus.features.progress import Progress, silent

UNCHANGED = "training set, settings, task and code have not changed, so nothing was trained"
JUDGED_ANEW = (
    "only reporting code has changed: the students are measured again but keep the weights that the earlier metric "
    "selected; run `isthmus distill --again` to train again"
)


@dataclass(frozen=True)
class DistillationReport:
    """A student's `report.json` (docs/evaluation.md) with its folder; `trained` is False if the student existed."""

    path: Path
    data: Mapping[str, Any]
    trained: bool = True

    @property
    def id(self) -> str:
        return str(self.data["id"])

    def as_dict(self) -> dict[str, Any]:
        return {**self.data, "path": str(self.path), "trained": self.trained}


def distill(
    material: Material, *, folder: Path, cache: Path, runs: Path, again: bool = False, progress: Progress = silent
) -> DistillationReport:
    """Train students on a training set, measure them, and write the best student to `folder/<id>`, with its report.

    Also trains a control per student: the same model without the teacher. The control of the best student is written,
    too. If `folder` already has a student from the same training set, settings, task, teacher and code, this function
    trains nothing and returns the report of that student. If only reporting code changed, it keeps the weights and
    computes a new report.

    Args:
        material: declaration, training set and training profile.
        folder: folder for students and their reports.
        cache: folder with stored outputs of teachers; missing outputs are added.
        runs: folder for TensorBoard event files and checkpoints. A successful call deletes the checkpoints of all other
            trainings there.
        again: True to train even if the student exists.
        progress: called with a line of text and the finished share, 0 to 1.

    Raises:
        Stopped: SIGINT or SIGTERM ended the training; the same call continues it.
        ConfigurationError: the declaration is invalid, a runtime is not installed, or teacher and student do not fit.
        DataError: the table lacks columns or values, or an input leaks the label.
        DependencyError: a device, memory or disk space is missing, or several processes were launched.
        GateFailed: a loss, gradient or output is not finite.
    """
    declaration, stages = material.declaration, _Stages(progress)
    _require_ready(declaration)
    task = create_task(replace(material, progress=lambda text, _done: stages.note(f"teacher, {text}")))
    settings = declaration.training_settings(material.profile, len(task.material.parts.train))
    stages.done("prepare", 0.1)
    teacher, rows = task.teacher(), np.arange(task.material.table.num_rows)
    opened = open_outputs(task, teacher, rows, cache, stages.within("teacher", 0.1))
    identity = student_identity(task, settings, opened.path.name)
    if not again and (existing := _existing(task, folder / identity, progress)) is not None:
        return existing
    trainings = _Trainings(runs / training_identity(task, settings, opened.path.name), identity)
    # Fail on a missing device now: the teacher may run for hours.
    resolve(material.profile)
    with opened:  # saves the teacher's outputs even on an error
        rehearse(task, teacher, opened, settings, stages.note)
        outputs, costs = _complete(task, teacher, opened, cache, stages)
    require_measured(task, outputs["teacher"], outputs.keys() - {"teacher"})
    settings = replace(settings, gate=f"validation_{task.metric}", best="max" if task.more else "min")
    trainings.begin(again=again)
    trained = _train(task, outputs["teacher"], settings, trainings, stages)
    data = report(task, identity, trained, outputs, costs, stages.seconds, stages.paused).as_dict()
    students = {name: trained[name, data["shipped"]].model for name in PUPILS}
    try:
        publish(folder / identity, lambda fresh: _write(fresh, students, data, task.files(identity)))
    except (OSError, SafetensorError) as error:
        raise DependencyError(
            str(folder),
            f"student {identity} cannot be written: {error}",
            remedy="make room there and run the same command, which continues after training",
        ) from error
    trainings.end()
    reached = data["models"]["student"]["quality"][task.metric]
    progress(f"student {identity}: test {task.metric} {'undefined' if reached is None else f'{reached:.4f}'}", 1.0)
    return DistillationReport(folder / identity, data)


def _require_ready(declaration: Distillation) -> None:
    if problems := declaration.problems():
        raise ConfigurationError(declaration.where, problems)
    require_runtimes(declaration)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise DependencyError(
            declaration.where,
            f"was started as {processes} processes, each of which would train the teacher and write the student",
            expected="one process",
            remedy="launch a script of your own that runs a Training (docs/training.md)",
        )


def _existing(task: Task, path: Path, progress: Progress) -> DistillationReport | None:
    if not path.exists():
        return None
    try:
        data = require_readable(task, path, PUPILS)
    except DataError as error:
        progress(f"student {path.name} is written again: {error.where} {error.found}", 0.1)
        return None
    if (data.get("format"), data.get("id")) != (FORMAT, path.name):
        return None
    progress(f"student {path.name}: {UNCHANGED}", 1.0)
    return DistillationReport(path, data, trained=False)


def _complete(
    task: Task, teacher: Teacher, opened: OutputCache, cache: Path, stages: "_Stages"
) -> tuple[dict[str, OutputCache], dict[str, TeacherCost]]:
    rows, test, references = np.arange(task.material.table.num_rows), task.material.parts.test, task.references()
    outputs, costs = {"teacher": opened}, dict[str, TeacherCost]()
    # Open these before the teacher runs, since it rejects references whose labels differ from the task's.
    for name, reference in references.items():
        outputs[name] = open_outputs(task, reference, test, cache, stages.within(name, 0.35))
    models = [("teacher", teacher, rows, 0.35), *((name, model, test, 0.5) for name, model in references.items())]
    for name, model, part, share in models:
        outputs[name], costs[name] = complete_outputs(
            task, model, part, cache, stages.within(name, share), outputs[name], paused=stages.pause
        )
        stages.done(name, share)
    return outputs, costs


def _train(
    task: Task, outputs: OutputCache, settings: TrainingSettings, trainings: "_Trainings", stages: "_Stages"
) -> dict[tuple[str, int], Trained]:
    declaration, trained = task.material.declaration, dict[tuple[str, int], Trained]()
    rows, cpu = task.material.parts.validation, torch.device("cpu")
    theirs = outputs.float32(rows)
    if trainings.only_reporting_changed:
        stages.note(JUDGED_ANEW)
    for seed in range(declaration.seed, declaration.seed + declaration.seeds):
        for name in PUPILS:
            place = f"{name}-{seed}"
            share = 0.5 + 0.45 * (len(trained) + 1) / (len(PUPILS) * declaration.seeds)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                student, objective = task.student(), task.objective()
            if name == "control":
                if not objective.asks_teacher:  # the student is its own control
                    trained[name, seed] = trained["student", seed]
                    continue
                if (alone := objective.without_teacher()) is None:  # without the teacher there is nothing to learn
                    untrained = task.finished(student.eval())
                    best = task.score(student_answers(task, untrained, rows, cpu), rows, theirs)
                    trained[name, seed] = Trained(untrained, StudentRun(RunState(over=True), best))
                    continue
                objective = alone
            seeded, report_progress = replace(settings, seed=seed), stages.within(place, share)
            run = train_student(task, student, objective, outputs, seeded, trainings.folder / place, report_progress)
            student = task.finished(student)
            require_steady(task, student, rows[:STEADY], place)
            if trainings.only_reporting_changed:
                run = replace(run, best=task.score(student_answers(task, student, rows, cpu), rows, theirs))
            trained[name, seed] = Trained(student, run)
            stages.pause(run.waited)
            stages.done(place, share)
    return trained


@dataclass(frozen=True)
class _Trainings:
    """The run folders of one training, subfolders of `folder`, and the id of the `student` to write from them."""

    folder: Path
    student: str

    def begin(self, *, again: bool) -> None:
        if again and self._written.exists():  # otherwise continue an interrupted `again`
            for run in self.folder.glob("*-*"):
                discard(run)
            self._selected.unlink(missing_ok=True)
            self._written.unlink()
        if not self._selected.exists():
            write_atomically(self._selected, self.student.encode())

    @property
    def only_reporting_changed(self) -> bool:
        """True if the weights were trained for another student id: only reporting code changed. Call `begin` first."""
        return self._selected.read_text(encoding="utf-8") != self.student

    def end(self) -> None:
        """Record that the student is written; delete all checkpoints in `runs` except this training's final weights."""
        write_atomically(self._written, self.student.encode())
        for run in self.folder.parent.glob("*/*"):
            discard(run, finished=run.parent != self.folder)

    @property
    def _selected(self) -> Path:
        return self.folder / "selected"

    @property
    def _written(self) -> Path:
        return self.folder / "written"


@dataclass
class _Stages:
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)
    paused: dict[str, float] = field(default_factory=dict)
    share: float = 0.0
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.since = time.perf_counter()

    def note(self, text: str) -> None:
        self.progress(text, self.share)

    def within(self, stage: str, end: float) -> Progress:
        start = self.share
        return lambda text, done: self.progress(f"{stage}, {text}", start + (end - start) * done)

    def pause(self, seconds: float) -> None:
        self.waited += seconds

    def done(self, stage: str, share: float) -> None:
        now = time.perf_counter()
        self.seconds[stage] = round(now - self.since - self.waited, 3)
        if self.waited:
            self.paused[stage] = round(self.waited, 3)
        self.waited, self.since, self.share = 0.0, now, share
        self.progress(f"{stage} done", share)


def _write(
    folder: Path, students: Mapping[str, nn.Module], data: Mapping[str, Any], files: Mapping[str, bytes]
) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, student in students.items():
        # Copy, since a student may share weights between layers, which safetensors rejects.
        weights = {key: value.clone().contiguous() for key, value in student.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")
    (folder / "report.json").write_text(json.dumps(data, indent=2, allow_nan=False), encoding="utf-8")
