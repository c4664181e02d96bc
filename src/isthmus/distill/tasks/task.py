"""What is particular to a kind of model: its batches, teacher, student, objective and quality.

The rest is shared: the split, the cache of the teacher's outputs, seeds, the control, the loop, the report.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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
from isthmus.distill.types import Answers, Array, Index, in_batches, spread
from isthmus.features.latency import Latency
from isthmus.features.profiles import TrainingProfile
from isthmus.features.progress import Progress, silent
from isthmus.features.types import UnixTimestamp
from isthmus.features.values.columns import Values
from isthmus.package.inputs import Feeds, ModelInput
from isthmus.package.manifest import ROUNDING, Variant
from isthmus.package.manifest import TensorInfo as Described
from isthmus.transforms.preparation.fit import Preparation

if TYPE_CHECKING:
    from isthmus.distill.decoder.writer import Writer

Learn = Callable[[Plan, int], Preparation]
"""Fits a plan to the rows before a time, in microseconds, whose labels were known by then."""


@dataclass(frozen=True, eq=False)
class Material:
    """The material of a task.

    Attributes:
        declaration: of the distillation.
        table: the training set: a column per input, `event_timestamp`, `known_at` (when the label became known) and
            the label.
        teacher_inputs: of the teacher.
        student_inputs: of the student, the control and the references.
        label: the label's column.
        training_set: the identity of the table, which no table with different rows may have.
        contract: hash of the contract of the features.
        profile: device, precision and threads.
        request_inputs: the request transforms in the student's graph.
        learn: learns a preparation from the training part, by the project's engine.
        progress: called with the work and its share done while a task prepares its teacher.
        latency: recent latency of the servers on this machine, to which the training gives way; None to ignore them.
        device: the table with the student's inputs as a device sees them; None where it sees what the server sees.
        aged: some rows once for each age (microseconds), with the inputs of the student's graph of that age; likewise.
        division: the parts, of a task that makes its own table of rows; None for those of the declaration.
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
    progress: Progress = silent
    latency: Callable[[], Latency | None] | None = None
    device: pa.Table | None = None
    aged: Callable[[Index, Sequence[int]], Sequence[pa.Table]] | None = None
    division: Split | None = None

    @property
    def student_table(self) -> pa.Table:
        """The table with the student's inputs, row by row as `table`."""
        return self.table if self.device is None else self.device

    @cached_property
    def parts(self) -> Split:
        """The rows for training, for validation and for the report."""
        if self.division is not None:
            return self.division
        label = self.declaration.label
        within = None if label is None else label.grouped_by
        return split_table(self.table, self.declaration.split, self.declaration.split_by, within)


class Batch(NamedTuple):
    """Rows for a student: the arguments of its `forward`, and the labels if its objective uses them."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None = None


class TeacherBatch(NamedTuple):
    """A batch on the training's device, with the teacher's outputs."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None
    teacher: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """A batch of a student's graph and the expected answers.

    Attributes:
        feeds: inputs by name.
        expected: outputs by name, computed by the student in torch.
        rows: of a model of rows, the values behind the tensors, for golden cases.
        core: inputs of the graph's numeric core by name, where the task has one.
        numbers: numbers of the rows in the training set; empty where they are not from there.
    """

    feeds: Feeds
    expected: Answers
    rows: Sequence[tuple[Any, ...]] = ()
    core: Feeds = field(default_factory=dict)
    numbers: Sequence[int] = ()

    def row_name(self, row: int) -> str:
        """Return the name of a row for messages."""
        return f"row {self.numbers[row]} of the training set" if row < len(self.numbers) else f"golden row {row}"

    def fed(self, variant: Variant) -> Feeds:
        """The inputs of a model file."""
        return self.core if variant.core else self.feeds


