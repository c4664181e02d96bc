"""Measure all models of a distillation side by side, over all seeds, and build the report."""

import dataclasses
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from torch import nn

from isthmus.distill.accelerator import resolve
from isthmus.distill.evaluation.interval import Interval, interval
from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.evaluation.slices import worst_slices
from isthmus.distill.export.candidate import Candidate
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.reports.report import (
    UNLABELED,
    AtAge,
    ModelRecord,
    RunReport,
    SeedMean,
    TrainingHalf,
    TrainingRun,
    WorstSlice,
)
from isthmus.distill.restore import provenance
from isthmus.distill.tasks.answers import student_answers
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.split import PARTS
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.teacher import ANSWERED
from isthmus.distill.training.studentrun import StudentRun
from isthmus.distill.training.teacheroutputs import TeacherCost
from isthmus.distill.types import Answers, Index
from isthmus.features import clock
from isthmus.features.clock import MICROSECOND
from isthmus.features.errors import DataError

PUPILS = ("student", "control")
AGES = (0, 0.25, 0.5, 1, 3, 6, 24, 168)
"""Multiples of the declared age at which the students are measured."""
LEAST_ROWS = 200
"""Fewest test rows of a slice."""

_ABOUT = {
    "teacher": "large, with all features of the server",
    "student": "small, distilled from the teacher",
    "control": "small, trained without the teacher",
}
_Key = tuple[str, int | None]
"""Name and seed of a model; None for the teacher and references."""


@dataclass(frozen=True, eq=False)
class Trained:
    model: nn.Module
    run: StudentRun


def report(  # noqa: PLR0913 - each part of the report is measured elsewhere
    task: Task,
    identity: str,
    trained: Mapping[tuple[str, int], Trained],
    outputs: Mapping[str, OutputCache],
    costs: Mapping[str, TeacherCost],
    seconds: Mapping[str, float],
    paused: Mapping[str, float],
) -> RunReport:
    """Measure quality, size and latency of all models after training, and return the report of a distillation.

    docs/evaluation.md explains the report.

    Args:
        task: task of the distillation.
        identity: the student's id.
        trained: trained students and controls, by model name ("student", "control") and seed.
        outputs: outputs of the teacher for all rows, and of each reference model for the test rows, by model name.
        costs: size and latency of the teacher and of each reference model, by model name.
        seconds: duration of each stage in seconds, without pauses.
        paused: seconds that each stage paused to leave the machine to servers.

    Raises:
        DataError: an output of a model is not finite.
    """
    declared, parts = task.material.declaration, task.material.parts
    unlabeled = len(parts.train) - len(task.labeled(parts.train))
    seeds = list(dict.fromkeys(seed for _, seed in trained))
    answers = _answers(task, trained, outputs)
    _require_finite(answers, parts.test, declared.where)
    measured = {key: task.quality(values, parts.test, answers["teacher", None]) for key, values in answers.items()}
    means = {
        name: {
            measure: _mean([measured[name, seed][measure] for seed in seeds]) for measure in measured[name, seeds[0]]
        }
        for name in PUPILS
    }
    quality = {name: measured[name, None] for name in outputs}
    quality |= {name: {measure: mean.value for measure, mean in values.items()} for name, values in means.items()}
    shipped = (max if task.more else min)(seeds, key=lambda seed: trained["student", seed].run.best)
    ages = _ages(task, {seed: trained["student", seed].model for seed in seeds})
    pupils = _pupils(task, {name: trained[name, shipped].model for name in PUPILS}, means)
    about = {**_ABOUT, **task.about}
    if not any(pupil.run.state.step for (name, _), pupil in trained.items() if name == "control"):
        about["control"] = "the untrained student: every term of the objective needs the teacher"
    return RunReport(
        id=identity,
        contract=task.material.contract,
        made_of=provenance(task),
        name=declared.name,
        task=declared.kind,
        pipeline=task.pipeline,
        metric=task.metric,
        more=task.more,
        seeds=seeds,
        shipped=shipped,
        models={
            name: ModelRecord(about.get(name, name), quality[name], **msgspec.structs.asdict(costs[name]))
            for name in outputs
        } | {name: ModelRecord(about[name], quality[name], **pupils[name]) for name in PUPILS},
        runs=[
            TrainingRun(
                name, seed, state.step, round(state.seconds, 3), measured[name, seed], state.history, pupil.run.planned,
                {str(count): steps for count, steps in state.processes.items()},
            )
            for (name, seed), pupil in trained.items()
            for state in (pupil.run.state,)
        ],
        **_gain_over_control(task, answers, measured, seeds),
        measures={**dict.fromkeys(task.measured), **task.measures(quality), **_age_cost(task, ages, quality)},
        agreement={
            name: task.agreement(answers[name, shipped], answers["teacher", None]) for name in PUPILS
        },
        slices=_slices(task, answers, shipped),
        age=None if declared.student.device is None else declared.student.device.age.total_seconds(),
        ages=ages,
        rows={name: len(getattr(parts, name)) for name in PARTS} | ({UNLABELED: unlabeled} if unlabeled else {}),
        boundaries=parts.boundaries and [clock.moment(boundary).isoformat() for boundary in parts.boundaries],
        seconds={**seconds},
        paused={**paused},
        training=_training(task, [pupil.run for pupil in trained.values()]),
    )  # fmt: skip


