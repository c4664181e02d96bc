"""The task class that trains and measures students of texts."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from onnx import ModelProto
from torch import Tensor, nn

from isthmus.distill.labels import Number
from isthmus.distill.language.teachers import TeacherFunction, teachers
from isthmus.distill.language.text import Text
from isthmus.distill.onnx.exporter import export_network
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.labelled import LabelTask
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.task import Batch, Case, Material
from isthmus.distill.text.students import TextNetwork, TextStudent, text_network
from isthmus.distill.text.vocabulary import StudentTokenizer
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import ConfigurationError, Problem, one_of
from isthmus.features.types import String
from isthmus.package.inputs import Feeds

TOKENIZER, CHECKS = "tokenizer.json", "tokens.json"
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


class TextTask(LabelTask):
    """Predicts a label from a text."""

    about: Mapping[str, str] = {"teacher": "the declared teacher", "reference": "TF-IDF and a linear model"}
    at_once = 256
    measured = Text.measured
    form = OutputFormat("float32")
    padded = ("P",)

    declared: Text

    def __init__(self, material: Material) -> None:
        declared = material.declaration.task
        assert isinstance(declared, Text)  # noqa: S101 - only a Text selects this task
        self.column = _column(material, declared)
        self.texts = (self.column,)
        super().__init__(material, declared)
        texts = material.table[self.column].fill_null("")
        self.vocabulary = StudentTokenizer(texts.take(material.parts.train).to_pylist(), declared.size, declared.tokens)
        self._tokens, self._lengths = self.vocabulary.read(texts.to_pylist())
        self._texts = texts
        self.max_sizes = {"P": declared.tokens}
        self.pipeline = None if isinstance(declared.predicts, Number) else "text-classification"

    def teacher(self) -> UserTeacher:
        return self._user_teacher(teachers(self.declared.teacher))

    def references(self) -> Mapping[str, UserTeacher]:
        function = "regression" if isinstance(self.declared.label, Number) else "classifier"
        linear = TeacherFunction(f"isthmus.distill.text.baseline:{function}")
        return {"reference": self._user_teacher([(linear, 1.0)])}

    def student(self) -> nn.Module:
        answer = self._kind.answer()
        where = f"{self.material.declaration.where}: student"
        return TextStudent(text_network(self.declared, self.vocabulary.size, answer.width, where), answer)

    def line(self) -> str:
        return f"student={self.declared.student!r}"

    def batch(self, rows: Tensor) -> Batch:
        fed = self.feeds(rows.numpy())
        return Batch(tuple(map(torch.from_numpy, fed.values())), self._kind.targets[rows])

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        cut = self._lengths[self.material.parts.test] > self.declared.tokens
        return {**super().measures(quality), "texts_cut": float(cut.mean())}

    def sliced(self, rows: Index) -> pa.Table:
        """Return the number of tokens of each text, for slices."""
        return pa.table({"tokens": self._lengths[rows]})

    def model(self, student: nn.Module) -> ModelProto:
        names = {"input_ids": ("N", "P"), "attention_mask": ("N", "P")}
        example = {name: np.ones((2, min(8, self.declared.tokens)), np.int64) for name in names}
        return export_network(self.network(student), example, names, [self._answer.name], self.max_sizes)

    def network(self, student: nn.Module) -> nn.Module:
        assert isinstance(student, TextStudent)  # noqa: S101 - created by `student`
        return TextNetwork(student).eval()

    def feeds(self, rows: Index) -> Feeds:
        return _fed(self._tokens[rows])

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return {self._answer.name: self.network(student)(*map(torch.from_numpy, feeds.values())).numpy()}

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Return unusual texts, one per case and without padding, as on a device."""
        tokens, _ = self.vocabulary.read(EDGES)
        fed = [_fed(tokens[row : row + 1]) for row in range(len(EDGES))]
        return [Case(feeds, self.expected(student, feeds)) for feeds in fed]

    def shipped(self, _teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        texts = [*self._texts.take(self.material.parts.test[: self.golden]).to_pylist(), *EDGES]
        tokens, _ = self.vocabulary.read(texts)
        pairs = [{"text": text, "input_ids": row[row != 0].tolist()} for text, row in zip(texts, tokens, strict=True)]
        checks = json.dumps({"tokens": self.declared.tokens, "pairs": pairs}, ensure_ascii=False, indent=1)
        return {
            TOKENIZER: (self.vocabulary.file, "tokenizer in the format of the library tokenizers"),
            CHECKS: (checks.encode() + b"\n", "texts and their expected tokens"),
        }

    def content(self) -> str:
        digest = hashlib.sha256(self.vocabulary.file)
        for array in (self._tokens, self._kind.targets.numpy()):
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all students
        return {TOKENIZER: self.vocabulary.file}


def _column(material: Material, declared: Text) -> str:
    names = [item.name for item in material.student_inputs]
    texts = [item.name for item in material.student_inputs if item.dtype == String]
    where = f"{material.declaration.where}: column"
    if declared.column is None and len(texts) != 1:
        found = f"the student's service has {len(texts)} Strings"
        raise ConfigurationError(where, [Problem("column", found, 'column="..." of ' + one_of(names))])
    column = declared.column or texts[0]
    if column not in texts:
        raise ConfigurationError(where, [Problem("column", f"{column!r} is not a String of the student's service",
                                                 one_of(texts))])  # fmt: skip
    if others := [name for name in names if name != column]:
        found = f"the student's service also has {', '.join(others)}"
        raise ConfigurationError(where, [Problem("inputs", found, f"{column} alone: a Text reads nothing else")])
    return column


def _fed(tokens: Array) -> dict[str, Any]:
    """Return tokens (n, tokens) and their mask, cut to the longest text, as int64."""
    longest = int((tokens != 0).sum(1).max(initial=1))
    kept = tokens[:, :longest].astype(np.int64)
    return {"input_ids": kept, "attention_mask": (kept != 0).astype(np.int64)}
