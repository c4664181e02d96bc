"""What is particular to a kind of model: its batches, its teacher, its student, what that is taught, how good it is.

All else is the same for all: the split, the cache of the teacher's outputs, seeds, the control, the loop, the report.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from onnx import ModelProto
from torch import Tensor, nn

from isthmus.distill.declaration import Distillation, Plan
from isthmus.distill.evaluation.metrics import agreement, cosine
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.outputs.form import Form
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.split import Split, split_table
from isthmus.distill.teachers.teacher import Teacher, named
from isthmus.distill.types import Answers, Array, Index, spread
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.latency import Latency
from isthmus.features.package.manifest import Feeds, ModelInput
from isthmus.features.profiles import TrainingProfile
from isthmus.features.progress import Progress
from isthmus.features.types import UnixTimestamp
from isthmus.transforms.preparation.fit import Preparation

Learn = Callable[[Plan, int], Preparation]
"""Learns what a plan says from the rows before a moment, in microseconds, whose labels were known by then."""


@dataclass(frozen=True, eq=False)
class Material:
    """What a task is made of.

    Attributes:
        declaration: of the distillation.
        table: the training set: a column per input, `event_timestamp`, `known_at` (when the label became known) and
            the label.
        teacher_inputs: what the teacher sees.
        student_inputs: what the student, the control and the references see.
        label: the label's column.
        training_set: what identifies the table; the same identity must mean the same rows.
        contract: hash of the contract of the features.
        profile: device, precision and threads.
        request_inputs: the request transforms in the student's graph.
        learn: learns a preparation from the training part, by the project's engine.
        progress: told what a task is at while it makes its teacher, and the share of that.
        latency: what servers on this machine answered lately, to which the training gives way; None to ignore them.
    """

    declaration: Distillation
    table: pa.Table
    teacher_inputs: Sequence[ModelInput]
    student_inputs: Sequence[ModelInput]
    label: str
    training_set: str
    contract: str
    profile: TrainingProfile
    request_inputs: RequestInputs
    learn: Learn
    progress: Progress = lambda _text, _done: None
    latency: Callable[[], Latency | None] | None = None

    @cached_property
    def parts(self) -> Split:
        """Which of its rows are learned from, which decide, and which are for the report."""
        return split_table(self.table, self.declaration.split, self.declaration.split_by)


class Batch(NamedTuple):
    """Rows as a student takes them: the arguments of its `forward`, and the labels if its objective asks for them."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """What a student's graph is fed at once, and what it must answer.

    Attributes:
        feeds: tensors by name.
        expected: what the student says in torch, by output of the graph.
        rows: of a model of rows, what the tensors are made of, as golden cases keep it.
    """

    feeds: Feeds
    expected: Answers
    rows: Sequence[tuple[Any, ...]] = ()


class Task(ABC):
    """A kind of model. It is made once for each distillation, and asked for rows of the training set by their number.

    Attributes:
        metric: the measure of `quality` that decides which weights are kept, and that reports lead with.
        more: whether more of it is better.
        keys: what the student's outputs are called, if its `forward` gives a tensor or a tuple of them.
        classes: what the student's classes are called, in the order of its logits; None where it has none, or one logit
            of two. What teachers give by class is put in this order, and teachers with other labels, or none, are
            refused.
        about: what each model is, in a line; models that are not named have the usual one.
        at_once: rows of which a teacher or a student is asked at once, where nothing is learned.
        rows_per_thread: rows of a batch that are worth a thread.
        form: how the teacher's outputs are kept.
        tolerance: the largest absolute difference between the answers of a package in each precision and the student's.
        quantized: the operators whose weights and inputs are whole numbers in an INT8 graph.
        golden: test rows in a package, with its answers; with 0 there are the edges alone.
        measured: names of all that `measures` may give, so that a gate about something else is refused before the
            first step.
        pipeline: what Hugging Face's hub calls such models ("image-to-image"), for the model card; None if it has no
            name for them.
        compared: rows on which the verdict compares a package with its student, at most.
        shape: what its student is made with, by name: what `Distillation(shape=...)` says otherwise, and what a search
            tries values of.
        max_sizes: the largest of each size but the rows that the graph leaves open, by its name, for runtimes that plan
            memory ahead.
    """

    metric: str
    more = True
    keys: Sequence[str] = ("logits",)
    classes: Sequence[str] | None = None
    about: Mapping[str, str] = {}
    at_once = 256
    rows_per_thread = 1
    form = Form()
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    quantized: Sequence[str] = ("Conv", "Gemm", "MatMul")
    golden = 16
    compared = 2000
    measured: Sequence[str] = ()
    pipeline: str | None = None
    shape: Mapping[str, Any] = MappingProxyType({})
    max_sizes: Mapping[str, int] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Names of version 0.1, which leave with 0.3: without this, a user's check for leaks would silently not run.
        for old, new in (("told", "leaks"), ("most", "max_sizes")):
            if old in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is called {new} now", DeprecationWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])

    def __init__(self, material: Material) -> None:
        self.material = material
        self.shape = {**self.shape, **material.declaration.shape}

    @abstractmethod
    def teacher(self) -> Teacher:
        """Who is learned from."""

    def references(self) -> Mapping[str, Teacher]:
        """Others that the report measures beside it."""
        return {}

    @abstractmethod
    def asked(self, rows: Index) -> Any:
        """Some rows as teacher and references take them."""

    def tokenizers(self) -> tuple[Any, Any] | None:
        """The teacher's and the student's: of transformers, of tokenizers, or functions from text to ids.

        Before the first step both are given texts on which tokenizers differ. None: there are none.
        """
        return None

    @abstractmethod
    def student(self) -> nn.Module:
        """A new student of the task's `shape`, its weights drawn by torch's own generator."""

    def line(self) -> str:
        """What the definitions say in the Distillation, for a student of the task's `shape`."""
        return f"shape={dict(self.shape)!r}"

    @abstractmethod
    def batch(self, rows: Tensor) -> Batch:
        """Some rows, int64 (n,), as the student takes them, on the CPU."""

    def leaks(self) -> Sequence[str]:
        """The student's inputs that say the label by themselves, in words: none of which this task knows by default.

        Where there is one, nothing is learned: it is known only after the label, or no model is needed.
        """
        return ()

    @abstractmethod
    def objective(self) -> Objective:
        """What the student is trained for. The control is trained for its terms that do not ask the teacher."""

    @abstractmethod
    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:
        """How good answers are, by name; NaN where these rows do not say.

        Args:
            answers: of these rows.
            rows: their numbers.
            taught: what the teacher says of the same rows.
        """

    def score(self, answers: Answers, rows: Index, taught: Answers) -> float:
        """The `metric` of `quality` alone, for those who can have it for less."""
        return self.quality(answers, rows, taught)[self.metric]

    @abstractmethod
    def model(self, student: nn.Module) -> ModelProto:
        """The graph that a device runs."""

    def network(self, student: nn.Module) -> nn.Module | None:
        """What the graph does, as a module of torch: from the tensors, in the order of `feeds`, to the outputs.

        By default the student. None if no module does all that the graph does.
        """
        return student

    @abstractmethod
    def feeds(self, rows: Index) -> Feeds:
        """What the graph is fed for some rows."""

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """What a student in eval mode says in torch of what its graph is fed, by output of the graph.

        By default the tensors are the arguments of its `forward`, in order.
        """
        return {
            key: value.numpy()
            for key, value in answers(self, student(*map(torch.from_numpy, feeds.values()))).items()
            if isinstance(value, Tensor)
        }

    def case(self, student: nn.Module, rows: Index) -> Case:
        """Some rows."""
        fed = self.feeds(rows)
        return Case(fed, self.expected(student, fed))

    def edges(self, student: nn.Module) -> Sequence[Case]:  # noqa: ARG002 - for others
        """What no row may hold, and a device may be fed all the same: nothing by default."""
        return ()

    def cases(self, student: nn.Module) -> list[Case]:
        """The golden cases of a package: test rows, and what no row may hold."""
        test = self.material.parts.test
        usual = [self.case(student, test[spread(len(test), self.golden)])] if self.golden else []
        return [*usual, *self.edges(student)]

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """What a graph says of rows, by the student's keys and as `quality` takes it; by default, its outputs.

        Args:
            run: the graph, from tensors to outputs by name.
            rows: their numbers, not more than `at_once`.
        """
        return run(self.feeds(rows))

    def shipped(self, taught: TeacherOutputs) -> Mapping[str, tuple[bytes, str]]:  # noqa: ARG002 - for others
        """What else a device needs, by the name of its file: the content, and what it is for.

        Args:
            taught: what the teacher says of all rows of the training set.
        """
        return {}

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """How like the teacher's answers on the same rows a student's are, by the first that both give.

        Of logits of several positions in a row, every position counts. NaN where an answer has no direction.
        """
        if "logits" in student and "indexes" in teacher:
            return {"agreement": float((student["logits"].argmax(-1) == teacher["indexes"][..., 0]).mean())}
        both = [key for key in student if key in teacher and student[key].shape == teacher[key].shape]
        if not both:
            return {}
        ours, theirs = student[both[0]], teacher[both[0]]
        if both[0] == "logits":
            pair = [array.reshape(-1, array.shape[-1]) if array.ndim > 2 else array for array in (ours, theirs)]
            return agreement(*pair)
        flat = [array.reshape(len(array), -1) for array in (ours, theirs)]
        return {"cosine": cosine(*flat) if all(array.any(1).all() for array in flat) else math.nan}

    def sliced(self, rows: Index) -> pa.Table:
        """The columns by whose values the report looks for slices where the student loses: its inputs but times."""
        inputs = [item.name for item in self.material.student_inputs if item.dtype != UnixTimestamp]
        return self.material.table.select(inputs).take(rows)

    def identities(self) -> Array:
        """Which row is which for the teacher, (n, 16) uint8: by default what the columns of its inputs hold."""
        return identities(self.material.table.select([item.name for item in self.material.teacher_inputs]))

    def options(self) -> dict[str, Any]:
        """What else the teacher's outputs depend on, as plain data."""
        return {}

    def content(self) -> str:
        """A digest of all that the student learns from and its teacher's outputs do not tell."""
        return self.material.training_set

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:  # noqa: ARG002 - for others
        """What else the report says, by the names in `measured`, from the quality of each model."""
        return {}

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - for others
        """What is written beside the weights of a student with this identity."""
        return {}


