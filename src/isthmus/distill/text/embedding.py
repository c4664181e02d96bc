"""The task class that trains and measures students that embed texts."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import RECALL
from isthmus.distill.language.text import Embedding, Text
from isthmus.distill.losses.objective import Objective
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.split import required_column
from isthmus.distill.tasks.task import Batch, Material
from isthmus.distill.tasks.vectors import COMPARED, TOLERANCE, VECTOR, require_searchable, search, vector_objective
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.text.students import EmbeddingModel, PooledStates
from isthmus.distill.text.task import TextBase, text_columns
from isthmus.distill.types import Answers, Array, Index
from isthmus.package.inputs import Feeds


class EmbeddingTask(TextBase):
    """Predicts the teacher's vectors of texts. The label of the spine is not used."""

    metric = RECALL
    about: Mapping[str, str] = {"teacher": "the declared teacher"}
    at_once = 64
    rows_per_thread = 8
    tolerance = TOLERANCE
    compared = COMPARED
    measured = ("texts_cut",)
    pipeline = "sentence-similarity"
    output = VECTOR

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        declared = material.declaration.task
        assert isinstance(declared, Text)  # noqa: S101 - only a Text with an Embedding selects this task
        assert isinstance(declared.predicts, Embedding)  # noqa: S101
        self.declared, self._embedding = declared, declared.predicts
        self.keys = self.columns = text_columns(material, declared)
        for name in self.columns:
            required_column(material.table, name, "a text")
        require_searchable(material, self.columns)
        self._read_texts()

    def teacher(self) -> NetworkTeacher:
        body = self._pretrained.teacher.module.base_model
        vectors = EmbeddingModel(PooledStates(body, first=self._embedding.pooling == "first"))
        return NetworkTeacher(vectors, self.keys, name=self._pretrained.declared.source)

    def identities(self) -> Array:
        return identities(self.material.table.select(self.columns))

    def asked(self, rows: Index) -> Any:
        """Return rows as a batch for the teacher: tokens and mask of each column, from its tokenizer."""
        texts = [self._texts[name].take(rows).to_pylist() for name in self.columns]
        limits = {"padding": True, "truncation": True, "max_length": self._pretrained.tokens}
        read = [self._pretrained.tokenizer(each, return_tensors="pt", **limits) for each in texts]
        return tuple(each[key] for each in read for key in ("input_ids", "attention_mask"))

    def options(self) -> dict[str, Any]:
        """Return what changes the tokens that the teacher reads."""
        return {"tokens": self._pretrained.tokens, "tokenizer": self._pretrained.tokenizer_digest}

    def student(self) -> nn.Module:
        return self._started(EmbeddingModel(self._network(self._pretrained.teacher.module.config.hidden_size)))

    def batch(self, rows: Tensor) -> Batch:
        return Batch(self._inputs(rows))

    def objective(self) -> Objective:
        return vector_objective(self.columns)

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:  # noqa: ARG002 - unused
        return search(answers, teacher, self.columns)

    def _whole(self, student: nn.Module) -> nn.Module:
        assert isinstance(student, EmbeddingModel)  # noqa: S101 - created by `student`
        return student.embedder.eval()

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        return {name: run(self.feeds(rows, name))[self.output] for name in self.columns}

    def shipped(self, teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        files = super().shipped(teacher)
        if not self._embedding.index:
            return files
        rows, column = self.material.parts.test[: self._embedding.index], self.columns[-1]
        keys = [key for entity in self.material.declaration.spine.entities for key in entity.join_keys]
        listed = self.material.table.select([*keys, column]).take(rows).rename_columns([*keys, "text"]).to_pylist()
        vectors = np.rint(teacher.float32(rows)[column] * 127).astype(np.int8)
        return {
            **files,
            "index.json": (json.dumps(listed, ensure_ascii=False, indent=1, default=str).encode(), "texts to search"),
            "index.i8": (vectors.tobytes(), "the teacher's vectors of these texts, times 127, as int8"),
        }
