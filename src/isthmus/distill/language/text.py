"""The declaration of a text model: a large model teaches a small one to classify texts, or to embed them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from isthmus.distill.labels import Calibration, Classes, Label, Rank, attributes, can_balance
from isthmus.distill.language.objective import STATE, DeclaredTerm, objective_problems
from isthmus.distill.language.teachers import (
    FUNCTION,
    DeclaredTeacher,
    Pretrained,
    teacher_problems,
    teachers,
    within,
)
from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem

MEASURED = ("lift_kept", "texts_cut")
"""Figures that a `Text` adds: the gain kept, and the share of test texts that are longer than the student reads."""


@dataclass(frozen=True, kw_only=True)
class Bag:
    """A student that averages a vector per token and applies a linear layer; it ignores the order of the words.

    Attributes:
        vocabulary: tokens, at most; rare words are split into characters.
        width: numbers in a token's vector.
    """

    vocabulary: int = 10_000
    width: int = 48

    def problems(self, where: str) -> list[Problem]:
        return type_problems(self, f"{where}: ") or failed_checks(self, where, _sizes(self))


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A student that is a small transformer encoder (as BERT, Devlin et al., 2018, arXiv:1810.04805).

    Attributes:
        layers: transformer layers.
        width: numbers in the vector of a token; a multiple of `heads`.
        heads: attention heads of each layer.
        inner: units of the feed-forward part of each layer.
        rank: numbers in a token's embedding, which a linear layer maps to `width` (ALBERT, Lan et al., 2019,
            arXiv:1909.11942). None for `width` numbers and no such layer.
        vocabulary: tokens, at most; rare words are split into characters.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    inner: int = 256
    rank: int | None = None
    vocabulary: int = 8000

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: ") or failed_checks(self, where, _sizes(self)):
            return wrong
        return failed_checks(self, where, [("width", self.width % self.heads == 0, f"a multiple of {self.heads}")])


@dataclass(frozen=True, kw_only=True)
class PrunedEncoder:
    """A student that is cut from its teacher, a `Pretrained` with the architecture of BERT, and reads its tokenizer.

    It also learns the mean of the teacher's last states if it predicts a label, has one teacher and sets no weights.

    Attributes:
        layers: numbers of the teacher's layers to keep, from 0.
        heads: attention heads to keep in each layer, those with the largest weights; None for all.
        inner: units to keep in the feed-forward part of each layer, chosen like the heads; None for all.
        rank: numbers in a token's embedding, which a linear layer maps to the teacher's width. Table and layer are the
            best approximation of the teacher's embeddings, weighted by the frequency of tokens. None for no such layer.
        vocabulary: tokens with an embedding of their own, the most frequent ones in the training part. Each other token
            shares the one whose direction is nearest to its own in the teacher. None for all.
    """

    layers: Sequence[int]
    heads: int | None = None
    inner: int | None = None
    rank: int | None = None
    vocabulary: int | None = None

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        numbered = len(self.layers) > 0 and min(self.layers) >= 0
        return failed_checks(self, where, [("layers", numbered, "numbers of layers, from 0"), *_sizes(self)])


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """The teacher's vector of a text or an image, scaled to length 1. The student predicts `vector`.

    Attributes:
        pooling: "mean" if the teacher, a `Pretrained`, was trained with the mean of its last states as vector, "first"
            if with the last state of the first token. A model with a projection of images, such as CLIP, ignores it.
        index: number of test rows for a device to search; it needs a pair of columns of a `Text`. The package has their
            keys and second texts (`index.json`), and the teacher's vectors of these texts, times 127 as int8
            (`index.i8`).
    """

    pooling: Literal["mean", "first"] = "mean"
    index: int = 0

    def problems(self, where: str) -> list[Problem]:
        checks = [
            ("pooling", self.pooling in ("mean", "first"), '"mean" or "first"'),
            ("index", type(self.index) is int and self.index >= 0, "a whole number of at least 0"),
        ]
        return failed_checks(self, where, checks)


TextStudents = Bag | Encoder | PrunedEncoder
LABEL_ONLY = ("objective", "temperature", "soft_weight", "calibration", "weight", "class_weight")
"""Attributes of a `Text` or an `Image` that have no meaning for an `Embedding`."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Predict the label of a text, or embed texts: a large model teaches a small one that a device can run.

    Except for a `PrunedEncoder`, the student has a tokenizer of its own, whose vocabulary consists of the most frequent
    words of the training part. Lower and upper case are the same to it.

    Attributes:
        teacher: a `Pretrained`, "module:function" or a `TeacherFunction`, a `TeacherOutputs`, an `Onnx`, or a list of
            these and of pairs (teacher, weight), whose weighted mean teaches.
        predicts: the kind of label: `Classes`, `Binary` or `Number`; or an `Embedding`, which needs no label.
        column: input that holds the text; None for the student's only String. With a label, other inputs of the
            student's service are read, too, prepared as a `Tabular` does by default. For an `Embedding`, also two
            inputs whose texts belong together, such as question and answer.
        student: a `Bag`, an `Encoder`, a `PrunedEncoder`, or "module:function". The function takes the size of the
            vocabulary and the number of outputs n, and returns a torch module. The module maps `input_ids` and
            `attention_mask`, int64 (rows, tokens), to float32 (rows, n). A change of a file that it reads does not
            make another student. A small network of the other inputs is added to the outputs of any student.
        start: safetensors file with weights of another student of the same shape, relative to the project, from which
            student and control start; None for new weights.
        vocabulary: tokens, at most, for a student that is a function.
        tokens: tokens of a text that the student reads; the rest is cut off and counted.
        dropout: share of units dropped in a training step, not for a function.
        temperature: temperature of the distillation loss; higher values soften the teacher's probabilities.
        soft_weight: weight of the teacher's term in the loss; the label term gets 1 - soft_weight. With 1, the student
            learns from the teacher alone, and the control from the labels.
        objective: terms of `isthmus.losses`, which replace the losses of label and teacher (docs/transfer.md).
        calibration: calibration of the student's probabilities: `Temperature`, `Isotonic` or None.
        weight: request field or join key of the spine with the weight of each row in the losses. Metrics and
            calibration count each row once. None for equal weights.
        class_weight: "balanced" for weights that give all classes the same sum of weights in the training part.
    """

    teacher: "DeclaredTeacher | str | list[DeclaredTeacher | str | tuple[DeclaredTeacher | str, float]]"
    predicts: Label | Embedding = field(default_factory=Classes)
    column: str | Sequence[str] | None = None
    student: TextStudents | str = Bag()
    start: str | None = None
    vocabulary: int = 8000
    tokens: int = 128
    dropout: float = 0.1
    temperature: float = 2.0
    soft_weight: float = 0.7
    objective: Sequence[DeclaredTerm] | None = None
    calibration: Calibration | None = None
    weight: str | None = None
    class_weight: Literal["balanced"] | None = None

    @property
    def label(self) -> Label | None:
        return self.predicts if isinstance(self.predicts, Label) else None

    @property
    def measured(self) -> Sequence[str]:
        return MEASURED if self.label else ("texts_cut",)

    @property
    def pretrained(self) -> Sequence[Pretrained]:
        """The teachers that are a model of the transformers library."""
        return [teacher for teacher, _ in teachers(self.teacher) if isinstance(teacher, Pretrained)]

    @property
    def has_states(self) -> bool:
        """True if teacher and student have states of the same width: the student is cut from its only teacher."""
        return isinstance(self.student, PrunedEncoder) and len(teachers(self.teacher)) == 1

    @property
    def compares_states(self) -> bool:
        if self.objective is None:  # the usual loss of states has no weights of rows
            return self.has_states and self.weight is None and self.class_weight is None
        sources = {source for term in self.objective for source in term.arguments.values()}
        return bool(sources & {f"student.{STATE}", f"teacher.{STATE}"})

    @property
    def functions(self) -> tuple[str, ...]:
        named = [teacher.function for teacher, _ in teachers(self.teacher) if hasattr(teacher, "function")]
        return (*named, *([self.student] if isinstance(self.student, str) else []))

    def identity(self) -> dict[str, Any]:
        """Return every attribute that changes a student, except those with a fingerprint or a digest of their own."""
        own = ("teacher", "start", "objective")
        values = {name: value for name, value in vars(self).items() if name not in own}
        kinds = {name: value for name in ("predicts", "calibration", "student") if (value := values.pop(name))}
        named = {name: value if isinstance(value, str) else _named(value) for name, value in kinds.items()}
        return {**values, **named}

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(
            self, f"{where}: ", ("predicts", "teacher", "objective", "calibration", "student", "class_weight")
        ):
            return wrong
        function = isinstance(self.student, str) and bool(FUNCTION.fullmatch(self.student))
        label = isinstance(self.predicts, Label) and not isinstance(self.predicts, Rank)
        embeds = isinstance(self.predicts, Embedding)
        known = isinstance(self.calibration, Calibration) and isinstance(self.predicts, self.calibration.labels)
        balances = self.class_weight == "balanced" and can_balance(self.predicts)
        pair = self.column is not None and not isinstance(self.column, str)
        known_student = isinstance(self.student, TextStudents) or function
        checks = [
            ("predicts", label or embeds, "Classes, Binary or Number, or an Embedding"),
            ("column", not pair or (embeds and len({*(self.column or ())}) == 2), "one, or two for an Embedding"),
            ("student", known_student, 'a Bag, an Encoder, a PrunedEncoder or "module:function"'),
            ("start", self.start is None or within(self.start), "a relative path within the project, or None"),
            ("vocabulary", self.vocabulary >= 100, "at least 100"),
            ("tokens", self.tokens >= 2, "at least 2"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            ("soft_weight", 0 < self.soft_weight <= 1, "more than 0, at most 1"),
            ("calibration", self.calibration is None or known, f"None, or a calibration for {self.predicts}"),
            ("class_weight", self.class_weight is None or balances, '"balanced", for one class per row, or None'),
        ]
        if isinstance(self.predicts, Embedding):
            checks.append(("predicts", pair or not self.predicts.index, "index=0 for a single column"))
            checks += [(name, getattr(self, name) == getattr(Text, name), "not set: it is for labels")
                       for name in LABEL_ONLY]  # fmt: skip
        problems = failed_checks(self, where, checks)
        taught = teacher_problems(self.teacher, f"{where}: teacher")
        if self.teacher is None:
            taught = [Problem(f"{where}: teacher", "None", 'a teacher, such as Pretrained("models/large")')]
        problems += taught or self._teacher_problems(where)
        if isinstance(self.student, TextStudents):
            problems += self.student.problems(f"{where}: student")
        problems += self.predicts.problems(f"{where}: predicts") if label or embeds else []
        return problems or objective_problems(self, where)

    def _teacher_problems(self, where: str) -> list[Problem]:
        cut, embeds = isinstance(self.student, PrunedEncoder), isinstance(self.predicts, Embedding)
        if (cut or embeds) and (len(self.pretrained) != 1 or (embeds and len(teachers(self.teacher)) > 1)):
            expected = f"one Pretrained, {'whose vectors are learned' if embeds else 'from which the student is cut'}"
            return [Problem(f"{where}: teacher", repr(self.teacher)[:200], expected)]
        if embeds and self.pretrained[0].column is not None:
            expected = "None: the teacher reads the columns of the Text"
            return [Problem(f"{where}: teacher: column", repr(self.pretrained[0].column), expected)]
        return []

    def spine_problems(self, where: str, spine: Spine) -> list[Problem]:
        """Return a problem if the label column of the spine has a type that the kind of label cannot be."""
        return self.predicts.spine_problems(where, spine, self.weight) if isinstance(self.predicts, Label) else []


def _sizes(student: TextStudents) -> list[tuple[str, bool, str]]:
    least = {"vocabulary": 100}
    sizes = {name: value for name, value in asdict(student).items() if isinstance(value, int)}
    return [(name, value >= least.get(name, 1), f"at least {least.get(name, 1)}") for name, value in sizes.items()]


def _named(value: Any) -> dict[str, Any]:
    return {"kind": type(value).__name__, **attributes(value)}