def answers(task: Task, outputs: Any) -> Mapping[str, Any]:
    """A module's outputs by key.

    Raises:
        ConfigurationError: there are not as many as the task has keys.
    """
    return named(outputs, task.keys, f"{task.material.declaration.where}: student")


def student_answers(task: Task, module: nn.Module, rows: Index, device: torch.device) -> dict[str, Array]:
    """What a module in eval mode says of rows, a part of them at a time. Lists of layers are for objectives alone.

    Raises:
        ConfigurationError: an answer has other sizes in one part than in another.
    """
    parts: list[dict[str, Tensor]] = []
    with torch.inference_mode():
        for begin in range(0, len(rows), task.at_once):
            batch = task.batch(torch.from_numpy(rows[begin : begin + task.at_once]))
            given = answers(task, module(*(tensor.to(device) for tensor in batch.inputs)))
            parts.append({key: value for key, value in given.items() if isinstance(value, Tensor)})
    sizes = {key: sorted({tuple(part[key].shape[1:]) for part in parts}) for key in parts[0]}
    problems = [
        Problem(f"output {key}", f"sizes {found[0]} and {found[1]}", "the same for all rows: pad to one length")
        for key, found in sizes.items()
        if len(found) > 1
    ]
    if problems:
        raise ConfigurationError(f"{task.material.declaration.where}: student", problems)
    return {key: torch.cat([part[key] for part in parts]).float().cpu().numpy() for key in parts[0]}


def graph_answers(task: Task, run: Callable[[Feeds], Answers], rows: Index) -> dict[str, Array]:
    """What a graph says of rows, as `quality` takes it, a part of them at a time.

    Args:
        task: of the rows.
        run: the graph, from tensors to outputs by name.
        rows: their numbers.
    """
    parts = [task.replies(run, rows[begin : begin + task.at_once]) for begin in range(0, len(rows), task.at_once)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
