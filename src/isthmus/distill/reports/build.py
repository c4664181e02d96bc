"""What is said of a distillation: all models side by side, over all seeds."""

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

from isthmus.distill.evaluation.interval import Interval, interval
from isthmus.distill.evaluation.metrics import interleaved
from isthmus.distill.evaluation.slices import worst_slices
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.restore import origins
from isthmus.distill.tasks.split import PARTS
from isthmus.distill.tasks.task import Task, student_answers
from isthmus.distill.training.studentrun import StudentRun
from isthmus.distill.training.teacheroutputs import TeacherCost
from isthmus.distill.types import Answers, Index
from isthmus.features import clock
from isthmus.features.errors import DataError

PUPILS = ("student", "control")
FORMAT = 1
LEAST_ROWS = 200
"""Test rows of a slice that is looked at."""

_ABOUT = {
    "teacher": "large, on all that the server has",
    "student": "small, taught by the teacher",
    "control": "small, without the teacher",
}


@dataclass(frozen=True, eq=False)
class Trained:
    """A student or a control of one seed."""

    model: nn.Module
    run: StudentRun


def report(
    task: Task,
    identity: str,
    trained: Mapping[tuple[str, int], Trained],
    outputs: Mapping[str, TeacherOutputs],
    facts: Mapping[str, TeacherCost],
    seconds: Mapping[str, float],
    paused: Mapping[str, float],
) -> dict[str, Any]:
    """The report as plain data; docs/evaluation.md says what each part is.

    Args:
        task: what was trained.
        identity: of the student.
        trained: "student" and "control" of each seed.
        outputs: of the teacher for all rows, of each reference for the test rows.
        facts: of the same.
        seconds: per stage, without pauses.
        paused: seconds of each stage that paused for servers.
    """
    declared, parts = task.material.declaration, task.material.parts
    seeds = list(dict.fromkeys(seed for _, seed in trained))
    said: dict[tuple[str, int | None], Answers] = {
        (name, None): _kept(kept, parts.test if name == "teacher" else np.arange(len(parts.test)))
        for name, kept in outputs.items()
    }
    said |= {key: student_answers(task, one.model, parts.test, torch.device("cpu")) for key, one in trained.items()}

    def score(key: tuple[str, int | None], places: Index) -> float:
        mine, theirs = ({part: array[places] for part, array in said[one].items()} for one in (key, ("teacher", None)))
        return task.score(mine, parts.test[places], theirs)

    _require_finite(said, parts.test, declared.where)
    of_each = {key: task.quality(answers, parts.test, said["teacher", None]) for key, answers in said.items()}
    quality = {name: of_each[name, None] for name in outputs}
    spread = {
        name: {measure: _over([of_each[name, seed][measure] for seed in seeds]) for measure in of_each[name, seeds[0]]}
        for name in PUPILS
    }
    quality |= {name: {measure: found.value for measure, found in of.items()} for name, of in spread.items()}
    shipped = (max if task.more else min)(seeds, key=lambda seed: trained["student", seed].run.best)
    sizes, times = _served(task, {name: trained[name, shipped].model for name in PUPILS})
    runtime = f"ONNX Runtime {onnxruntime.__version__}, 1 thread"
    models = {
        name: {
            "about": {**_ABOUT, **task.about}.get(name, name), "quality": quality[name], "intervals": {},
            **msgspec.structs.asdict(facts[name]),
        }
        for name in outputs
    } | {
        name: {
            "about": {**_ABOUT, **task.about}[name], "quality": quality[name],
            "intervals": {measure: found.bounds for measure, found in spread[name].items() if found.bounds},
            "parameters": sum(weights.numel() for weights in trained[name, shipped].model.parameters()),
            "bytes": sizes[name], **times[name], "runtime": runtime,
        }
        for name in PUPILS
    }  # fmt: skip
    found: dict[str, Any] = _finite({
        "format": FORMAT,
        "id": identity,
        "contract": task.material.contract,
        "made_of": origins(task),
        "name": declared.name,
        "task": declared.task if isinstance(declared.task, str) else "tabular",
        "pipeline": task.pipeline,
        "metric": task.metric,
        "more": task.more,
        "seeds": seeds,
        "shipped": shipped,
        "models": models,
        "runs": [
            {
                "model": name, "seed": seed, "steps": one.run.steps, "seconds": one.run.seconds,
                "quality": of_each[name, seed], "history": one.run.history,
            }
            for (name, seed), one in trained.items()
        ],
        **_gaps(task, of_each, seeds),
        "measures": {**dict.fromkeys(task.measured), **task.measures(quality)},
        "agreement": {name: task.agreement(said[name, shipped], said["teacher", None]) for name in PUPILS},
        "slices": [
            dataclasses.asdict(one)
            for one in worst_slices(
                task.sliced(parts.test),
                lambda places: {
                    "teacher": score(("teacher", None), places),
                    **{name: score((name, shipped), places) for name in PUPILS},
                },
                least=LEAST_ROWS,
                higher_is_better=task.more,
            )
        ],
        "rows": {name: len(getattr(parts, name)) for name in PARTS},
        "boundaries": parts.boundaries and [clock.moment(boundary).isoformat() for boundary in parts.boundaries],
        "seconds": dict(seconds),
        "paused": dict(paused),
        "training": _training(task, [one.run for one in trained.values()]),
    })  # fmt: skip
    return found


