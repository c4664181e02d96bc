"""The step: teacher, reference, student and control from one training set, side by side."""

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import sklearn
import torch
from safetensors.torch import save_file

from isthmus.distill.account import Progress
from isthmus.distill.cache import Outputs, cached, digest
from isthmus.distill.checkpoint import discard
from isthmus.distill.dataset import Array, Tensors, columns, tensors
from isthmus.distill.declaration import Distillation
from isthmus.distill.evaluate import latency, metrics, sigmoid
from isthmus.distill.graph import graph
from isthmus.distill.head import Head
from isthmus.distill.preparation import FILE, Learn, Prepare, compiled
from isthmus.distill.runtime import predict, session
from isthmus.distill.split import Index, Split, split_table
from isthmus.distill.student import RECORD, Student, StudentRecord
from isthmus.distill.teacher import boost, settings
from isthmus.distill.train import Examples, train
from isthmus.features import clock
from isthmus.features.errors import ConfigurationError, DependencyError
from isthmus.features.files import publish
from isthmus.features.manifest import ModelInput, feeds
from isthmus.features.profiles import TrainingProfile
from isthmus.transforms.fitting import Preparation
from isthmus.transforms.steps import described

MODELS = ("teacher", "reference", "student", "control")


@dataclass(frozen=True)
class DistillationReport:
    """What a distillation gave.

    Attributes:
        id: of the trained student: a digest of everything it depends on.
        name: of the declaration.
        path: folder of the student.
        models: for teacher, reference, student and control: auc, log_loss and ece on the test part; parameters; bytes;
            p50_us and p99_us of one prediction on one thread. Student and control are measured as float32 graphs in
            ONNX Runtime, teacher and reference in scikit-learn.
        rows: per part.
        boundaries: first moment of the validation and of the test part, in ISO 8601.
        seconds: per stage.
        epochs: step, loss and validation AUC of each epoch, for student and control.
        lift_kept: (student AUC - 0.5) / (reference AUC - 0.5); None if the reference knows nothing.
    """

    id: str
    name: str
    path: Path
    models: dict[str, dict[str, float]]
    rows: dict[str, int]
    boundaries: tuple[str, str]
    seconds: dict[str, float]
    epochs: dict[str, list[dict[str, float]]]
    lift_kept: float | None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {**dataclasses.asdict(self), "path": str(self.path), "boundaries": list(self.boundaries)}


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
    """Trains teacher, reference, student and control, and writes the student to `folder/<id>`.

    Args:
        declaration: how.
        table: the training set: a column per input, `event_timestamp`, `known_at` (when the label became known) and
            the label.
        teacher_inputs: what the teacher sees.
        student_inputs: what the student, the control and the reference see.
        label: column of the label, 0 or 1.
        profile: device, precision, batch, epochs and threads.
        folder: of the trained students.
        cache: of the outputs of teachers and references.
        runs: event files of each training for TensorBoard, in `<id>/<model>`, and its checkpoints until all is done.
        contract: hash of the contract of the features.
        training_set: what identifies the table; the same identity must mean the same rows.
        learn: what learns the student's preparation from the training part.
        head: the request transforms in the student's graph; None if it has none.
        progress: is told what is done and the share of all that is done.

    Raises:
        ConfigurationError: values of the declaration are wrong.
        DataError: the table does not hold what was declared.
        DependencyError: the profile asks for what this machine lacks, or memory or the disk is full.
        GateFailed: a loss is not finite.
        Stopped: by SIGINT or SIGTERM while student or control learned; the same call goes on from there.
    """
    where = f"distillation {declaration.name}"
    if problems := declaration.problems():
        raise ConfigurationError(where, problems)
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise DependencyError(
            where,
            f"was started as {processes} processes, which would all train the teacher and write the student",
            expected="one process",
            remedy="launch a script of your own that runs a Training (docs/training.md)",
        )
    clockwork = _Stages(progress)
    parts, labels = split_table(table, label, declaration.split)
    data = tensors(table, student_inputs)
    clockwork.done("split", 0.05)

    key = {"contract": contract, "training_set": training_set, "label": label, "split": list(declaration.split)}
    learner = {
        **settings(declaration.teacher_rounds, declaration.teacher_learning_rate),
        "library": f"scikit-learn {sklearn.__version__}",
    }

    def taught(inputs: Sequence[ModelInput], load: Callable[[], Tensors]) -> Outputs:
        def compute() -> Outputs:
            return boost(
                load(),
                labels,
                parts.train,
                rounds=declaration.teacher_rounds,
                learning_rate=declaration.teacher_learning_rate,
                threads=profile.threads,
            )

        return cached(cache, {**key, **learner, "inputs": _plain(inputs)}, table.num_rows, compute, clockwork.note)

    teacher = taught(teacher_inputs, lambda: tensors(table, teacher_inputs))
    clockwork.done("teacher", 0.4)
    reference = taught(student_inputs, lambda: data)
    clockwork.done("reference", 0.65)

    preparation = learn(declaration.plan(student_inputs), parts.boundaries[0])
    prepare = Prepare(preparation, compiled(preparation))
    numbers, places = map(torch.from_numpy, prepare(data))
    logits = torch.from_numpy(teacher.logits.copy())

    def examples(rows: Index) -> Examples:
        return Examples(numbers[rows], places[rows], torch.from_numpy(labels[rows]).float(), logits[rows])

    learning, validation = examples(parts.train), examples(parts.validation)
    identity = digest(
        {
            **key,
            **learner,
            "teacher_inputs": _plain(teacher_inputs),
            "student_inputs": _plain(student_inputs),
            "declaration": _settings(declaration, student_inputs),
            "profile": dataclasses.asdict(profile),
            "torch": torch.__version__,
        }
    )[:12]
    students, epochs = {}, {}
    for name, how, done in (
        ("student", declaration, 0.8),
        ("control", dataclasses.replace(declaration, soft_weight=0.0), 0.95),
    ):
        students[name] = Student(prepare, declaration.hidden, declaration.dropout, declaration.seed)
        epochs[name] = train(
            students[name], learning, validation, how, profile, clockwork.within(name, done), runs / identity / name
        )
        clockwork.done(name, done)

    test = parts.test
    head = head or Head()
    fed = head.fed(student_inputs)
    row = feeds(fed, columns(table.take(test[:1]), fed))

    def timed(student: Student) -> dict[str, float]:
        model = graph(student, head).SerializeToString()
        opened = session(model, 1)
        return {"bytes": len(model), **latency(lambda: predict(opened, row))}

    models = {
        "teacher": _taught(teacher, labels, test),
        "reference": _taught(reference, labels, test),
        **{name: {**_trained(one, data[test], labels[test]), **timed(one)} for name, one in students.items()},
    }
    clockwork.done("evaluate", 0.98)
    lift = models["reference"]["auc"] - 0.5
    report = DistillationReport(
        identity,
        declaration.name,
        folder / identity,
        models,
        {name: len(getattr(parts, name)) for name in ("train", "validation", "test")},
        (clock.moment(parts.boundaries[0]).isoformat(), clock.moment(parts.boundaries[1]).isoformat()),
        clockwork.seconds,
        epochs,
        (models["student"]["auc"] - 0.5) / lift if lift > 0 else None,
    )
    record = _record(report, declaration, parts, preparation, student_inputs, label, contract, training_set)
    publish(folder / identity, lambda fresh: _write(fresh, students, record, report, prepare))
    # Those of earlier settings, too: they are large, and nothing goes on from them any more.
    for run in runs.glob("*/*"):
        discard(run)
    progress(f"student {identity}: test AUC {models['student']['auc']:.4f}", 1.0)
    return report


