"""Distill a teacher: for each seed, train a student and a control, which is the same student without the teacher."""

import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from isthmus.distill.accelerator import resolve
from isthmus.distill.declaration import Distillation
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.preflight import STEADY, rehearse, require_measured
from isthmus.distill.reports.build import PUPILS, Trained, report
from isthmus.distill.reports.report import FORMAT
from isthmus.distill.restore import create_task, require_readable, student_identity, training_identity
from isthmus.distill.runtimes.conversions import require_runtimes
from isthmus.distill.settings import TrainingSettings
from isthmus.distill.tasks.answers import require_steady, student_answers
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.training.checkpoint import RunState, Trainings, is_trained, processes_identity
from isthmus.distill.training.processes import Processes, joined, table_digest
from isthmus.distill.training.sharding import Lockstep, shard
from isthmus.distill.training.studentrun import StudentRun, train_student
from isthmus.distill.training.teacheroutputs import TeacherCost, complete_outputs, open_outputs
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem
from isthmus.features.files import locked, publish
from isthmus.features.progress import Progress, silent
from isthmus.transforms.preparation.fit import Preparation

UNCHANGED = "training set, settings, task and code have not changed, so nothing was trained"
JUDGED_ANEW = (
    "only reporting code has changed: the students are measured again but keep the weights that the earlier metric "
    "selected; run `isthmus distill --again` to train again"
)


@dataclass(frozen=True)
class DistillationReport:
    """A student's `report.json` (docs/evaluation.md) with its folder; `trained` is False if the student existed.

    `leads` is False in all but the first of several processes, which must not write anything about the student.
    """

    path: Path
    data: Mapping[str, Any]
    trained: bool = True
    leads: bool = True

    @property
    def id(self) -> str:
        return str(self.data["id"])

    def as_dict(self) -> dict[str, Any]:
        return {**self.data, "path": str(self.path), "trained": self.trained}


def distill(  # noqa: PLR0913 - the last ones are options
    material: Material, *, folder: Path, cache: Path, runs: Path, again: bool = False, progress: Progress = silent,
    part: tuple[int, int] | None = None,
) -> DistillationReport:  # fmt: skip
    """Train students on a training set, measure them, and write the best student to `folder/<id>`, with its report.

    Also trains a control per student: the same model without the teacher. The control of the best student is written,
    too. If `folder` already has a student from the same training set, settings, task, teacher and code, this function
    trains nothing and returns the report of that student. If only reporting code changed, it keeps the weights and
    computes a new report.

    Processes that a launcher such as torchrun started train together. The first one prepares, fits, reports and writes.
    All answer for a teacher that is a network, train, and validate, each its share of the rows. The number of processes
    changes the student's id, because it changes the last bits of the weights. A training that was interrupted goes on
    with any number.

    Processes that share only folders train side by side if each has a `part`, its index and the number of parts: it
    trains only its share of students and controls. The teacher runs in the first one that gets there. The one that ends
    last reports; `leads` is False for the others.

    Args:
        material: declaration, training set and training profile.
        folder: folder for students and their reports.
        cache: folder with stored outputs of teachers; missing outputs are added.
        runs: folder for TensorBoard event files and checkpoints. A successful call deletes the checkpoints of all other
            trainings there.
        again: True to train even if the student exists.
        progress: called with a line of text and the finished share, 0 to 1.
        part: index and number of parts; None to train everything.

    Raises:
        Stopped: SIGINT or SIGTERM ended the training; the same call continues it.
        ConfigurationError: the declaration is invalid, a runtime is not installed, or teacher and student do not fit.
        DataError: the table lacks columns or values, an input leaks the label, or processes see different inputs.
        DependencyError: a device, memory or disk space is missing.
        LostProcessError: another process ended or hangs.
        GateFailed: a loss, gradient or output is not finite.
    """
    with joined(material.profile, material.declaration.where) as processes:
        return _distill(material, processes, folder, cache, runs, again, progress if processes.leads else silent, part)