def _answers(
    task: Task, trained: Mapping[tuple[str, int], Trained], outputs: Mapping[str, OutputCache]
) -> dict[_Key, Answers]:
    test = task.material.parts.test
    answers: dict[_Key, Answers] = {}
    for name, cached in outputs.items():
        answers[name, None] = cached.float32(test if name == "teacher" else np.arange(len(test)))
    return answers | {
        key: student_answers(task, pupil.model, test, torch.device("cpu")) for key, pupil in trained.items()
    }


def _require_finite(answers: Mapping[_Key, Answers], rows: Index, where: str) -> None:
    for (name, seed), parts in answers.items():
        for part, array in parts.items():
            wrong = np.argwhere(~np.isfinite(array))
            if len(wrong):
                model = name if seed is None else f"{name} of seed {seed}"
                raise DataError(
                    f"{where}: {model}, output {part}",
                    f"row {rows[wrong[0][0]]} of the training set is {array[tuple(wrong[0])]}",
                    expected="finite values",
                    remedy="check the inputs of this row",
                )


def _slices(task: Task, answers: Mapping[_Key, Answers], shipped: int) -> list[WorstSlice]:
    keys: dict[str, _Key] = {"teacher": ("teacher", None), **{name: (name, shipped) for name in PUPILS}}
    common = _answered(answers)

    def scores(places: Index) -> dict[str, float]:
        found = _scores(task, {key: answers[key] for key in keys.values()}, common[places])
        return {name: found[key] for name, key in keys.items()}

    sliced = task.sliced(task.material.parts.test[common])
    worst = worst_slices(sliced, scores, least=LEAST_ROWS, higher_is_better=task.more)
    return [WorstSlice(**dataclasses.asdict(part)) for part in worst]


def _answered(answers: Mapping[_Key, Answers]) -> Index:
    """Return the test rows, by their place in the test part, that the teacher answers."""
    theirs = answers["teacher", None]
    known = theirs.get(ANSWERED, np.ones(len(next(iter(theirs.values())))))
    return np.flatnonzero(known.reshape(len(known), -1).any(1))


def _scores(task: Task, answers: Mapping[_Key, Answers], places: Index) -> dict[_Key, float]:
    """Return the task's metric of each model on some test rows, given by their place in the test part."""
    rows = {key: {part: array[places] for part, array in values.items()} for key, values in answers.items()}
    numbers, theirs = task.material.parts.test[places], rows["teacher", None]
    return {key: task.score(values, numbers, theirs) for key, values in rows.items()}


