"""The task of causal language models."""

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
from isthmus.distill.causal.blocks import Blocks, packed, replayed, together
from isthmus.distill.causal.network import CausalStudent, CausalTeacher, Packed, continued, losses, written
from isthmus.distill.causal.texts import Texts
from isthmus.distill.causal.tokenizer import FILE, Vocabulary
from isthmus.distill.declaration import EXECUTORCH
from isthmus.distill.decoder.graph import graph
from isthmus.distill.decoder.network import CachedModel, cache_shape, require_supported
from isthmus.distill.decoder.writer import Writer
from isthmus.distill.language.causal import GAIN, REGRESSION, Causal
from isthmus.distill.language.decoding import TOLERANCES
from isthmus.distill.losses.logits import IGNORED, generalized, hard_targets, top_k_tail
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.outputs.form import Form
from isthmus.distill.outputs.identity import identities
from isthmus.distill.tasks.answers import graph_answers, student_answers
from isthmus.distill.tasks.split import PARTS, Split
from isthmus.distill.tasks.task import Batch, Case, Material, Task, TeacherBatch
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Answers, Array, Index, spread
from isthmus.features.errors import DataError
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS
from isthmus.package.inputs import Feeds

CONFIGURATION, KEPT = "config.json", "vocabulary.json"

BLOCKS = 16
"""Of each kind, at most, that a model file reads for its figures: of SmolLM2, it reads 25 tokens a second."""