def _require_finite(said: Mapping[tuple[str, int | None], Answers], rows: Index, where: str) -> None:
    for (name, seed), answers in said.items():
        for key, array in answers.items():
            wrong = np.argwhere(~np.isfinite(array))
            if len(wrong):
                whose = name if seed is None else f"{name} of seed {seed}"
                raise DataError(
                    f"{where}: {whose}, output {key}",
                    f"row {rows[wrong[0][0]]} of the training set is {array[tuple(wrong[0])]}",
                    expected="finite values",
                    remedy="look at the inputs of this row",
                )


def _finite(value: Any) -> Any:
    """The same data with None for every number that JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept(outputs: TeacherOutputs, rows: Index) -> Answers:
    return {key: tensor.float().numpy() for key, tensor in outputs[rows].items()}


def _gaps(
    task: Task, of_each: Mapping[tuple[str, int | None], Mapping[str, float]], seeds: Sequence[int]
) -> dict[str, Any]:
    """What the teacher adds, and which share of the way to it that is; seed by seed, the control of the same seed."""
    sign = 1 if task.more else -1
    value = {key: sign * measured[task.metric] for key, measured in of_each.items()}
    taught = [value["student", seed] - value["control", seed] for seed in seeds]
    ways = [value["teacher", None] - value["control", seed] for seed in seeds]
    there = all(0 < way < math.inf for way in ways)
    closed = [gain / way for gain, way in zip(taught, ways, strict=True)] if there else None
    return {"taught": _over(taught)._asdict(), "gap_closed": closed and _over(closed)._asdict()}


def _over(values: Sequence[float]) -> Interval:
    """What the seeds say together; nothing where one of them says nothing."""
    return interval(values) if all(map(math.isfinite, values)) else Interval(math.nan, None, None)


def _served(task: Task, models: Mapping[str, nn.Module]) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    """Bytes of each graph, and the time of one row in its runtime, both measured in turn."""
    row, sizes, calls = task.feeds(task.material.parts.test[:1]), {}, {}
    for name, model in models.items():
        graph = task.model(model).SerializeToString()
        opened, sizes[name] = session(graph, 1), len(graph)
        calls[name] = lambda opened=opened: predict(opened, row)
    return sizes, interleaved(calls)


def _training(task: Task, runs: Sequence[StudentRun]) -> dict[str, Any]:
    """The training half of the boundary card: what all students and controls took together."""
    profile, seconds = task.material.profile, sum(run.seconds for run in runs)
    rows = sum(run.rows for run in runs)
    return {
        "device": "cuda" if profile.device != "cpu" and torch.cuda.is_available() else "cpu",
        "host": f"{platform.machine()}, torch {torch.__version__}",
        "precision": profile.precision,
        "threads": max(run.threads for run in runs),
        "rows": rows,
        "steps": sum(run.steps for run in runs),
        "seconds": round(seconds, 3),
        "device_hours": seconds / 3600,
        "slowed_seconds": round(sum(run.slowed for run in runs), 3),
        "paused_seconds": round(sum(run.paused for run in runs), 3),
        "flops": sum(run.flops for run in runs),
        "peak_mb": round(max(run.peak for run in runs) / 2**20),
        "rows_per_second": round(rows / seconds) if seconds else None,
    }
