"""The task class that trains and measures students that predict the label of a text, and its base."""

import copy
import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from onnx import ModelProto
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from isthmus.distill.labels import Number
from isthmus.distill.language.objective import STATE
from isthmus.distill.language.teachers import TeacherFunction, teachers
from isthmus.distill.language.text import MEASURED, Embedding, PrunedEncoder, Text
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.regression import squared_errors
from isthmus.distill.onnx.exporter import export_network
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.answers import LabelStudent
from isthmus.distill.tabular.graph import graph
from isthmus.distill.tabular.labelled import LabelTask
from isthmus.distill.tabular.users.pretrained import PretrainedModel
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.samples import Columns, plain
from isthmus.distill.tasks.task import Batch, Case, Material, Task
from isthmus.distill.text.further import FurtherInputs
from isthmus.distill.text.pruning import prune
from isthmus.distill.text.students import (
    EncoderNetwork,
    JoinedStudent,
    Stateful,
    StatefulJoinedStudent,
    StatefulStudent,
    TextNetwork,
    text_network,
)
from isthmus.distill.text.vocabulary import StudentTokenizer
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import ConfigurationError, Problem, one_of
from isthmus.features.types import String
from isthmus.features.values.columns import from_python
from isthmus.package.inputs import Feeds, ModelInput, feeds
from isthmus.package.texts import TOKENIZER, TextTokenizer, token_tensors
from isthmus.transforms.preparation.fit import LEARNED

CHECKS = "tokens.json"
EDGES = (
    "",
    "?",
    "word",
    "Zürich naïve 東京 İstanbul",
    "a\tb\nc  d",
    "\U0001f600 x\u0301 \u200b",
    "word " * 600,
    "x" * 300,
)
"""Unusual texts for golden cases."""