class _Stages:
    """Seconds per stage, and the share of the whole that is done."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress, self._share, self._since = progress, 0.0, time.perf_counter()

    def note(self, text: str) -> None:
        self._progress(text, self._share)

    def within(self, stage: str, end: float) -> Progress:
        start = self._share
        return lambda text, done: self._progress(f"{stage}, {text}", start + (end - start) * done)

    def done(self, stage: str, share: float) -> None:
        now = time.perf_counter()
        self.seconds[stage], self._since, self._share = round(now - self._since, 3), now, share
        self._progress(f"{stage} done", share)


def _plain(inputs: Sequence[ModelInput]) -> list[list[str]]:
    return [[item.name, item.dtype.name] for item in inputs]


def _settings(declaration: Distillation, inputs: Sequence[ModelInput]) -> dict[str, Any]:
    """The declared values a student depends on; spine and services are in the contract, a gate changes nothing."""
    skipped = {"spine", "teacher", "student", "min_lift", "description", "preparation"}
    plain = {
        item.name: list(value) if isinstance(value := getattr(declaration, item.name), tuple | list) else value
        for item in dataclasses.fields(declaration)
        if item.name not in skipped
    }
    plan = declaration.plan(inputs)
    steps = {name: [described(step) for step in chain] for name, chain in plan.numbers.items()}
    return {**plain, "preparation": {**steps, **{name: described(text) for name, text in plan.texts.items()}}}


def _taught(outputs: Outputs, labels: Array, test: Index) -> dict[str, float]:
    return {
        **metrics(labels[test], sigmoid(outputs.logits[test])),
        "parameters": outputs.parameters,
        "bytes": outputs.bytes,
        "p50_us": outputs.p50_us,
        "p99_us": outputs.p99_us,
    }


def _trained(student: Student, data: Tensors, labels: Array) -> dict[str, float]:
    return {**metrics(labels, sigmoid(student.logits(data))), "parameters": student.size}


def _record(
    report: DistillationReport,
    declaration: Distillation,
    parts: Split,
    preparation: Preparation,
    inputs: Sequence[ModelInput],
    label: str,
    contract: str,
    training_set: str,
) -> StudentRecord:
    return StudentRecord(
        id=report.id,
        name=declaration.name,
        contract=contract,
        training_set=training_set,
        label=label,
        inputs=tuple((item.name, item.dtype.name) for item in inputs),
        split=declaration.split,
        boundaries=parts.boundaries,
        hidden=tuple(declaration.hidden),
        dropout=declaration.dropout,
        preparation=preparation,
    )


def _write(
    folder: Path, students: dict[str, Student], record: StudentRecord, report: DistillationReport, prepare: Prepare
) -> None:
    (folder / FILE).write_bytes(prepare.graph)
    for name, student in students.items():
        save_file(student.state_dict(), folder / f"{name}.safetensors")
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    (folder / "report.json").write_text(json.dumps(report.as_dict(), indent=2, allow_nan=False), encoding="utf-8")
