"""The interface of a task: everything specific to a kind of model, such as batches, teacher, student and metrics."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import torch
from onnx import ModelProto
from torch import Tensor, nn

from isthmus.distill.declaration import Distillation, Plan, Predictor
from isthmus.distill.evaluation.metrics import agreement, cosine
from isthmus.distill.labels import Rank
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.split import Split, split_table
from isthmus.distill.teachers.teacher import Teacher, by_key
from isthmus.distill.types import Answers, Array, Index, evenly_spaced, in_batches
from isthmus.features.latency import Latency
from isthmus.features.profiles import TrainingProfile
from isthmus.features.progress import Progress, silent
from isthmus.features.types import VECTOR, UnixTimestamp
from isthmus.features.values.columns import Values
from isthmus.package.inputs import Feeds, ModelInput
from isthmus.package.manifest import ROUNDING, Variant
from isthmus.package.manifest import TensorInfo as Described
from isthmus.transforms.preparation.fit import Preparation

if TYPE_CHECKING:
    from isthmus.distill.decoder.writer import TextWriter

Learn = Callable[[Plan, int], Preparation]
"""Fits a plan to the rows before a time, in microseconds, whose labels were known by then."""


@dataclass(frozen=True, eq=False)
class Material:
    """Everything a `Task` is created from: declaration, training set, inputs and training profile.

    Attributes:
        declaration: the distillation as declared in `definitions.py`.
        table: training set, with a column per input, `event_timestamp`, `known_at` (when the label became known) and
            the label.
        student_inputs: inputs of the student, the control and the references.
        label: name of the label's column.
        training_set: text that identifies the rows of the table; other rows must have another text.
        contract: hash of the contract (schema of the features).
        profile: device, precision and threads.
        request_inputs: request transforms in the student's graph.
        learn: fits a preparation to the training part with the project's engine.
        progress: called with a text and the finished share while a task prepares its teacher.
        latency: returns recent latency of the servers on this machine, for which training pauses; None to ignore them.
        device: table with the student's inputs as a device sees them; None if it sees what the server sees.
        aged: takes rows and ages in microseconds; returns a table per age with the inputs of the student's graph;
            None if a device sees what the server sees.
        division: parts of the rows, if a task makes its own table; None for the declared split.
        root: folder of the project, to which the paths of declared teachers are relative.
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
    root: Path = field(default_factory=Path)

    @property
    def student_table(self) -> pa.Table:
        """Table to read the student's inputs from: `device` (inputs as a device sees them) if it is set, else `table`.

        Both have the same rows.
        """
        return self.table if self.device is None else self.device

    @cached_property
    def parts(self) -> Split:
        """Row numbers of the training, validation and test parts: `division` if it is set, else the declared split.

        Validation and test rows without a label are in no part if `labeled` is set. Raises a DataError if the table
        cannot be split.
        """
        if self.division is not None:
            return self.division
        label = self.declaration.label
        within = None if label is None else label.grouped_by
        parts = split_table(self.table, self.declaration.split, self.declaration.split_by, within)
        return parts if self.labeled is None else parts.drop_unlabeled(self.labeled)

    @cached_property
    def labeled(self) -> Array | None:
        """Mask of the rows with a label, bool (n,), if the others are learned from a declared teacher; else None."""
        task, label = self.declaration.task, self.declaration.label
        taught = isinstance(task, Predictor) and task.teacher is not None and not isinstance(label, Rank | None)
        if not taught or self.label not in self.table.column_names or not self.table[self.label].null_count:
            return None
        mask: Array = pc.is_valid(self.table[self.label]).to_numpy()
        return mask


