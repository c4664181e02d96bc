"""The task class that trains and measures causal language models."""

import hashlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import torch
from onnx import ModelProto
from torch import Tensor, nn

from isthmus.distill.causal import models
from isthmus.distill.causal.network import CausalStudent, CausalTeacher, Packed, continuation_targets, generate, losses
from isthmus.distill.causal.texts import Blocks, Texts, concatenate, pack, select_replay
from isthmus.distill.causal.tokenizer import FILE, Vocabulary
from isthmus.distill.declaration import EXECUTORCH
from isthmus.distill.decoder.graph import graph
from isthmus.distill.decoder.network import CachedModel, cache_shape, require_supported
from isthmus.distill.decoder.writer import TextWriter
from isthmus.distill.language.causal import GAIN, REGRESSION, Causal
from isthmus.distill.language.decoding import TOLERANCES
from isthmus.distill.losses.logits import IGNORED, generalized, hard_targets, top_k_tail
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.answers import graph_answers, student_answers
from isthmus.distill.tasks.split import PARTS, Split
from isthmus.distill.tasks.task import Batch, Case, Material, Task, TeacherBatch
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Answers, Array, Index, evenly_spaced
from isthmus.features.errors import DataError
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS
from isthmus.package.inputs import Feeds

CONFIGURATION, KEPT = "config.json", "vocabulary.json"

BLOCKS = 16
"""Maximum number of domain blocks, and of general blocks, for measuring a model file.

A file reads token by token, and SmolLM2 reads only 25 tokens per second this way.
"""