def _distill(  # noqa: PLR0913 - the arguments of `distill`
    material: Material, processes: Processes, folder: Path, cache: Path, runs: Path, again: bool, progress: Progress,
    part: tuple[int, int] | None,
) -> DistillationReport:  # fmt: skip
    declaration, stages, learn = material.declaration, _Stages(progress), material.learn
    _require_ready(declaration)
    material = replace(
        material,
        progress=lambda text, _done: stages.note(f"teacher, {text}"),
        # An engine's sums may differ in the last bits.
        learn=lambda plan, before: processes.first(lambda: learn(plan, before), Preparation),
    )
    task = create_task(material)
    settings = declaration.training_settings(material.profile, len(task.material.parts.train))
    stages.done("prepare", 0.1)
    teacher, rows = task.teacher(), np.arange(task.material.table.num_rows)
    opened = open_outputs(task, teacher, rows, cache, stages.within("teacher", 0.1))
    student = student_identity(task, settings, opened.path.name)
    path = folder / processes_identity(student, processes.together)
    if processes.count > 1:
        _require_divisible(material, settings, processes.together, part)
        processes.require_same(_seen(task, student, opened))
    existing = processes.first(lambda: None if again else _existing(task, path, progress), dict[str, Any] | None)
    if existing is not None:
        return DistillationReport(path, existing, trained=False, leads=processes.leads)
    name = training_identity(task, settings, opened.path.name)
    trainings = Trainings(runs / processes_identity(name, processes.together), student)
    # Fail on a missing device now: the teacher may run for hours.
    resolve(material.profile)
    alone = partial(locked, trainings.folder.with_suffix(".lock")) if part else nullcontext
    with alone(), opened, _shared(task, teacher, opened, processes) as follow:  # saves outputs even on an error
        opened.refresh()
        if processes.leads:
            _rehearse(task, teacher, opened, settings, stages, processes.together)
        follow()
        outputs, costs = _complete(task, teacher, opened, cache, stages, processes, follow)
        processes.first(lambda: require_measured(task, outputs["teacher"], outputs.keys() - {"teacher"}))
        processes.first(lambda: trainings.begin(again=again))
    settings = replace(settings, gate=f"validation_{task.metric}", best="max" if task.more else "min")
    trainings.require_shared()
    if part or processes.together < processes.count:
        share = part or (processes.rank, processes.count)
        models = _train_share(task, outputs["teacher"], settings, trainings, stages, *share)
        processes.meet()

    def reported(trained: Mapping[tuple[str, int], Trained]) -> dict[str, Any]:
        data = report(task, path.name, trained, outputs, costs, stages.seconds, stages.paused).as_dict()
        students = {name: trained[name, data["shipped"]].model for name in PUPILS}
        try:
            publish(path, lambda fresh: _write(fresh, students, data, task.files(path.name)))
        except (OSError, SafetensorError) as error:
            raise DependencyError(
                str(folder),
                f"student {path.name} cannot be written: {error}",
                remedy="make room there and run the same command, which continues after training",
            ) from error
        trainings.end()
        reached = data["models"]["student"]["quality"][task.metric]
        shown = "undefined" if reached is None else f"{reached:.4f}"
        progress(f"student {path.name}: test {task.metric} {shown}", 1.0)
        return data

    with alone():
        if part and (left := [name for name in models if not is_trained(trainings.folder / name)]):
            progress(f"part {part[0]} of {part[1]} is trained; the last part reports ({', '.join(left)} left)", 1.0)
            return DistillationReport(path, {"id": path.name}, leads=False)
        existing = _existing(task, path, progress) if part else None
        data = existing or processes.first(
            partial(reported, _train(task, outputs["teacher"], settings, trainings, stages, processes)), dict[str, Any]
        )
    return DistillationReport(path, data, trained=existing is None, leads=processes.leads)


def _require_divisible(
    material: Material, settings: TrainingSettings, processes: int, part: tuple[int, int] | None
) -> None:
    where, parts = material.declaration.where, processes * settings.accumulation
    generates = any(getattr(material.declaration.task, name, 0) for name in ("on_policy", "sequences"))
    if part:
        raise ConfigurationError(where, [Problem("part", "is set in one of several processes", "one process")])
    if processes > 1 and material.profile.shard and generates:
        found = "generates texts, each of its own length, while all processes must run sharded weights equally often"
        raise ConfigurationError(where, [Problem("task", found, "on_policy=0, sequences=0, or shard = false")])
    if processes > 1 and settings.batch % parts:
        found = f"{settings.batch} rows cannot be divided among {processes} processes"
        found += f" with accumulation {settings.accumulation}" if settings.accumulation > 1 else ""
        raise ConfigurationError(where, [Problem("batch", found, f"a multiple of {parts}")])


def _seen(task: Task, student: str, outputs: OutputCache) -> dict[str, str]:
    """Return digests of everything that must be the same in every process."""
    material = task.material
    seen = {"training set": material.training_set, "contract": material.contract, "rows": table_digest(material.table)}
    if material.device is not None:
        seen["rows on devices"] = table_digest(material.device)
    return {**seen, "task data": task.content(), "teacher": outputs.path.name, "definitions and versions": student}


def _require_ready(declaration: Distillation) -> None:
    if problems := declaration.problems():
        raise ConfigurationError(declaration.where, problems)
    require_runtimes(declaration)


def _existing(task: Task, path: Path, progress: Progress) -> dict[str, Any] | None:
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
    return data


def _rehearse(
    task: Task, teacher: Teacher, opened: OutputCache, settings: TrainingSettings, stages: "_Stages", processes: int
) -> None:
    # Each process computes its share of a batch.
    rehearse(task, teacher, opened, replace(settings, accumulation=settings.accumulation * processes), stages.note)
    opened.flush()


