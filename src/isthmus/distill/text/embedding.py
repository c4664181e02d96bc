"""The task class that trains and measures students that embed texts."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import NEAREST, RECALL, retrieval
from isthmus.distill.language.text import Embedding, Text
from isthmus.distill.losses.embeddings import cosine, info_nce
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.ranking import lists
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.split import required_column
from isthmus.distill.tasks.task import Batch, Material
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.text.students import EmbeddingModel, PooledStates
from isthmus.distill.text.task import TextBase, text_columns
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import DataError
from isthmus.package.inputs import Feeds

TEMPERATURE, RANKING, PAIRS = 0.05, 0.02, 0.002
"""Temperature of cosines, and the weights of two losses beside the cosine, which has weight 1."""


class EmbeddingTask(TextBase):
    """Predicts the teacher's vectors of texts. The label of the spine is not used."""

    metric = RECALL
    about: Mapping[str, str] = {"teacher": "the declared teacher"}
    at_once = 64
    rows_per_thread = 8
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    """Largest difference of a number in a vector of length 1."""
    compared = 256
    measured = ("texts_cut",)
    pipeline = "sentence-similarity"
    output = "vector"

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        declared = material.declaration.task
        assert isinstance(declared, Text)  # noqa: S101 - only a Text with an Embedding selects this task
        assert isinstance(declared.predicts, Embedding)  # noqa: S101
        self.declared, self._embedding = declared, declared.predicts
        self.keys = self.columns = text_columns(material, declared)
        self._alone = len(self.columns) == 1
        for name in self.columns:
            required_column(material.table, name, "a text")
        for part in ("validation", "test"):
            if (rows := len(getattr(material.parts, part))) <= NEAREST + self._alone:
                found, least = f"the {part} part has {rows:,} rows", NEAREST + self._alone + 1
                raise DataError(material.declaration.where, found, expected=f"at least {least}, to find {NEAREST} of",
                                remedy="use more rows or other shares in split")  # fmt: skip
        self._read_texts()

    def teacher(self) -> NetworkTeacher:
        body = self._pretrained.teacher.module.base_model
        vectors = EmbeddingModel(PooledStates(body, first=self._embedding.pooling == "first"))
        return NetworkTeacher(vectors, self.keys, name=self._pretrained.declared.source)

    def identities(self) -> Array:
        return identities(self.material.table.select(self.columns))

    def asked(self, rows: Index) -> Any:
        """Return tokens and mask of each column, by the teacher's tokenizer."""
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
        """Return the terms: the teacher's vectors, its ranking of a batch's texts, and the texts that form a pair."""
        terms = {
            f"cosine of {name}": Term(cosine, student=f"student.{name}", teacher=f"teacher.{name}")
            for name in self.columns
        }
        first, second = self.columns[0], self.columns[-1]
        ours = {"queries": f"student.{first}", "candidates": f"student.{second}"}
        theirs = {"taught_queries": f"teacher.{first}", "taught_candidates": f"teacher.{second}"}
        terms["ranking"] = Term(partial(_ranking, alone=self._alone), RANKING, **ours, **theirs)
        if not self._alone:
            terms["pairs"] = Term(partial(info_nce, temperature=TEMPERATURE), PAIRS, **ours)
        return Objective(terms)

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:  # noqa: ARG002 - unused
        """Measure a search among these rows for the text of each row (see `retrieval`)."""
        first, second = self.columns[0], self.columns[-1]
        return retrieval(answers[first], answers[second], teacher[first], teacher[second], alone=self._alone)

    def network(self, student: nn.Module) -> nn.Module:
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


def _ranking(
    queries: Tensor, candidates: Tensor, taught_queries: Tensor, taught_candidates: Tensor, *, alone: bool
) -> Tensor:
    """Compare the ranking of a batch's candidates for each query with the teacher's, see `lists`.

    With `alone`, queries and candidates are the same texts, and no text is its own candidate.
    """
    if len(queries) < 2:  # the last batch of an epoch may have one row
        return queries.sum() * 0
    mask = ~torch.eye(len(queries), dtype=torch.bool, device=queries.device) if alone else None
    scores, taught = queries @ candidates.T, taught_queries @ taught_candidates.T
    return lists(scores, taught, temperature=TEMPERATURE, mask=mask)