class CausalTask(Task):
    """The task that trains a causal language model further on a domain, or distills it from a larger model.

    Its rows are blocks of packed tokens. Creating it loads the base or teacher, and tokenizes and packs all texts.
    """

    metric = "perplexity"
    more = False
    at_once = 16
    graph_rows = 1
    tolerance: Mapping[str, float] = {"fp32": 1e-3}
    """Tolerance of a logit in a search. For a package, `tolerances` scales with the student's logits."""
    compared = 32
    pipeline = "text-generation"
    shape: Mapping[str, Any] = MappingProxyType(models.SHAPE)
    separable = True

    def __init__(self, material: Material) -> None:
        declared, where = material.declaration.task, material.declaration.where
        assert isinstance(declared, Causal)  # noqa: S101 - it selects this task
        self.declared, self.where = declared, where
        self.measured = declared.measured
        source = declared.base or declared.teacher or ""
        self._language = models.language(source, f"{where}: {'base' if declared.base else 'teacher'}")
        texts = Texts.of(material, declared.text)
        self.vocabulary, tokens = self._tokenized(texts, material.parts)
        test = material.parts.test
        self._beginnings = texts.beginnings(self.vocabulary, test[texts.domain[test]], declared.context // 2)
        blocks, domain, parts = self._packed(texts, tokens, material)
        kinds = pa.array(np.where(domain, "domain", "general"))
        table = material.table.take(pa.array(blocks.first)).append_column(self._column(material), kinds)
        super().__init__(replace(material, table=table, division=parts))
        self.shape = self.shape if declared.shaped else {}
        self.tokens, self.positions, self.targets = map(
            torch.from_numpy, (blocks.tokens, blocks.positions, blocks.targets)
        )
        self._writer: tuple[nn.Module, TextWriter] | None = None
        self._domain, self._counts = domain, blocks.targets != IGNORED
        self.max_sizes = {TOKENS: 1, PAST: declared.context}
        about = {"base": "the base before training", "teacher": "the larger language model"}
        kind = "teacher" if declared.base is None else "base"
        self.about = {"teacher": about[kind] + (f"; license: {declared.license}" if declared.license else "")}
        top_k = None if declared.base or declared.top_k is None else min(declared.top_k, self.vocabulary.size)
        self.form = OutputFormat(
            # float16 cannot represent the token ids of a large vocabulary.
            "float32" if declared.base or declared.sequences else "float16",
            top_k=top_k,
            temperature=1.0 if top_k is None else declared.temperature,
        )

    @staticmethod
    def _column(material: Material) -> str:
        return next(name for name in ("texts", "texts_", "_texts_") if name not in material.table.column_names)

    def _tokenized(self, texts: Texts, parts: Split) -> tuple[Vocabulary, list[list[int]]]:
        vocabulary = self._language.vocabulary
        tokens = vocabulary.tokens(texts.texts)
        texts.require_tokens(tokens, len(vocabulary.begin))
        if self.declared.vocabulary == "shared":
            return vocabulary, tokens
        train = {*parts.train.tolist()}
        learned = [text for row, text in enumerate(tokens) if row in train]
        others = [text for row, text in enumerate(tokens) if row not in train]
        vocabulary = vocabulary.pruned(learned, others, self.where)
        return vocabulary, vocabulary.tokens(texts.texts)

    def _packed(self, texts: Texts, tokens: Sequence[Sequence[int]], material: Material) -> tuple[Blocks, Array, Split]:
        declared, seed = self.declared, material.declaration.seed
        blocks, domain, sizes = [], [], []
        for name in PARTS:
            rows = np.random.default_rng([seed, PARTS.index(name)]).permutation(getattr(material.parts, name))
            where = f"{self.where}: {name} part"
            of_texts, general = (self._blocks(rows[texts.domain[rows] == kind], tokens) for kind in (True, False))
            if not len(of_texts):
                raise DataError(where, "no domain texts", expected="texts with the label 1")
            if name != "train" and not len(general) and declared.base is not None:
                raise DataError(where, "no general texts", expected=f"texts with the label 0, for {REGRESSION}")
            chosen = select_replay(of_texts, general, declared.replay, where) if name == "train" else general
            made = concatenate([of_texts, chosen])
            of_domain = np.arange(len(made)) < len(of_texts)
            blocks.append(made)
            domain.append(of_domain)
            sizes.append(len(made))
        train, validation, test = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        return concatenate(blocks), np.concatenate(domain), Split(train, validation, test, material.parts.boundaries)

    def _blocks(self, rows: Index, tokens: Sequence[Sequence[int]]) -> Blocks:
        own, declared = [tokens[row] for row in rows.tolist()], self.declared
        return pack(own, rows, declared.context, self.vocabulary.end, cut=declared.cut, where=self.where)

    def teacher(self) -> Teacher:
        return self._teacher(sequences=self.declared.sequences > 0)

    def _teacher(self, *, sequences: bool) -> NetworkTeacher:
        keys = ["losses", *(["logits"] if self.declared.base is None else []), *(["sequence"] if sequences else [])]
        network = CausalTeacher(
            Packed(self._language.model, self.vocabulary.kept), tuple(keys), self.declared.prompt, self.vocabulary.end
        )
        return NetworkTeacher(network, keys, name=self.declared.base or self.declared.teacher)

    @cached_property
    def _judge(self) -> NetworkTeacher:
        return self._teacher(sequences=False)

    def asked(self, rows: Index) -> Any:
        return tuple(column[torch.from_numpy(rows)] for column in (self.tokens, self.positions, self.targets))

    def identities(self) -> Array:
        columns = {"tokens": self.tokens, "positions": self.positions, "targets": self.targets}
        return identities({name: column.numpy() for name, column in columns.items()})

    def options(self) -> dict[str, Any]:
        return {"tokenizer": hashlib.sha256(self.vocabulary.tokenizer).hexdigest()}

    def student(self) -> nn.Module:
        context, where = self.declared.context, f"{self.where}: student"
        if self.declared.base is not None:
            new = models.prune_embeddings(self._language.model, self.vocabulary)
            new = new if self.declared.lora is None else models.add_lora(new, self.declared.lora, where)
        else:
            new = models.student(self.declared.student, self.vocabulary, context, self.shape, where)
        require_supported(new, where)
        return CausalStudent(new).train()

    def finished(self, student: nn.Module) -> nn.Module:
        if self.declared.lora is None:
            return student
        return CausalStudent(models.merge_lora(_model(student))).train(student.training)

    def batch(self, rows: Tensor) -> Batch:
        targets = self.targets[rows]
        return Batch((self.tokens[rows], self.positions[rows], targets), targets)

    def objective(self) -> Objective:
        declared = self.declared
        arguments = {"student": "student.logits", "labels": "labels"}
        if declared.base is not None:
            return Objective({"texts": Term(hard_targets, 1.0, **arguments)})
        beta, temperature = declared.effective_beta, declared.temperature
        sources = {"student": "student.logits", "mask": "student.counts"}
        if self.form.top_k is None:
            loss: Callable[..., Tensor] = partial(generalized, beta=beta, temperature=temperature)
            sources["teacher"] = "teacher.logits"
        else:
            loss = partial(top_k_tail, beta=beta, temperature=temperature)
            sources |= {"probabilities": "teacher.probabilities", "indexes": "teacher.indexes"}
        return Objective({
            "texts": Term(hard_targets, 1 - declared.soft_weight, **arguments),
            "teacher": Term(loss, declared.soft_weight, **sources),
        })  # fmt: skip

    def sampled(self, student: nn.Module, batch: TeacherBatch) -> TeacherBatch:
        declared = self.declared
        if not (declared.on_policy or declared.sequences):
            return batch
        drawn = float(torch.rand(()))
        if drawn < declared.on_policy:
            return self._own(student, batch)
        return self._sequences(batch) if drawn < declared.on_policy + declared.sequences else batch

    def counted(self, batch: TeacherBatch) -> Mapping[str, Tensor]:
        assert batch.labels is not None  # noqa: S101 - from `batch`
        _, _, targets = batch.inputs
        return {"texts": (batch.labels != IGNORED).sum(), "teacher": (targets != IGNORED).sum()}

    def _own(self, student: nn.Module, batch: TeacherBatch) -> TeacherBatch:
        """Let the student continue the prompts of a batch, and the teacher score them (GKD, 2023, arXiv:2306.13649)."""
        assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
        tokens, positions, _ = batch.inputs
        student.eval()
        with torch.no_grad():
            tokens = generate(
                student.packed, tokens, positions, self.declared.prompt, self.vocabulary.end, greedy=False
            )
        student.train()
        positions, targets = continuation_targets(tokens, positions, self.declared.prompt, self.vocabulary.end)
        answers = self._judge.ask((tokens, positions, targets))
        stored = self.form.encode(answers, range(len(tokens)), self._judge.where)
        judged = {key: torch.from_numpy(array).to(tokens.device) for key, array in stored.items()}
        # IGNORED: the student must not learn its own text as a hard target.
        return TeacherBatch((tokens, positions, targets), torch.full_like(targets, IGNORED), judged)

    def _sequences(self, batch: TeacherBatch) -> TeacherBatch:
        """Replace the texts of a batch by the teacher's continuations (Kim and Rush, EMNLP 2016, arXiv:1606.07947)."""
        tokens = batch.teacher["sequence"].long()
        positions, targets = continuation_targets(tokens, batch.inputs[1], self.declared.prompt, self.vocabulary.end)
        # The stored probabilities belong to the original tokens of the block, so no position counts.
        return TeacherBatch((tokens, positions, torch.full_like(targets, IGNORED)), targets, batch.teacher)

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:
        figures = {"perplexity": _perplexity(self._mean(answers, rows, domain=True))}
        figures["general_loss"] = self._mean(answers, rows, domain=False)
        if self.declared.base is not None:
            before = (self._mean(teacher, rows, domain=kind) for kind in (True, False))
            figures[GAIN] = 1 - figures["perplexity"] / _perplexity(next(before))
            figures[REGRESSION] = figures["general_loss"] / next(before) - 1
        return figures

    def score(self, answers: Answers, rows: Index, _teacher: Answers) -> float:
        return _perplexity(self._mean(answers, rows, domain=True))

    def _mean(self, answers: Answers, rows: Index, *, domain: bool) -> float:
        chosen = self._domain[rows] == domain
        count = int(self._counts[rows][chosen].sum())
        return float(answers["losses"][chosen].sum(dtype=np.float64)) / count if count else math.nan

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        if "indexes" in teacher:
            theirs = teacher["indexes"][..., 0]
        elif "logits" in teacher:
            theirs = teacher["logits"].argmax(-1)
        else:
            return {}
        return {"agreement": float((student["best"] == theirs)[student["counts"] > 0].mean())}

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        return {name: quality["student"][name] for name in self.measured}

    def sliced(self, rows: Index) -> pa.Table:
        return self.material.table.select([self.material.table.column_names[-1]]).take(rows)

    def content(self) -> str:
        digest = hashlib.sha256(self.vocabulary.tokenizer)
        for column in self.asked(self.material.parts.train):
            digest.update(column.numpy().tobytes())
        return digest.hexdigest()

    def writer(self, student: nn.Module) -> TextWriter:
        if self._writer is None or self._writer[0] is not student:
            settings = self.declared.decoding
            settings = replace(
                settings, prompts=settings.prompts or self._beginnings,
                executorch=EXECUTORCH in self.material.declaration.runtimes,
            )  # fmt: skip
            self._writer = student, TextWriter.of(_model(student), self.vocabulary.tokenizer, settings)
        return self._writer[1]

    def tolerances(self, student: nn.Module) -> Mapping[str, float]:
        scale = self.writer(student).reference.scale
        return {precision: share * scale for precision, share in TOLERANCES.items()}

    def model(self, student: nn.Module) -> ModelProto:
        return graph(self.network(student))

    def network(self, student: nn.Module) -> CachedModel:
        return self.writer(student).network

    def feeds(self, rows: Index) -> Feeds:
        (row,), half = rows.tolist(), self.declared.context // 2
        tokens = self.tokens[row, half : half + 1].numpy()
        return {TOKENS: tokens[None], PAST: np.zeros((1, half, *self._cache()), np.float32)}

    def _cache(self) -> tuple[int, int, int]:
        if self.declared.base is not None:
            return cache_shape(self._language.model.config)
        with torch.random.fork_rng(devices=[]):
            return cache_shape(_model(self.student()).config)

    def case(self, student: nn.Module, rows: Index) -> Case:
        (row,) = rows.tolist()
        length = int((self.positions[row, 1:] > 0).long().cumprod(0).sum()) + 1
        half, run = length // 2, self.writer(student).reference.run
        tokens = self.tokens[row, : half + 1].numpy()[None]
        past = np.zeros((1, 0, *self.network(student).cache), np.float32)
        if half:
            past = run({TOKENS: tokens[:, :half], PAST: past})[NEW]
        return self._answered(student, {TOKENS: tokens[:, half:], PAST: past})

    def cases(self, student: nn.Module) -> list[Case]:
        return [self._answered(student, feeds) for feeds in self.writer(student).reference.cases]

    def _answered(self, student: nn.Module, feeds: Feeds) -> Case:
        return Case(feeds, self.expected(student, feeds))

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return self.writer(student).reference.run(feeds)

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        (row,) = rows.tolist()
        empty = past = np.zeros((1, 0, *self._cache()), np.float32)
        steps = []
        for token, place in zip(self.tokens[row].numpy(), self.positions[row].tolist(), strict=True):
            past = past if place else empty
            outputs = run({TOKENS: token.reshape(1, 1), PAST: past})
            steps.append(outputs[LOGITS])
            past = np.concatenate([past, outputs[NEW]], 1)
        logits, targets = torch.from_numpy(np.concatenate(steps)[None]), self.targets[row][None]
        replies = {"losses": losses(logits, targets), "best": logits.argmax(-1), "counts": targets != IGNORED}
        return {key: value.float().numpy() for key, value in replies.items()}

    def figures(self, run: Callable[[Feeds], Answers], student: nn.Module, teacher: OutputCache) -> Mapping[str, float]:
        """Estimate the test metrics of a model file, for gates; a file is too slow to run on the whole test part.

        `run` maps inputs to outputs by running the file. It runs on at most 16 blocks of domain texts and 16 of general
        texts. The result has the metrics of `student` on all test blocks, corrected by the difference between file and
        student on the blocks that were run. `teacher` has the teacher's stored outputs.
        """
        test = self.material.parts.test
        domain, recorded = self._domain[test], teacher.float32(test)
        kinds = [np.flatnonzero(domain == kind) for kind in (True, False)]
        some = np.concatenate([kind[evenly_spaced(len(kind), BLOCKS)] for kind in kinds if len(kind)])
        own = student_answers(self, student, test, torch.device("cpu"))
        parts = [{key: values[some] for key, values in answers.items()} for answers in (own, recorded)]
        exported, (before, taught) = graph_answers(self, run, test[some]), parts
        moved = own["losses"].copy()
        for kind in (True, False):
            if (counted := (before["counts"] > 0) & (domain[some] == kind)[:, None]).any():
                difference = float((exported["losses"] - before["losses"])[counted].mean(dtype=np.float64))
                moved[(own["counts"] > 0) & (domain == kind)[:, None]] += difference
        quality = self.quality({**own, "losses": moved}, test, recorded)
        whole, after, unquantized = (
            self.agreement(*pair) for pair in ((own, recorded), (exported, taught), (before, taught))
        )
        named = quality | {name: value + after[name] - unquantized[name] for name, value in whole.items()}
        return {name: quality[name] for name in self.measured} | {f"student.{name}": named[name] for name in named}

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all
        with torch.random.fork_rng(devices=[]):
            student = self.student()
        assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
        files = {FILE: self.vocabulary.tokenizer, CONFIGURATION: student.model.config.to_json_string().encode()}
        if self.vocabulary.kept is not None:
            files[KEPT] = msgspec.json.encode(self.vocabulary.kept.tolist())
        return files


def _model(student: nn.Module) -> Any:
    assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
    return student.model


def _perplexity(loss: float) -> float:
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