@contextmanager
def _shared(task: Task, teacher: Teacher, opened: OutputCache, processes: Processes) -> Iterator[Callable[[], object]]:
    """Yield a function that waits until all processes call it. Meanwhile it helps them to run a teacher.

    If the profile asks for it, the processes share out the weights of a teacher that is a network during the block.
    """
    shards = task.material.profile.shard and processes.together > 1 and isinstance(teacher, NetworkTeacher)
    if not shards or not processes.first(lambda: opened.missing, int):
        yield processes.meet
        return
    teachers = [each for each in (teacher, opened.teacher) if isinstance(each, NetworkTeacher)]
    # A copy, since a student may begin as a copy of its teacher.
    whole, row = teachers[0].module, task.asked(np.arange(1))
    module = shard(copy.deepcopy(whole), resolve(task.material.profile))
    steps = Lockstep(module, processes)
    for each in teachers:
        each.replace(module)
    yield lambda: steps.follow(lambda: teacher.ask(row))
    for each in teachers:
        each.replace(whole)


def _complete(  # noqa: PLR0913 - all parts of a pass
    task: Task, teacher: Teacher, opened: OutputCache, cache: Path, stages: "_Stages", processes: Processes,
    follow: Callable[[], object],
) -> tuple[dict[str, OutputCache], dict[str, TeacherCost]]:  # fmt: skip
    """Compute the outputs of the teacher, with all processes if it is shareable, and of the references in the first."""
    outputs, costs = {"teacher": opened}, dict[str, TeacherCost]()
    if processes.leads:
        outputs, costs = _first_outputs(task, teacher, opened, cache, stages, processes)
    elif teacher.shareable:
        opened.fill(rank=processes.rank, processes=processes.count)
    follow()
    opened.refresh()
    if opened.missing:
        raise DependencyError(
            task.material.declaration.where, f"rank {processes.rank} does not see {opened.missing:,} outputs of the "
            f"teacher in {opened.path}", expected="a folder that all processes share",
        )  # fmt: skip
    return outputs, costs


def _first_outputs(
    task: Task, teacher: Teacher, opened: OutputCache, cache: Path, stages: "_Stages", processes: Processes
) -> tuple[dict[str, OutputCache], dict[str, TeacherCost]]:
    rows, test, references = np.arange(task.material.table.num_rows), task.material.parts.test, task.references()
    outputs, costs = {"teacher": opened}, dict[str, TeacherCost]()
    # Open these before the teacher runs, since it rejects references whose labels differ from the task's.
    for name, reference in references.items():
        outputs[name] = open_outputs(task, reference, test, cache, stages.within(name, 0.35))
    models = [("teacher", teacher, rows, 0.35), *((name, model, test, 0.5) for name, model in references.items())]
    for name, model, part, share in models:
        outputs[name], costs[name] = complete_outputs(
            task, model, part, cache, stages.within(name, share), outputs[name], paused=stages.pause,
            processes=processes.count if name == "teacher" and teacher.shareable else 1,
        )  # fmt: skip
        stages.done(name, share)
    return outputs, costs


def _train(
    task: Task, outputs: OutputCache, settings: TrainingSettings, trainings: Trainings, stages: "_Stages",
    processes: Processes,
) -> dict[tuple[str, int], Trained]:  # fmt: skip
    declaration, trained = task.material.declaration, dict[tuple[str, int], Trained]()
    rows, cpu = task.material.parts.validation, torch.device("cpu")
    theirs = outputs.float32(rows)
    if trainings.only_reporting_changed:
        stages.note(JUDGED_ANEW)
    if processes.together < processes.count and not processes.leads:
        return trained
    for seed in range(declaration.seed, declaration.seed + declaration.seeds):
        for name in PUPILS:
            place = f"{name}-{seed}"
            share = 0.5 + 0.45 * (len(trained) + 1) / (len(PUPILS) * declaration.seeds)
            student, objective = _untrained(task, seed)
            if name == "control":
                if not objective.asks_teacher:  # the student is its own control
                    if processes.leads:
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
            if not processes.leads:
                continue
            student = task.finished(student)
            require_steady(task, student, rows[:STEADY], place)
            if trainings.only_reporting_changed:
                run = replace(run, best=task.score(student_answers(task, student, rows, cpu), rows, theirs))
            trained[name, seed] = Trained(student, run)
            stages.pause(run.waited)
            stages.done(place, share)
    return trained


def _train_share(  # noqa: PLR0913 - those of `_train`, and which share
    task: Task, outputs: OutputCache, settings: TrainingSettings, trainings: Trainings, stages: "_Stages",
    index: int, count: int,
) -> list[str]:  # fmt: skip
    """Train a share of the models to the end, and return the names of all models. `_train` finds them trained."""
    seeds = range(task.material.declaration.seed, task.material.declaration.seed + task.material.declaration.seeds)
    names = []
    for n, (name, seed) in enumerate((name, seed) for name in PUPILS for seed in seeds):
        student, objective = _untrained(task, seed)
        learned: Objective | None = objective
        if name == "control":
            learned = objective.without_teacher() if objective.asks_teacher else None
        if learned is None:
            continue
        names.append(f"{name}-{seed}")
        if n % count == index:
            of, report_progress = replace(settings, seed=seed), stages.within(names[-1], 0.95)
            train_student(task, student, learned, outputs, of, trainings.folder / names[-1], report_progress)
    return names


def _untrained(task: Task, seed: int) -> tuple[nn.Module, Objective]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.student(), task.objective()


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