class Batch(NamedTuple):
    """Rows for a student: the arguments of its `forward`, and labels if its objective uses them."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None = None


class TeacherBatch(NamedTuple):
    """A batch for a training step, on the training device, with the teacher's outputs by key."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None
    teacher: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of a student's graph and the expected outputs, to check a model file.

    Attributes:
        feeds: inputs by name.
        expected: outputs by name, computed by the student in torch.
        rows: raw values from which `feeds` were computed, for models that predict from rows of features.
        core: inputs of the graph's numeric core by name, if the task has a core.
        numbers: row numbers in the training set; empty for other rows.
    """

    feeds: Feeds
    expected: Answers
    rows: Sequence[tuple[Any, ...]] = ()
    core: Feeds = field(default_factory=dict)
    numbers: Sequence[int] = ()

    def row_name(self, row: int) -> str:
        """Return a name for a row of this case, for messages: "row 7 of the training set" or "golden row 2".

        `row` is the row's index in this case. A golden row is a row that a package stores to check itself.
        """
        return f"row {self.numbers[row]} of the training set" if row < len(self.numbers) else f"golden row {row}"

    def fed(self, variant: Variant) -> Feeds:
        """Return the inputs with which to run a model file: `core` if the file has only the numeric core, else `feeds`.

        `variant` is the file's entry in the package's manifest. The numeric core is the part of the graph without texts
        and booleans.
        """
        return self.core if variant.core else self.feeds


class Core(NamedTuple):
    """The numeric part of a graph, for runtimes without strings.

    `network` is a torch module from `tensors`, in order, to the outputs of the graph. `head` returns the content of
    `head.json` (how to compute `tensors` from raw inputs), or raises a GateFailed. It is None if the task provides no
    `head.json`.
    """

    network: nn.Module
    tensors: Sequence[Described]
    head: Callable[[], bytes] | None = None


class Task(ABC):
    """A kind of model. Each distillation creates one instance; `rows` are row numbers in the training set.

    Attributes:
        metric: metric in `quality` that selects weights and comes first in reports.
        more: True if a higher metric is better.
        keys: names of the student's outputs, if its `forward` returns a tensor or a tuple.
        classes: class names in the order of the student's logits; None without classes or with a single logit for two.
            A teacher's outputs per class are reordered to match; a teacher with different or unknown labels is
            rejected.
        about: description of each model in the report; models without an entry get the default.
        at_once: batch size of teacher and student outside of training.
        graph_rows: maximum number of rows that the graph takes at once; None for `at_once`.
        rows_per_thread: rows of a batch that justify another thread.
        form: storage format of the teacher's cached outputs.
        tolerance: largest allowed difference between student and package per precision. By default it is relative: it
            is multiplied by the scale of each floating-point output, the width of the middle 95 % of the student's
            numbers over 256 test rows, but at least 1. So for probabilities it is absolute. Logits are compared as
            probabilities if `classes` is set.
        rounding: largest difference between the outputs of two processors.
        quantized: ONNX operators that INT8 graphs quantize, weights and inputs; for Gather, only the weights.
        golden: number of test rows that a package stores with their outputs; with 0 it has only the cases of `edges`.
        compared: maximum number of rows on which an export compares a package with its student.
        measured: names of all results of `measures`, so that a gate on an unknown name fails before training.
        pipeline: Hugging Face pipeline name ("image-to-image") for the model card, or None.
        shape: options of the student by name, overridden by `Distillation(shape=...)` and varied by a search.
        max_sizes: maximum of each named size of the graph except rows. Servers reject more; some runtimes plan memory
            by it.
        separable: True if each loss of the objective is a mean over elements of single rows, such as rows or tokens, so
            that it can be added up over the parts of a batch (see `counted`). With False, training with `accumulation`
            or several processes takes a second forward pass of the student, and keeps its outputs for a whole batch.
        padded: names in `max_sizes` along which inputs may be padded with zeros without changing an output, because a
            mask says what counts. A runtime with fixed sizes is fed tensors padded to the maximum.
    """

    metric: str
    more = True
    keys: Sequence[str] = ("logits",)
    classes: Sequence[str] | None = None
    about: Mapping[str, str] = {}
    at_once = 256
    graph_rows: int | None = None
    rows_per_thread = 1
    form = OutputFormat()
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
    separable = False

    def __init__(self, material: Material) -> None:
        self.material = material
        self.shape = {**self.shape, **material.declaration.shape}

    def with_shape(self, shape: Mapping[str, Any]) -> Self:
        """Return a copy of this task with other values for some options of its `shape`, for a search to try.

        Options that are not in `shape` keep their values.
        """
        task = copy.copy(self)
        task.shape = {**self.shape, **shape}
        return task

    @abstractmethod
    def teacher(self) -> Teacher:
        """Create the teacher: the model whose outputs the student learns."""

    def references(self) -> Mapping[str, Teacher]:
        """Return other models that the report compares with the student, by name; {} by default."""
        return {}

    @abstractmethod
    def asked(self, rows: Index) -> Any:
        """Return rows of the training set as a batch for the teacher, in the form that its `ask` takes.

        `rows` has row numbers. The models of `references` get the same batches.
        """

    def tokenizers(self) -> tuple[Any, Any] | None:
        """Return the tokenizers of teacher and student, to check before training that both return the same ids.

        Return None, the default, for a task without text. A tokenizer is an object of the transformers or tokenizers
        library, or a function from text to ids.
        """
        return None

    @abstractmethod
    def student(self) -> nn.Module:
        """Create an untrained student as `shape` says, with weights from torch's global random generator."""

    def finished(self, student: nn.Module) -> nn.Module:
        """Convert a trained student to the model that is measured, saved and packaged; by default the student itself.

        Also called on an untrained student, before saved weights are loaded into the result.
        """
        return student

    def line(self) -> str:
        """Return the Python source of the argument that sets `shape` in a Distillation, such as `shape={'width': 64}`.

        A search returns it for the best student, to copy into `definitions.py`.
        """
        return f"shape={dict(self.shape)!r}"

    @abstractmethod
    def batch(self, rows: Tensor) -> Batch:
        """Return the student's inputs and labels for rows of the training set, on the CPU.

        `rows` has row numbers, int64 (n,). Called for each batch in training and evaluation.
        """

    def leaks(self) -> Sequence[str]:
        """Describe each input that reveals the label on its own; () by default.

        Called before training. If there is such an input, `distill` raises a DataError: the input is known too late, or
        makes a model unnecessary.
        """
        return ()

    def groups(self, rows: Index) -> Index | None:  # noqa: ARG002 - for subclasses
        """Return the group number of each row, for tasks that need groups (such as a query's results) in one batch.

        `rows` has row numbers of the training set. Return None, the default, for a task without groups.
        """
        return None

    def labeled(self, rows: Index) -> Index:
        """Return those of `rows` that have a label; by default all. The control is trained on them alone."""
        return rows

    def after_training(self, student: nn.Module) -> None:  # noqa: B027 - most learn nothing more
        """Fit parts of a trained student, such as a calibration, to the validation rows, in place.

        By default do nothing.
        """

    @abstractmethod
    def objective(self) -> Objective:
        """Return the losses that train the student, with their weights.

        The control (a student trained without the teacher) uses only the losses that do not need the teacher.
        """

    def sampled(self, student: nn.Module, batch: TeacherBatch) -> TeacherBatch:  # noqa: ARG002 - for subclasses
        """Return the batch to train on instead of `batch`, such as texts that the student generates.

        Returns `batch` by default. Called in each training step whose objective uses the teacher, so not for the
        control (a student trained without the teacher). Draw random numbers from torch's global generator, so that a
        run that was killed resumes with the same numbers.
        """
        return batch

    def counted(self, batch: TeacherBatch) -> Mapping[str, Tensor]:  # noqa: ARG002 - for subclasses
        """Return the number of elements over which a loss averages in a batch, an integer tensor, by name of its term.

        Called only for a `separable` task. A loss that is not named averages over rows; by default no loss is named.
        """
        return {}

    @abstractmethod
    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:
        """Return the metrics of a model on some rows, by name; NaN for an undefined metric.

        Called for teacher, student, control and references. `rows` has row numbers of the training set. `answers` has
        the model's outputs for these rows by key, and `teacher` the teacher's outputs for the same rows.
        """

    def score(self, answers: Answers, rows: Index, teacher: Answers) -> float:
        """Return only the metric that `self.metric` names, for example to select the best weights during training.

        The arguments are as in `quality`. Override this if there is a faster way than `quality`.
        """
        return self.quality(answers, rows, teacher)[self.metric]

    @abstractmethod
    def model(self, student: nn.Module) -> ModelProto:
        """Export a student as the ONNX graph that a device runs."""

    def network(self, student: nn.Module) -> nn.Module | None:
        """Return a torch module that computes the outputs of the ONNX graph, to convert it for runtimes without ONNX.

        Its arguments are the tensors of `feeds`, in order. By default it is the student. Return None if no torch module
        computes everything that the graph does.
        """
        return student

    def writer(self, student: nn.Module) -> "TextWriter | None":  # noqa: ARG002 - for subclasses
        """Return the text generator to package instead of a single graph; None by default, for tasks without one.

        `student` is a trained student in eval mode.
        """
        return None

    def figures(self, run: Callable[[Feeds], Answers], student: nn.Module, teacher: OutputCache) -> Mapping[str, float]:
        """Measure a model file of a text generator at export; return results by name, which gates may check.

        `run` maps the model file's inputs to its outputs, both arrays by name. `teacher` has the teacher's outputs for
        all rows. Implement this if `writer` returns a text generator; by default it raises NotImplementedError.
        """
        raise NotImplementedError

    def tolerances(self, student: nn.Module) -> Mapping[str, float]:  # noqa: ARG002 - for subclasses
        """Return the largest allowed difference between the outputs of a package and its student, by precision.

        Used when a package is exported; `tolerance` by default. Override it if the limits depend on the trained
        student.
        """
        return self.tolerance

    def graph_batches(self, rows: Index) -> Iterator[Index]:
        """Split row numbers into batches that the exported graph accepts.

        A batch has at most `graph_rows` rows, or `at_once` rows if `graph_rows` is None.
        """
        return in_batches(rows, self.graph_rows or self.at_once)

    def core(self, student: nn.Module) -> Core | None:  # noqa: ARG002 - for subclasses
        """Return the numeric part of the graph, for runtimes without strings and booleans; None by default.

        Return None if `network` covers the whole graph. If you return a core, also implement `core_feeds` and fill
        `Case.core`.
        """
        return None

    def core_feeds(self, rows: Index) -> Feeds:
        """Return the inputs of the graph's numeric core (see `core`) for rows of the training set: arrays by name.

        `rows` has row numbers. Implement this if `core` returns a core; by default it raises NotImplementedError.
        """
        raise NotImplementedError

    @property
    def row_inputs(self) -> Sequence[ModelInput]:
        """Inputs that the values of `Case.rows` belong to, in order, from which `package.inputs.feeds` builds tensors.

        By default these are the inputs of the student and of its request transforms.
        """
        return self.material.request_inputs.graph_inputs(self.material.student_inputs)

    @abstractmethod
    def feeds(self, rows: Index) -> Feeds:
        """Return the exported graph's inputs for rows of the training set: arrays by name.

        `rows` has row numbers.
        """

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """Compute in torch the outputs that the exported graph should return, to check a package.

        `student` is in eval mode. `feeds` has the graph's inputs: arrays by name. By default, passes them to the
        student as tensors, in order. Call this with gradients disabled.
        """
        outputs = answers(self, student(*map(torch.from_numpy, feeds.values())))
        return {key: value.numpy() for key, value in outputs.items() if isinstance(value, Tensor)}

    def case(self, student: nn.Module, rows: Index) -> Case:
        """Return a case to check a model file: the graph's inputs, and the outputs that the student computes in torch.

        `rows` has row numbers of the training set.
        """
        fed = self.feeds(rows)
        return Case(fed, self.expected(student, fed))

    def numbered_case(self, student: nn.Module, rows: Index) -> Case:
        """Return the `case` of some rows together with their row numbers, so that error messages can name a row.

        `rows` has row numbers of the training set.
        """
        return replace(self.case(student, rows), numbers=rows.tolist())

    def edges(self, student: nn.Module) -> Sequence[Case]:  # noqa: ARG002 - for subclasses
        """Return cases with inputs that a device may see but the training set lacks, such as nulls; () by default.

        A package stores these cases to check itself.
        """
        return ()

    def cases(self, student: nn.Module) -> list[Case]:
        """Return the cases that a package stores to check itself: test rows (`self.golden` of them), and `edges`."""
        test = self.material.parts.test
        usual = [self.numbered_case(student, test[evenly_spaced(len(test), self.golden)])] if self.golden else []
        return [*usual, *self.edges(student)]

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """Run an exported graph on rows of the training set, and return its outputs in the form that `quality` takes.

        Used to measure a model file. `run` maps the graph's inputs to its outputs, both arrays by name.
        """
        return run(self.feeds(rows))

    def shipped(self, teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:  # noqa: ARG002 - for subclasses
        """Return additional files for a package, by name: content and purpose (a text for the manifest); {} by default.

        `teacher` has the teacher's outputs for all rows of the training set.
        """
        return {}

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """Measure how well the outputs of a student and the teacher agree on the same rows, for the report.

        If the teacher's logits are cached only as `indexes` of the best classes, returns `agreement`, the share of rows
        with the same best class. Otherwise compares the first output that has the same key and shape in both. For
        logits, returns `agreement` and `kl`, the mean Kullback-Leibler divergence, where each token of a text counts as
        a row. For other outputs, returns `cosine`, the mean cosine similarity, NaN if a row is all zero. Returns {} if
        no output can be compared.
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
        """Return a copy of this task with only some rows and with other inputs, to measure a student on older features.

        `rows` has row numbers of the training set. `table` has the inputs of these rows, in the same order. The copy
        numbers its rows from 0. Only `Tabular` implements this; other tasks raise NotImplementedError.
        """
        raise NotImplementedError

    def raw_case(self, student: nn.Module, raw: Mapping[str, Values]) -> Case:
        """Return a case from raw inputs, to check a package with the inputs that a device sees.

        `raw` has a column of values per input. Only `Tabular` implements this; other tasks raise NotImplementedError.
        """
        raise NotImplementedError

    def sliced(self, rows: Index) -> pa.Table:
        """Return the columns by which the report groups test rows to find slices with low quality.

        By default these are the student's inputs except times and arrays. `rows` has row numbers of the training set.
        """
        inputs = [item.name for item in self.material.student_inputs if item.dtype not in (UnixTimestamp, VECTOR)]
        return self.material.table.select(inputs).take(rows)

    def identities(self) -> Array:
        """Return a key per row of the training set, uint8 (n, 16), under which the teacher's outputs are cached.

        By default it is a hash of the teacher's inputs.
        """
        return identities(self.material.table.select([item.name for item in self.material.teacher_inputs]))

    def options(self) -> dict[str, Any]:
        """Return options that change the teacher's outputs, by name, as part of their key in the cache; {} by default.

        Outputs with other options are cached separately. The values must be plain data, such as numbers, texts and
        lists.
        """
        return {}

    def content(self) -> str:
        """Return a digest of the training data, without the teacher's outputs; by default that of the training set.

        A training run resumes from a checkpoint only if this is unchanged.
        """
        return self.material.training_set

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:  # noqa: ARG002 - for subclasses
        """Return additional results for the report, computed from the metrics of several models; {} by default.

        `quality` has each model's test metrics, by model name and metric name. List the names of the results in
        `measured`.
        """
        return {}

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - for subclasses
        """Return additional files to store next to a student's weights, content by name; {} by default.

        For example, data that is fitted to the training rows and needed to load the student. `identity` is the
        student's id.
        """
        return {}


def answers(task: Task, outputs: Any) -> Mapping[str, Any]:
    return by_key(outputs, task.keys, f"{task.material.declaration.where}: student")