def _ages(task: Task, students: Mapping[int, nn.Module]) -> list[AtAge]:
    device, material = task.material.declaration.student.device, task.material
    if device is None or material.aged is None:
        return []
    test, rows, points = material.parts.test, np.arange(len(material.parts.test)), []
    ages = [int(device.age / MICROSECOND * share) for share in AGES]
    for age, table in zip(ages, material.aged(test, ages), strict=True):
        task_at_age = task.over(table, test)
        scores = [
            task_at_age.score(student_answers(task_at_age, student, rows, torch.device("cpu")), rows, {})
            for student in students.values()
        ]
        points.append(AtAge(age / 1e6, SeedMean(*_mean(scores))))
    return points


def _age_cost(task: Task, ages: Sequence[AtAge], quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    if not ages or (fresh := ages[0].found.value) is None:
        return {}
    return {"age_cost": (fresh - quality["student"][task.metric]) * (1 if task.more else -1)}


def _gain_over_control(
    task: Task, answers: Mapping[_Key, Answers], measured: Mapping[_Key, Mapping[str, float]], seeds: Sequence[int]
) -> dict[str, Any]:
    """Return the student's gain over the control, and its share of the gap from control to teacher.

    Both are means over the seeds, where student and control of the same seed are compared. The gap is of the rows that
    the teacher answers, for all three models.
    """
    sign = 1 if task.more else -1
    value = {key: sign * quality[task.metric] for key, quality in measured.items()}
    taught = [value["student", seed] - value["control", seed] for seed in seeds]
    if 0 < len(common := _answered(answers)) < len(task.material.parts.test):
        value = {key: sign * score for key, score in _scores(task, answers, common).items()}
    gains = [value["student", seed] - value["control", seed] for seed in seeds]
    gaps = [value["teacher", None] - value["control", seed] for seed in seeds]
    finite = all(0 < gap < math.inf for gap in gaps)
    closed = SeedMean(*_mean([gain / gap for gain, gap in zip(gains, gaps, strict=True)])) if finite else None
    return {"taught": SeedMean(*_mean(taught)), "gap_closed": closed}


def _mean(values: Sequence[float]) -> Interval:
    return interval(values) if all(map(math.isfinite, values)) else Interval(math.nan, None, None)


def _pupils(
    task: Task, models: Mapping[str, nn.Module], means: Mapping[str, Mapping[str, Interval]]
) -> dict[str, dict[str, Any]]:
    # The control is the same network with other weights: its size and latency are those of the student.
    graph = student_graph(task, models["student"]).SerializeToString()
    call = Candidate(graph, 1).call(task.feeds(task.material.parts.test[:1]))
    measured = {
        "parameters": sum(weights.numel() for weights in models["student"].parameters()),
        "bytes": len(graph),
        **interleaved({"student": call})["student"],
        "runtime": f"ONNX Runtime {onnxruntime.__version__}, 1 thread",
    }
    return {
        name: {
            "intervals": {measure: mean.bounds for measure, mean in means[name].items() if mean.bounds},
            **measured,
        }
        for name in models
    }


def _training(task: Task, runs: Sequence[StudentRun]) -> TrainingHalf:
    profile, states = task.material.profile, [run.state for run in runs]
    rows, seconds = sum(run.rows for run in runs), sum(state.seconds for state in states)
    device_seconds = sum(
        state.seconds * sum(count * steps for count, steps in state.processes.items()) / (state.step or 1)
        for state in states
    )
    return TrainingHalf(
        device=resolve(profile).type,
        host=f"{platform.machine()}, torch {torch.__version__}",
        precision=profile.precision,
        threads=max(run.threads for run in runs),
        rows=rows,
        steps=sum(state.step for state in states),
        seconds=round(seconds, 3),
        device_hours=device_seconds / 3600,
        slowed_seconds=round(sum(state.slowed for state in states), 3),
        paused_seconds=round(sum(state.paused for state in states), 3),
        processes=sorted({count for state in states for count in state.processes}) or [1],
        flops=sum(run.flops for run in runs),
        peak_mb=round(max(state.peak for state in states) / 2**20),
        rows_per_second=round(rows / seconds) if seconds else None,
    )
