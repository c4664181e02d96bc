"""The tabular task: gradient boosting on all features teaches a small network for a device."""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import msgspec
import pyarrow as pa
import torch
from onnx import ModelProto
from torch import nn

from isthmus.distill.declaration import LAYERS, MEASURED, Tabular
from isthmus.distill.labels import Binary
from isthmus.distill.language.teachers import TeacherFunction, teachers
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.graph import graph, head
from isthmus.distill.tabular.labelled import LabelTask
from isthmus.distill.tabular.preparation import FILE, Prepare, preparation_graph
from isthmus.distill.tabular.student import (
    RECORD,
    CoreNetwork,
    Student,
    StudentRecord,
    core_feeds,
    core_tensors,
)
from isthmus.distill.tabular.teacher import Boosting
from isthmus.distill.tabular.tensors import TabularTensors, columns, network_inputs, tensors
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.samples import Columns, edges, plain, take
from isthmus.distill.tasks.task import Batch, Case, Core, Material
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Index
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.transforms.preparation.fit import LEARNED


class TabularTask(LabelTask):
    """Predicts a label from a row of features; `Kind` has everything that depends on the kind of label."""

    about: Mapping[str, str] = {
        "teacher": "all server-side features",
        "reference": "the teacher's learner on the student's features",
    }
    at_once = 65_536
    # With batches of 1024 rows a second thread gains nothing on two free cores, and training is ten times slower if
    # another process uses one of them.
    rows_per_thread = 4096
    measured = MEASURED
    quantized = ("Gemm",)
    shape: Mapping[str, Any] = MappingProxyType(dict.fromkeys(LAYERS))
    """None means the value that the Tabular declares."""
    form = OutputFormat("float32")
    """Half precision would make ties of different scores."""

    declared: Tabular

    def __init__(self, material: Material) -> None:
        declared = material.declaration.task
        assert isinstance(declared, Tabular)  # noqa: S101 - only a Tabular selects this task
        super().__init__(material, declared)
        if any(isinstance(teacher, TeacherFunction) for teacher, _ in teachers(declared.teacher)):
            self.at_once = 8192  # a call that fails loses no more
        assert material.parts.boundaries is not None  # noqa: S101 - the declaration allows only a split by time
        self._boundaries = material.parts.boundaries
        self._data = tensors(material.student_table, material.student_inputs)
        preparation = material.learn(declared.plan(material.student_inputs), self._boundaries[0])
        self._prepare = Prepare(preparation, preparation_graph(preparation))
        self._numbers, self._places = map(torch.from_numpy, self._prepare(self._data))
        self._fed = material.request_inputs.graph_inputs(material.student_inputs)

    def teacher(self) -> Boosting | UserTeacher:
        """Create the declared teacher; without one, gradient boosting on all features of the teacher's service."""
        if declared := teachers(self.declared.teacher):
            return self._user_teacher(declared)
        return self._boosting("teacher", self.material.table, self.material.teacher_inputs)

    def references(self) -> Mapping[str, Teacher]:
        return {"reference": self._boosting("reference", self.material.student_table, self.material.student_inputs)}

    def _boosting(self, name: str, table: pa.Table, inputs: Sequence[ModelInput]) -> Boosting:
        material = self.material
        seen_by = material.declaration.student.device if table is material.device else None
        return Boosting(
            name,
            lambda: tensors(table, inputs),
            self._kind.teacher_labels,
            self.labeled(material.parts.train),
            rounds=self.declared.teacher_rounds,
            learning_rate=self.declared.teacher_learning_rate,
            threads=material.profile.threads,
            recipe={
                **self._recipe(),
                "inputs": [[item.name, item.dtype.name] for item in inputs],
                **({} if seen_by is None else {"device": seen_by.identity()}),
                **({} if self._row_weights is None else {"weight": [self.declared.weight, self.declared.class_weight]}),
            },
            learner=self._kind.learner,
            weights=self._row_weights,
        )

    def student(self) -> nn.Module:
        return Student(self._prepare, self.hidden, self.declared.dropout, self._kind.answer())

    @property
    def hidden(self) -> tuple[int, ...]:
        declared, (width, depth) = tuple(self.declared.hidden), (self.shape[name] for name in LAYERS)
        if width is None and depth is None:
            return declared
        widest, layers = width or max(declared, default=1), depth or len(declared)
        return tuple(max(1, widest >> layer) for layer in range(layers))

    def line(self) -> str:
        label = "" if isinstance(self.declared.label, Binary) else f"label={self.declared.label!r}, "
        return f"task=Tabular({label}hidden={self.hidden})"

    def batch(self, rows: torch.Tensor) -> Batch:
        prepared = (self._numbers, self._places, self._kind.targets)
        # index_select is four times as fast as `tensor[rows]`.
        numbers, places, targets = (tensor.index_select(0, rows) for tensor in prepared)
        return Batch((numbers, places), targets)

    def leaks(self) -> list[str]:
        material = self.material
        return self._leaks((material.table, material.teacher_inputs), (material.student_table, material.student_inputs))

    def over(self, table: pa.Table, rows: Index) -> Self:
        task = copy.copy(self)
        task._kind = self._kind.take(rows)
        complete, _ = self.material.request_inputs.complete(columns(table, self._fed))
        task._data = network_inputs(complete, self.material.student_inputs, len(rows))
        task._numbers, task._places = map(torch.from_numpy, self._prepare(task._data))
        return task

    def model(self, student: nn.Module) -> ModelProto:
        assert isinstance(student, Student)  # noqa: S101 - created by `student`
        return graph(student, self.material.request_inputs)

    def network(self, student: nn.Module) -> None:
        """Return None: no torch module computes all that the ONNX graph does.

        Request transforms and preparation exist only as ONNX operators. Runtimes without ONNX get the `core` instead.
        """

    def core(self, student: nn.Module) -> Core:
        assert isinstance(student, Student)  # noqa: S101 - created by `student`
        before = partial(head, student, self.material.request_inputs, self._fed)
        return Core(CoreNetwork(student), core_tensors(student), before)

    def core_feeds(self, rows: Index) -> Feeds:
        return core_feeds(self._numbers[rows].numpy(), self._places[rows].numpy())

    def feeds(self, rows: Index) -> Feeds:
        return feeds(self._fed, self._raw(rows))

    def _raw(self, rows: Index) -> Columns:
        return columns(self.material.student_table.take(rows), self._fed)

    def case(self, student: nn.Module, rows: Index) -> Case:
        return self._case(student, self._raw(rows), self._data[rows])

    def edges(self, student: nn.Module) -> Sequence[Case]:
        material = self.material
        extremes = edges(self._raw(material.parts.train[:1]), self._fed)
        _, refused = material.request_inputs.complete(extremes)
        return [] if refused.all() else [self.raw_case(student, take(extremes, ~refused))]

    def raw_case(self, student: nn.Module, raw: Columns) -> Case:
        complete, refused = self.material.request_inputs.complete(raw)
        return self._case(student, raw, network_inputs(complete, self.material.student_inputs, len(refused)))

    def _case(self, student: nn.Module, raw: Columns, data: TabularTensors) -> Case:
        assert isinstance(student, Student)  # noqa: S101 - created by `student`
        expected = {student.answer.name: student.answer.from_scores(student.logits(data))}
        return Case(feeds(self._fed, raw), expected, plain(raw, self._fed), core_feeds(*self._prepare(data)))

    def shipped(self, _teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        learned = msgspec.json.encode(self._prepare.preparation) + b"\n"
        return {LEARNED: (learned, "what the training part taught about the inputs, which is inside the graph")}

    def content(self) -> str:
        # A preparation that was fitted again may differ in its last bits, so hash the prepared columns.
        digest = hashlib.sha256()
        for column in (self._numbers, self._places, self._kind.targets):
            digest.update(f"{column.dtype} {tuple(column.shape)}".encode())
            digest.update(column.contiguous().numpy().data)
        return digest.hexdigest()

    def files(self, identity: str) -> dict[str, bytes]:
        material = self.material
        record = StudentRecord(
            id=identity,
            name=material.declaration.name,
            contract=material.contract,
            training_set=material.training_set,
            label=material.label,
            inputs=tuple((item.name, item.dtype.name) for item in material.student_inputs),
            split=material.declaration.split,
            boundaries=self._boundaries,
            hidden=tuple(self.declared.hidden),
            dropout=self.declared.dropout,
            preparation=self._prepare.preparation,
            answer=self._answer.name,
            classes=tuple(self.classes or ()),
        )
        return {FILE: self._prepare.graph, RECORD: msgspec.json.format(msgspec.json.encode(record))}