class CausalTask(Task):
    """Texts of a domain, continued by a model that is trained further or taught by a larger one.

    Its rows are not those of the training set but blocks of tokens, into which the texts of each part are packed.
    """

    metric = "perplexity"
    more = False
    at_once = 16
    graph_rows = 1
    tolerance: Mapping[str, float] = {"fp32": 1e-3}
    """Of a logit, for a search; those of a package follow from its student's."""
    compared = 32
    pipeline = "text-generation"
    shape: Mapping[str, Any] = MappingProxyType(models.SHAPE)

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
        self._writer: tuple[nn.Module, Writer] | None = None
        self._domain, self._counts = domain, blocks.targets != IGNORED
        self.max_sizes = {TOKENS: 1, PAST: declared.context}
        about = {"base": "as it was, before it was trained further", "teacher": "the language model that teaches"}
        kind = "teacher" if declared.base is None else "base"
        self.about = {"teacher": about[kind] + (f"; its licence: {declared.license}" if declared.license else "")}
        top_k = None if declared.base or declared.top_k is None else min(declared.top_k, self.vocabulary.size)
        self.form = Form(
            # A float16 has no number of a large vocabulary.
            "float32" if declared.base or declared.sequences else "float16",
            top_k=top_k,
            temperature=1.0 if top_k is None else declared.temperature,
        )

    @staticmethod
    def _column(material: Material) -> str:
        """The column of what a block has, beside those of its first text."""
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
        """The blocks of all parts, whether each is of the domain, and the parts."""
        declared, seed = self.declared, material.declaration.seed
        blocks, domain, sizes = [], [], []
        for name in PARTS:
            rows = np.random.default_rng([seed, PARTS.index(name)]).permutation(getattr(material.parts, name))
            where = f"{self.where}: {name} part"
            of_texts, general = (self._blocks(rows[texts.domain[rows] == kind], tokens) for kind in (True, False))
            if not len(of_texts):
                raise DataError(where, "no text of the domain", expected="texts with the label 1")
            if name != "train" and not len(general) and declared.base is not None:
                raise DataError(where, "no general text", expected=f"texts with the label 0, for {REGRESSION}")
            chosen = replayed(of_texts, general, declared.replay, where) if name == "train" else general
            made = together([of_texts, chosen])
            of_domain = np.arange(len(made)) < len(of_texts)
            blocks.append(made)
            domain.append(of_domain)
            sizes.append(len(made))
        train, validation, test = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        return together(blocks), np.concatenate(domain), Split(train, validation, test, material.parts.boundaries)

    def _blocks(self, rows: Index, tokens: Sequence[Sequence[int]]) -> Blocks:
        own, declared = [tokens[row] for row in rows.tolist()], self.declared
        return packed(own, rows, declared.context, self.vocabulary.end, cut=declared.cut, where=self.where)

    def teacher(self) -> Teacher:
        """The larger model, or the base as it was."""
        return self._teacher(sequences=self.declared.sequences > 0)

    def _teacher(self, *, sequences: bool) -> NetworkTeacher:
        keys = ["losses", *(["logits"] if self.declared.base is None else []), *(["sequence"] if sequences else [])]
        network = CausalTeacher(
            Packed(self._language.model, self.vocabulary.kept), tuple(keys), self.declared.prompt, self.vocabulary.end
        )
        return NetworkTeacher(network, keys, name=self.declared.base or self.declared.teacher)

    @cached_property
    def _judge(self) -> NetworkTeacher:
        """The teacher of what the student writes itself."""
        return self._teacher(sequences=False)

    def asked(self, rows: Index) -> Any:
        """Blocks."""
        return tuple(column[torch.from_numpy(rows)] for column in (self.tokens, self.positions, self.targets))

    def identities(self) -> Array:
        """The content of each block."""
        columns = {"tokens": self.tokens, "positions": self.positions, "targets": self.targets}
        return identities({name: column.numpy() for name, column in columns.items()})

    def options(self) -> dict[str, Any]:
        """The student's tokens."""
        return {"tokenizer": hashlib.sha256(self.vocabulary.tokenizer).hexdigest()}

    def student(self) -> nn.Module:
        """The base, or a new model; a ConfigurationError for one that no package can have."""
        context, where = self.declared.context, f"{self.where}: student"
        if self.declared.base is not None:
            new = models.trimmed(self._language.model, self.vocabulary)
            new = new if self.declared.lora is None else models.adapted(new, self.declared.lora, where)
        else:
            new = models.student(self.declared.student, self.vocabulary, context, self.shape, where)
        require_supported(new, where)
        return CausalStudent(new).train()

    def finished(self, student: nn.Module) -> nn.Module:
        """Without layers beside those of the base."""
        if self.declared.lora is None:
            return student
        return CausalStudent(models.merged(_model(student))).train(student.training)

    def batch(self, rows: Tensor) -> Batch:
        """Blocks, whose labels are the next tokens."""
        targets = self.targets[rows]
        return Batch((self.tokens[rows], self.positions[rows], targets), targets)

    def objective(self) -> Objective:
        """The texts, and the teacher's probabilities of their tokens."""
        declared = self.declared
        arguments = {"student": "student.logits", "labels": "labels"}
        if declared.base is not None:
            return Objective({"texts": Term(hard_targets, 1.0, **arguments)})
        beta, temperature = declared.mixed, declared.temperature
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
        """The batch, or what student or teacher write after its prompts, in the declared shares of all batches.

        Which of them is drawn by torch's own generator, whose state a checkpoint has.
        """
        declared = self.declared
        if not (declared.on_policy or declared.sequences):
            return batch
        drawn = float(torch.rand(()))
        if drawn < declared.on_policy:
            return self._own(student, batch)
        return self._sequences(batch) if drawn < declared.on_policy + declared.sequences else batch

    def _own(self, student: nn.Module, batch: TeacherBatch) -> TeacherBatch:
        """What the student writes (GKD, 2023, arXiv:2306.13649), with what the teacher says of it."""
        assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
        tokens, positions, _ = batch.inputs
        student.eval()
        with torch.no_grad():
            tokens = written(student.packed, tokens, positions, self.declared.prompt, self.vocabulary.end, greedy=False)
        student.train()
        positions, targets = continued(tokens, positions, self.declared.prompt, self.vocabulary.end)
        answers = self._judge.ask((tokens, positions, targets))
        kept = self.form.encode(answers, range(len(tokens)), self._judge.where)
        said = {key: torch.from_numpy(array).to(tokens.device) for key, array in kept.items()}
        # Nothing that it wrote is to be learned as a text.
        return TeacherBatch((tokens, positions, targets), torch.full_like(targets, IGNORED), said)

    def _sequences(self, batch: TeacherBatch) -> TeacherBatch:
        """What the teacher writes, as texts (Kim and Rush, EMNLP 2016, arXiv:1606.07947)."""
        tokens = batch.teacher["sequence"].long()
        positions, targets = continued(tokens, batch.inputs[1], self.declared.prompt, self.vocabulary.end)
        # What it said of the tokens of the block is not of these.
        return TeacherBatch((tokens, positions, torch.full_like(targets, IGNORED)), targets, batch.teacher)

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:
        """Perplexity of the domain's texts, and the mean loss of a token of the general ones.

        Of a base, `gain` is the share of its perplexity that is gone, `regression` the share by which its general loss
        rose.
        """
        found = {"perplexity": _perplexity(self._mean(answers, rows, domain=True))}
        found["general_loss"] = self._mean(answers, rows, domain=False)
        if self.declared.base is not None:
            before = (self._mean(teacher, rows, domain=kind) for kind in (True, False))
            found[GAIN] = 1 - found["perplexity"] / _perplexity(next(before))
            found[REGRESSION] = found["general_loss"] / next(before) - 1
        return found

    def score(self, answers: Answers, rows: Index, _teacher: Answers) -> float:
        """The perplexity alone."""
        return _perplexity(self._mean(answers, rows, domain=True))

    def _mean(self, answers: Answers, rows: Index, *, domain: bool) -> float:
        """The mean loss of a token; NaN without one."""
        chosen = self._domain[rows] == domain
        count = int(self._counts[rows][chosen].sum())
        return float(answers["losses"][chosen].sum(dtype=np.float64)) / count if count else math.nan

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """How often the teacher's likeliest token is the student's; nothing of a base, which is asked for losses."""
        if "indexes" in teacher:
            theirs = teacher["indexes"][..., 0]
        elif "logits" in teacher:
            theirs = teacher["logits"].argmax(-1)
        else:
            return {}
        return {"agreement": float((student["best"] == theirs)[student["counts"] > 0].mean())}

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """What a base gained and lost, on average over the seeds."""
        return {name: quality["student"][name] for name in self.measured}

    def sliced(self, rows: Index) -> pa.Table:
        """By the kind of texts."""
        return self.material.table.select([self.material.table.column_names[-1]]).take(rows)

    def content(self) -> str:
        """A digest of the blocks of the training part."""
        digest = hashlib.sha256(self.vocabulary.tokenizer)
        for column in self.asked(self.material.parts.train):
            digest.update(column.numpy().tobytes())
        return digest.hexdigest()

    def writer(self, student: nn.Module) -> Writer:
        """The student with its tokenizer, as declared."""
        if self._writer is None or self._writer[0] is not student:
            settings = self.declared.decoding
            settings = replace(
                settings, prompts=settings.prompts or self._beginnings,
                executorch=EXECUTORCH in self.material.declaration.runtimes,
            )  # fmt: skip
            self._writer = student, Writer.of(_model(student), self.vocabulary.tokenizer, settings)
        return self._writer[1]

    def tolerances(self, student: nn.Module) -> Mapping[str, float]:
        """Shares of the student's largest logit."""
        scale = self.writer(student).reference.scale
        return {precision: share * scale for precision, share in TOLERANCES.items()}

    def model(self, student: nn.Module) -> ModelProto:
        """Tokens and the cache of those before them to logits."""
        return graph(self.network(student))

    def network(self, student: nn.Module) -> CachedModel:
        """The model with a cache."""
        return self.writer(student).network

    def feeds(self, rows: Index) -> Feeds:
        """The token in the middle of a block, behind a cache that has no text: what a step is fed, by its size."""
        (row,), half = rows.tolist(), self.declared.context // 2
        tokens = self.tokens[row, half : half + 1].numpy()
        return {TOKENS: tokens[None], PAST: np.zeros((1, half, *self._cache()), np.float32)}

    def _cache(self) -> tuple[int, int, int]:
        """The sizes of a token in the cache of a student."""
        if self.declared.base is not None:
            return cache_shape(self._language.model.config)
        with torch.random.fork_rng(devices=[]):
            return cache_shape(_model(self.student()).config)

    def case(self, student: nn.Module, rows: Index) -> Case:
        """The token in the middle of a block's first text, behind the cache of those before it."""
        (row,) = rows.tolist()
        length = int((self.positions[row, 1:] > 0).long().cumprod(0).sum()) + 1
        half, run = length // 2, self.writer(student).reference.run
        tokens = self.tokens[row, : half + 1].numpy()[None]
        past = np.zeros((1, 0, *self.network(student).cache), np.float32)
        if half:
            past = run({TOKENS: tokens[:, :half], PAST: past})[NEW]
        return self._answered(student, {TOKENS: tokens[:, half:], PAST: past})

    def cases(self, student: nn.Module) -> list[Case]:
        """A golden prompt, and a step behind it."""
        return [self._answered(student, feeds) for feeds in self.writer(student).reference.cases]

    def _answered(self, student: nn.Module, feeds: Feeds) -> Case:
        return Case(feeds, self.expected(student, feeds))

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        """The logits, and what the cache grows by."""
        return self.writer(student).reference.run(feeds)

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        """The losses of a block, which a graph reads token by token."""
        (row,) = rows.tolist()
        none = past = np.zeros((1, 0, *self._cache()), np.float32)
        said = []
        for token, place in zip(self.tokens[row].numpy(), self.positions[row].tolist(), strict=True):
            past = past if place else none
            outputs = run({TOKENS: token.reshape(1, 1), PAST: past})
            said.append(outputs[LOGITS])
            past = np.concatenate([past, outputs[NEW]], 1)
        logits, targets = torch.from_numpy(np.concatenate(said)[None]), self.targets[row][None]
        found = {"losses": losses(logits, targets), "best": logits.argmax(-1), "counts": targets != IGNORED}
        return {key: value.float().numpy() for key, value in found.items()}

    def figures(
        self, run: Callable[[Feeds], Answers], student: nn.Module, teacher: TeacherOutputs
    ) -> Mapping[str, float]:
        """Those of the student, moved by what the file differs in on some blocks: it reads them token by token."""
        test = self.material.parts.test
        domain, said = self._domain[test], teacher.float32(test)
        kinds = [np.flatnonzero(domain == kind) for kind in (True, False)]
        some = np.concatenate([kind[spread(len(kind), BLOCKS)] for kind in kinds if len(kind)])
        own = student_answers(self, student, test, torch.device("cpu"))
        parts = [{key: values[some] for key, values in answers.items()} for answers in (own, said)]
        theirs, (before, asked) = graph_answers(self, run, test[some]), parts
        moved = own["losses"].copy()
        for kind in (True, False):
            if (counted := (before["counts"] > 0) & (domain[some] == kind)[:, None]).any():
                apart = float((theirs["losses"] - before["losses"])[counted].mean(dtype=np.float64))
                moved[(own["counts"] > 0) & (domain == kind)[:, None]] += apart
        quality = self.quality({**own, "losses": moved}, test, said)
        whole, *agreed = (self.agreement(*pair) for pair in ((own, said), (theirs, asked), (before, asked)))
        named = quality | {name: value + agreed[0][name] - agreed[1][name] for name, value in whole.items()}
        return {name: quality[name] for name in self.measured} | {f"student.{name}": named[name] for name in named}

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all
        """The tokenizer, the configuration of the model, and the teacher's number of each token that was kept."""
        with torch.random.fork_rng(devices=[]):
            student = self.student()
        assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
        found = {FILE: self.vocabulary.tokenizer, CONFIGURATION: student.model.config.to_json_string().encode()}
        if self.vocabulary.kept is not None:
            found[KEPT] = msgspec.json.encode(self.vocabulary.kept.tolist())
        return found


def _model(student: nn.Module) -> Any:
    """The model of transformers in a student."""
    assert isinstance(student, CausalStudent)  # noqa: S101 - from `student`
    return student.model


def _perplexity(loss: float) -> float:
    """Of a mean loss; infinite where a float has no such number, and NaN of NaN."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)