class Core(NamedTuple):
    """The numeric core of a graph: a module of torch from `tensors`, in their order, to the outputs of the graph.

    `head` gives the content of `head.json`, which makes the tensors of raw values, or raises a GateFailed; None if the
    task has none.
    """

    network: nn.Module
    tensors: Sequence[Described]
    head: Callable[[], bytes] | None = None


class Task(ABC):
    """A kind of model. There is an instance for each distillation; rows of the training set go by their number.

    Attributes:
        metric: the figure of `quality` by which weights are selected, and with which reports begin.
        more: whether more of it is better.
        keys: names of the student's outputs, if its `forward` returns a tensor or a tuple.
        classes: names of the student's classes, in the order of its logits; None where it has none, or a logit of two.
            A teacher's outputs by class are reordered like this; teachers with different labels, or none, are refused.
        about: a line about each model; models that are not named have the usual line.
        at_once: batch size of a teacher or a student outside of training.
        graph_rows: rows that its graph takes at once, if fewer.
        rows_per_thread: rows of a batch that are worth a thread.
        form: of the cached outputs of the teacher.
        tolerance: the largest absolute difference between the answers of a package in each precision and the student's.
            The default is relative: it counts times the scale of each floating-point output, which is the width of the
            middle 95 % of the student's numbers for 256 test rows, and at least 1: it is absolute for probabilities.
        rounding: how far apart two processors may be in an answer.
        quantized: the operators whose weights and inputs are whole numbers in an INT8 graph; of Gather, embedding
            tables, the weights alone.
        golden: test rows in a package, with its answers; with 0 there are only the edges.
        measured: names of all figures of `measures`: a gate on an unknown figure is refused before the first step.
        pipeline: the hub's name of such models ("image-to-image"), for the model card; None if it has no name for them.
        compared: rows on which the verdict compares a package with its student, at most.
        shape: options of the student by name: `Distillation(shape=...)` overrides them, and a search varies them.
        max_sizes: the maximum of each named size of the graph but the rows, for servers, which refuse more, and for
            runtimes that plan memory ahead.
        padded: those of them that zeros may fill up, as a mask says what counts: no answer changes. A runtime without
            sizes that differ from call to call is fed tensors of the maximum.
    """

    metric: str
    more = True
    keys: Sequence[str] = ("logits",)
    classes: Sequence[str] | None = None
    about: Mapping[str, str] = {}
    at_once = 256
    graph_rows: int | None = None
    rows_per_thread = 1
    form = Form()
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    rounding = ROUNDING
    quantized: Sequence[str] = ("Conv", "Gather", "Gemm", "MatMul")
    golden = 16
    compared = 2000
    measured: Sequence[str] = ()
    pipeline: str | None = None
    shape: Mapping[str, Any] = MappingProxyType({})
    max_sizes: Mapping[str, int] = {}
    padded: Sequence[str] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Names of version 0.1, which leave with 0.3: without this, a user's check for leaks would silently not run.
        for old, new in (("told", "leaks"), ("most", "max_sizes")):
            if old in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is called {new} now", DeprecationWarning, stacklevel=3)
                setattr(cls, new, vars(cls)[old])

    def __init__(self, material: Material) -> None:
        self.material = material
        self.shape = {**self.shape, **material.declaration.shape}

    def with_shape(self, shape: Mapping[str, Any]) -> Self:
        """This task, with these values in its `shape`."""
        task = copy.copy(self)
        task.shape = {**self.shape, **shape}
        return task

    @abstractmethod
    def teacher(self) -> Teacher:
        """The teacher."""

    def references(self) -> Mapping[str, Teacher]:
        """Further models that the report measures beside the teacher."""
        return {}

    @abstractmethod
    def asked(self, rows: Index) -> Any:
        """These rows as a batch for the teacher and the references."""

    def tokenizers(self) -> tuple[Any, Any] | None:
        """The teacher's and the student's: of transformers, of tokenizers, or functions from text to ids.

        Before the first step both are compared on texts on which tokenizers differ. None: there are none.
        """
        return None

    @abstractmethod
    def student(self) -> nn.Module:
        """A new student of the task's `shape`, its weights drawn by torch's own generator."""

    def finished(self, student: nn.Module) -> nn.Module:
        """The model that a student becomes once it is trained; by default the student."""
        return student

    def line(self) -> str:
        """The argument of the Distillation for a student of the task's `shape`."""
        return f"shape={dict(self.shape)!r}"

    @abstractmethod
    def batch(self, rows: Tensor) -> Batch:
        """These rows, int64 (n,), as the student's batch, on the CPU."""

    def leaks(self) -> Sequence[str]:
        """The student's inputs that reveal the label by themselves, in words; by default none.

        With a leak nothing is trained: such an input is known only after the label, or no model is needed.
        """
        return ()

    def groups(self, rows: Index) -> Index | None:  # noqa: ARG002 - of subclasses
        """The number of each row's group, of which a batch has all rows or none; by default None, without groups."""
        return None

    def after_training(self, student: nn.Module) -> None:  # noqa: B027 - most learn nothing more
        """What a student learns from the validation part, once it has its best weights; by default nothing."""

    @abstractmethod
    def objective(self) -> Objective:
        """What the student is trained for. The control is trained for its terms that do not ask the teacher."""

    def sampled(self, student: nn.Module, batch: TeacherBatch) -> TeacherBatch:  # noqa: ARG002 - of subclasses
        """The batch that a student learns from in its place, such as one that it wrote itself; by default the same.

        Not asked for a control. What is random in it is drawn by torch's own generator, so that a run that was killed
        goes on with the same.
        """
        return batch

    @abstractmethod
    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:
        """Figures of a model's answers for these rows, of which `teacher` has the teacher's; NaN if undefined."""

    def score(self, answers: Answers, rows: Index, teacher: Answers) -> float:
        """The `metric` of `quality` alone, for tasks that can compute it faster."""
        return self.quality(answers, rows, teacher)[self.metric]

    @abstractmethod
    def model(self, student: nn.Module) -> ModelProto:
        """The graph that a device runs."""

    def network(self, student: nn.Module) -> nn.Module | None:
        """The graph as a module of torch, from the tensors in the order of `feeds` to the outputs.

        By default the student. None if no module does everything that the graph does.
        """
        return student

    def writer(self, student: nn.Module) -> "Writer | None":  # noqa: ARG002 - of subclasses
        """What continues texts with a student in eval mode, if that is what its package is for; by default None."""
        return None

    def figures(
        self, run: Callable[[Feeds], Answers], student: nn.Module, teacher: TeacherOutputs
    ) -> Mapping[str, float]:
        """What gates ask of a model file of the `writer`, by their names; `teacher` has the outputs for all rows."""
        raise NotImplementedError

    def tolerances(self, student: nn.Module) -> Mapping[str, float]:  # noqa: ARG002 - of subclasses
        """The `tolerance` of the files of a student's package, by precision."""
        return self.tolerance

    def graph_batches(self, rows: Index) -> Iterator[Index]:
        """Rows in batches that its graph takes."""
        return in_batches(rows, self.graph_rows or self.at_once)

    def core(self, student: nn.Module) -> Core | None:  # noqa: ARG002 - of subclasses
        """What follows the texts and truth values of the graph, for runtimes that have neither.

        None, as by default, where `network` does it all. With a core, `core_feeds` and `Case.core` have its inputs.
        """
        return None

    def core_feeds(self, rows: Index) -> Feeds:
        """The inputs of the core for these rows."""
        raise NotImplementedError

    @abstractmethod
    def feeds(self, rows: Index) -> Feeds:
        """The inputs of the graph for these rows."""

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """The outputs of the graph, computed by a student in eval mode in torch.

        By default the tensors are the arguments of its `forward`, in order.
        """
        outputs = answers(self, student(*map(torch.from_numpy, feeds.values())))
        return {key: value.numpy() for key, value in outputs.items() if isinstance(value, Tensor)}

    def case(self, student: nn.Module, rows: Index) -> Case:
        """A case of these rows."""
        fed = self.feeds(rows)
        return Case(fed, self.expected(student, fed))

    def numbered_case(self, student: nn.Module, rows: Index) -> Case:
        """Return a case of these rows that knows their row numbers, for messages."""
        return replace(self.case(student, rows), numbers=rows.tolist())

    def edges(self, student: nn.Module) -> Sequence[Case]:  # noqa: ARG002 - of subclasses
        """Inputs that are in no row but that a device may meet; by default none."""
        return ()

    def cases(self, student: nn.Module) -> list[Case]:
        """The golden cases of a package: test rows and edges."""
        test = self.material.parts.test
        usual = [self.numbered_case(student, test[spread(len(test), self.golden)])] if self.golden else []
        return [*usual, *self.edges(student)]

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """The answers of a graph for one of the `graph_batches`, for `quality`; by default, its outputs."""
        return run(self.feeds(rows))

    def shipped(self, teacher: TeacherOutputs) -> Mapping[str, tuple[bytes, str]]:  # noqa: ARG002 - of subclasses
        """Further files for a device by name, each with its content and purpose; `teacher` has all its outputs."""
        return {}

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """How alike the answers of student and teacher on the same rows are, by the first output that both have.

        Of logits of several positions in a row, every position counts. NaN where an answer has no direction.
        """
        if "logits" in student and "indexes" in teacher:
            return {"agreement": float((student["logits"].argmax(-1) == teacher["indexes"][..., 0]).mean())}
        common = (key for key in student if key in teacher and student[key].shape == teacher[key].shape)
        if (key := next(common, None)) is None:
            return {}
        ours, theirs = student[key], teacher[key]
        if key == "logits":
            pair = [array.reshape(-1, array.shape[-1]) if array.ndim > 2 else array for array in (ours, theirs)]
            return agreement(*pair)
        flat = [array.reshape(len(array), -1) for array in (ours, theirs)]
        return {"cosine": cosine(*flat) if all(array.any(1).all() for array in flat) else math.nan}

    def over(self, table: pa.Table, rows: Index) -> Self:
        """This task for some rows alone, numbered from 0, with the inputs of their student's graph in another table.

        Only for a task whose rows a device can keep: a `Tabular`.
        """
        raise NotImplementedError

    def raw_case(self, student: nn.Module, raw: Mapping[str, Values]) -> Case:
        """A case of rows that the table may not have, by the raw values of the graph's inputs.

        Only for a task whose rows a device can keep: a `Tabular`.
        """
        raise NotImplementedError

    def sliced(self, rows: Index) -> pa.Table:
        """The columns by which the report slices the test rows: the student's inputs but times."""
        inputs = [item.name for item in self.material.student_inputs if item.dtype != UnixTimestamp]
        return self.material.table.select(inputs).take(rows)

    def identities(self) -> Array:
        """The identity of each row for the teacher, (n, 16) uint8; by default of the values of its inputs."""
        return identities(self.material.table.select([item.name for item in self.material.teacher_inputs]))

    def options(self) -> dict[str, Any]:
        """Plain data on which the teacher's outputs depend as well."""
        return {}

    def content(self) -> str:
        """A digest of the training data except for the teacher's outputs."""
        return self.material.training_set

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:  # noqa: ARG002 - of subclasses
        """Further figures of the report, by the names in `measured`, from the quality of each model."""
        return {}

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - of subclasses
        """Further files beside the weights of a student with this identity."""
        return {}


def answers(task: Task, outputs: Any) -> Mapping[str, Any]:
    """A module's outputs by key. Raises a ConfigurationError if the task has more or fewer keys."""
    return named(outputs, task.keys, f"{task.material.declaration.where}: student")