class TextBase(Task):
    """A task whose student reads the texts of one or two `columns`; a device feeds a text of the first one.

    `output` is the name of the graph's output.
    """

    declared: Text
    columns: Sequence[str]
    output: str
    padded = ("P",)

    @abstractmethod
    def _whole(self, student: nn.Module) -> nn.Module:
        """Return a network from a student's inputs to the graph's output."""

    def network(self, student: nn.Module) -> nn.Module | None:
        return self._whole(student)

    def _read_texts(self) -> None:
        declared, train = self.declared, self.material.parts.train
        self._texts = {name: self.material.table[name].fill_null("") for name in self.columns}
        if isinstance(declared.student, PrunedEncoder):
            theirs = self._pretrained.tokenizer
            if theirs.pad_token_id != 0:
                problem = Problem("tokenizer", f"pads with token {theirs.pad_token_id}", "0, to prune its model")
                raise ConfigurationError(self._pretrained.where, [problem])
            # A copy, since the teacher truncates texts at another length.
            self.vocabulary = TextTokenizer(copy.deepcopy(theirs.backend_tokenizer), declared.tokens)
        else:
            words = (text for texts in self._texts.values() for text in texts.take(train).to_pylist())
            size = declared.vocabulary if isinstance(declared.student, str) else declared.student.vocabulary
            self.vocabulary = StudentTokenizer(words, size, declared.tokens)
        read = {name: self.vocabulary.read(texts.to_pylist()) for name, texts in self._texts.items()}
        self._tokens = {name: tokens for name, (tokens, _) in read.items()}
        self._lengths = {name: lengths for name, (_, lengths) in read.items()}
        self.max_sizes = {"P": declared.tokens}

    @cached_property
    def _pretrained(self) -> PretrainedModel:
        return PretrainedModel(self.declared.pretrained[0], self.material.root)

    @cached_property
    def _pruned(self) -> EncoderNetwork:
        declared, predicts = self.declared, self.declared.predicts
        assert isinstance(declared.student, PrunedEncoder)  # noqa: S101 - else there is nothing to cut
        read = np.concatenate([tokens[self.material.parts.train].ravel() for tokens in self._tokens.values()])
        counts = np.bincount(read[read != 0], minlength=self.vocabulary.size)
        first = isinstance(predicts, Embedding) and predicts.pooling == "first"
        return prune(self._pretrained.teacher.module, declared, declared.student, counts, self._where, first=first)

    @property
    def _where(self) -> str:
        return f"{self.material.declaration.where}: student"

    def _network(self, outputs: int) -> nn.Module:
        if not isinstance(self.declared.student, PrunedEncoder):
            return text_network(self.declared, self.vocabulary.size, outputs, self._where)
        network = copy.deepcopy(self._pruned)
        if not isinstance(self.declared.predicts, Embedding):
            network.last = nn.Linear(network.last.in_features, outputs)
        return network

    def _started(self, student: nn.Module) -> nn.Module:
        """Load the declared `start`, if any, into a new student."""
        if (start := self.declared.start) is not None:
            try:
                student.load_state_dict(load_file(self.material.root / start))
            except (OSError, RuntimeError, SafetensorError) as error:
                problem = Problem(start, " ".join(str(error).split())[:300], "weights of a student of this shape")
                raise ConfigurationError(f"{self._where}: start", [problem]) from error
        return student

    def line(self) -> str:
        return f"student={self.declared.student!r}"

    def _inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        fed = [self._read(rows.numpy(), name) for name in self.columns]
        return tuple(torch.from_numpy(array) for feeds in fed for array in feeds.values())

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        lengths = np.stack([*self._lengths.values()])[:, self.material.parts.test]
        return {**super().measures(quality), "texts_cut": float((lengths > self.declared.tokens).mean())}

    def sliced(self, rows: Index) -> pa.Table:
        """Return the number of tokens of each text and the other inputs, for slices."""
        further, tokens = super().sliced(rows).drop_columns([*self.columns]), self._lengths.items()
        slices = {f"tokens of {name}": lengths[rows] for name, lengths in tokens}
        return pa.table({**slices, **dict(zip(further.column_names, further.columns, strict=True))})

    def model(self, student: nn.Module) -> ModelProto:
        return self._exported(self._whole(student), self.output)

    def _exported(self, network: nn.Module, output: str) -> ModelProto:
        names = {"input_ids": ("N", "P"), "attention_mask": ("N", "P")}
        example = {name: np.ones((2, min(8, self.declared.tokens)), np.int64) for name in names}
        return export_network(network, example, names, [output], self.max_sizes)

    def feeds(self, rows: Index, column: str | None = None) -> Feeds:
        return self._read(rows, column or self.columns[0])

    def _read(self, rows: Index, column: str) -> Feeds:
        return token_tensors(self._tokens[column][rows], self._lengths[column][rows])

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return {self.output: self._whole(student)(*map(torch.from_numpy, feeds.values())).numpy()}

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Return unusual texts, one per case and without padding, to compare files with the student."""
        fed = [self.vocabulary.feeds([text]) for text in EDGES]
        return [Case(feeds, self.expected(student, feeds)) for feeds in fed]

    def shipped(self, teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:  # noqa: ARG002 - for subclasses
        rows = self.material.parts.test[: self.golden]
        texts = [*self._texts[self.columns[0]].take(rows).to_pylist(), *EDGES]
        pairs = [
            {"text": text, "input_ids": row[:length].tolist()}
            for text, row, length in zip(texts, *self.vocabulary.read(texts), strict=True)
        ]
        checks = json.dumps({"tokens": self.declared.tokens, "pairs": pairs}, ensure_ascii=False, indent=1)
        return {
            TOKENIZER: (self.vocabulary.file, "tokenizer in the format of the library tokenizers"),
            CHECKS: (checks.encode() + b"\n", "texts and their expected tokens"),
        }

    def content(self, *labels: Array) -> str:
        digest = hashlib.sha256(self.vocabulary.file)
        for array in (*self._tokens.values(), *labels):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all students
        return {TOKENIZER: self.vocabulary.file}


class TextTask(TextBase, LabelTask):
    """Predicts a label from a text, and from other inputs if the student's service has any."""

    about: Mapping[str, str] = {"teacher": "the declared teacher", "reference": "TF-IDF and a linear model"}
    at_once = 256
    measured = MEASURED
    form = OutputFormat("float32")

    declared: Text

    def __init__(self, material: Material) -> None:
        declared = material.declaration.task
        assert isinstance(declared, Text)  # noqa: S101 - only a Text selects this task
        self.columns = self.texts = text_columns(material, declared)
        self.states = declared.compares_states
        super().__init__(material, declared)
        self._read_texts()
        self.output = self._answer.name
        self.pipeline = None if isinstance(declared.predicts, Number) else "text-classification"
        self._beside = [item for item in material.student_inputs if item.name not in self.columns]
        self._further = FurtherInputs(material, self._beside) if self._beside else None

    def teacher(self) -> UserTeacher:
        return self._user_teacher(teachers(self.declared.teacher))

    def references(self) -> Mapping[str, UserTeacher]:
        function = "regression" if isinstance(self.declared.label, Number) else "classifier"
        linear = TeacherFunction(f"isthmus.distill.text.baseline:{function}")
        text = [item for item in self.material.student_inputs if item.name in self.columns]
        read = self.material.student_table, [*text, *self._beside]
        return {"reference": self._user_teacher([(linear, 1.0)], read)}

    def leaks(self) -> list[str]:
        return self._leaks((self.material.student_table, self._beside))

    def student(self) -> nn.Module:
        answer = self._kind.answer()
        network = self._network(answer.width)
        student: nn.Module
        if self._further is None:
            student = (StatefulStudent if self.states else LabelStudent)(network, answer)
        else:
            kind = StatefulJoinedStudent if self.states else JoinedStudent
            student = kind(network, self._further.prepare, self.declared.dropout, answer)
        if isinstance(student, Stateful):
            student.key = self._kind.key
        return self._started(student)

    def objective(self) -> Objective:
        usual = super().objective()
        if not self.states or self.declared.objective is not None:
            return usual
        sources = {"student": f"student.{STATE}", "wanted": f"teacher.{STATE}"}
        return Objective(
            {**usual.terms, "states": Term(squared_errors, self.declared.soft_weight, **sources)}, usual.control
        )

    def batch(self, rows: Tensor) -> Batch:
        further = () if self._further is None else (part.index_select(0, rows) for part in self._further.prepared)
        return Batch((*self._inputs(rows), *further), self._kind.targets[rows])

    def model(self, student: nn.Module) -> ModelProto:
        if self._further is None:
            return super().model(student)
        assert isinstance(student, JoinedStudent)  # noqa: S101 - created by `student`
        return graph(student, self._further.request, self._exported(student.network, "last"))

    def network(self, student: nn.Module) -> nn.Module | None:
        """Return a network from tokens to outputs, to convert it for runtimes without ONNX.

        Return None if the student has inputs beside texts, because they are prepared by ONNX operators.
        """
        return self._whole(student) if self._further is None else None

    def _whole(self, student: nn.Module) -> nn.Module:
        assert isinstance(student, LabelStudent | JoinedStudent)  # noqa: S101 - created by `student`
        return TextNetwork(student).eval()

    @property
    def row_inputs(self) -> Sequence[ModelInput]:
        """The text, read by the student's tokenizer, and the other inputs."""
        text = ModelInput(self.columns[0], String, text=True, tokenizer=self.vocabulary)
        return [text, *([] if self._further is None else self._further.fed)]

    def feeds(self, rows: Index, column: str | None = None) -> Feeds:
        further = {} if self._further is None else feeds(self._further.fed, self._further.raw(rows))
        return {**super().feeds(rows, column), **further}

    def case(self, student: nn.Module, rows: Index) -> Case:
        raw = {} if self._further is None else self._further.raw(rows)
        texts = from_python(self._texts[self.columns[0]].take(rows).to_pylist(), String)
        return self._case(student, self.batch(torch.from_numpy(rows)).inputs, {self.columns[0]: texts, **raw})

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Return unusual texts, one per case and without padding, each with extreme values of the other inputs."""
        extremes: Sequence[tuple[Columns, tuple[Tensor, ...]]] = [({}, ())] * len(EDGES)
        if self._further is not None:
            extremes = self._further.extremes(self.material.parts.train[:1], len(EDGES))
        cases = []
        for text, (beside, prepared) in zip(EDGES, extremes, strict=True):
            # A request transform that reads the text has set it, and `prepared` has its result.
            raw = {self.columns[0]: from_python([text], String), **beside}
            tokens = map(torch.from_numpy, feeds(self.row_inputs[:1], raw).values())
            cases.append(self._case(student, (*tokens, *prepared), raw))
        return cases

    def _case(self, student: nn.Module, inputs: Sequence[Tensor], raw: Columns) -> Case:
        computed = {transform.full_name(field.name) for transform, field in self.material.request_inputs.computed}
        # A request has no value for a text that a request transform computes, so the package has no rows.
        rows = () if self.columns[0] in computed else plain(raw, self.row_inputs)
        return Case(feeds(self.row_inputs, raw), {self.output: self._whole(student)(*inputs).numpy()}, rows)

    def shipped(self, teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        return {**super().shipped(teacher), **({} if self._further is None else self._further.shipped())}

    def content(self, *arrays: Array) -> str:
        further = () if self._further is None else (tensor.numpy() for tensor in self._further.prepared)
        return super().content(self._kind.targets.numpy(), *further, *arrays)

    def files(self, identity: str) -> dict[str, bytes]:
        learned = {} if self._further is None else {LEARNED: self._further.learned}
        return {**super().files(identity), **learned}


def text_columns(material: Material, declared: Text) -> tuple[str, ...]:
    """Return the inputs that hold the texts; raise a ConfigurationError if there are others for an `Embedding`."""
    names = [item.name for item in material.student_inputs]
    texts = [item.name for item in material.student_inputs if item.dtype == String]
    where = f"{material.declaration.where}: column"
    if declared.column is None and len(texts) != 1:
        found = f"the student's service has {len(texts)} Strings"
        raise ConfigurationError(where, [Problem("column", found, 'column="...", ' + one_of(texts or names))])
    columns = (declared.column,) if isinstance(declared.column, str) else tuple(declared.column or texts)
    absent = [name for name in columns if name not in texts]
    problems = [Problem("column", f"{name!r} is not a String of the student's service", one_of(texts))
                for name in absent]  # fmt: skip
    others = [name for name in names if name not in columns]
    if not problems and others and isinstance(declared.predicts, Embedding):
        found, only = f"the student's service also has {', '.join(others)}", " and ".join(columns)
        problems = [Problem("inputs", found, f"{only} alone: an Embedding has no other inputs")]
    if problems:
        raise ConfigurationError(where, problems)
    return columns
