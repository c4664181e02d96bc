"""The declaration of a causal language model, trained further on a domain or distilled from a larger model."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from isthmus.distill.language.decoding import DecodingSettings
from isthmus.distill.language.lora import Lora
from isthmus.distill.language.teachers import FUNCTION
from isthmus.distill.settings import TrainingSettings, failed_checks
from isthmus.features.contract.schema import Contract
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem
from isthmus.features.types import Int64

GAIN, REGRESSION = "gain", "regression"
"""Metrics of a model that is trained further, compared with the model before training."""

UNSHAPED = "no shape: the student is the base, or the model its function returns"
RUNTIMES = 'runtimes=("onnxruntime", "executorch")'
_FORBID = ("llama2", "llama3")
"""Licenses, as the model hub names them, that forbid training other language models on a model's output."""


@dataclass(frozen=True, kw_only=True)
class Causal:
    """Train a small language model that continues texts of a domain.

    Set either `base`, to train a model further, or `teacher`, to distill a larger model into a smaller one. The label
    of the spine is 1 for a text of the domain and 0 for a general text.

    Attributes:
        base: model to train further, with its tokenizer: a folder with `config.json`, `model.safetensors` and
            `tokenizer.json`, or "module:function", a function next to the definitions that returns both. The report
            adds the improvement on the domain (`gain`) and the loss on general texts (`regression`).
        teacher: larger model from which a smaller one learns; the same forms as `base`.
        student: "module:function" that takes the vocabulary size and returns a new student; None for a Llama of the
            task's `shape` (width, layers, heads, inner).
        text: input that holds the text; None for the only text input.
        context: tokens per block. Texts are packed into blocks and do not attend to each other.
        cut: True if a text may continue in the next block; if False, a text longer than the context is an error.
        replay: share of general texts among the training tokens, at least 0 and less than 1. With a base, 0 needs a
            gate on `regression`.
        vocabulary: "shared" with the base or teacher, or "pruned" to the tokens of the training texts, the tokens these
            are merged from, single bytes and special tokens. The teacher's probabilities then cover only these tokens.
        divergence: "forward" KL, "reverse" KL, or "jsd" (generalized Jensen-Shannon), from the teacher's probabilities.
        beta: weight for "jsd": near 0 it behaves like forward KL, near 1 like reverse KL.
        top_k: number of teacher probabilities stored per token; all other tokens count as one class. None stores all
            logits.
        temperature: temperature of teacher and student in the divergence.
        soft_weight: weight of the divergence in the loss; the cross entropy of the texts gets 1 - `soft_weight`.
        sequences: share of batches in which the student learns continuations that the teacher wrote.
        on_policy: share of batches in which the student writes the continuations and the teacher scores them.
        prompt: number of tokens at the start of a block that `sequences` and `on_policy` continue.
        base_rate: peak learning rate of the base's original training. If set, it replaces the learning rate of the
            settings with `base_rate` * `rate_share`.
        rate_share: factor for `base_rate`.
        lora: low-rank updates trained on a base whose own weights stay frozen; None to train all weights.
        license: license of the base or teacher, as the model hub names it, for the model card. A license that forbids
            distillation or changes is reported as invalid.
        decoding: prompts, limits and precisions of the package.
    """

    base: str | None = None
    teacher: str | None = None
    student: str | None = None
    text: str | None = None
    context: int = 256
    cut: bool = True
    replay: float = 0.5
    vocabulary: Literal["shared", "pruned"] = "shared"
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    beta: float = 0.5
    top_k: int | None = 64
    temperature: float = 1.0
    soft_weight: float = 0.7
    sequences: float = 0.0
    on_policy: float = 0.0
    prompt: int = 16
    base_rate: float | None = None
    rate_share: float = 0.1
    lora: Lora | None = None
    license: str = ""
    decoding: DecodingSettings = field(default_factory=DecodingSettings)

    def identity(self) -> dict[str, Any]:
        """Return every attribute except `decoding`, to identify a student: if one changes, a new training is needed."""
        values = asdict(self)
        del values["decoding"]
        return values

    @property
    def measured(self) -> tuple[str, ...]:
        return () if self.base is None else (GAIN, REGRESSION)

    @property
    def effective_beta(self) -> float:
        """The `beta` that the loss `generalized` gets: 0 for "forward" KL, 1 for "reverse" KL, `beta` for "jsd"."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.divergence]

    @property
    def shaped(self) -> bool:
        return self.base is None and self.student is None

    @property
    def functions(self) -> tuple[str, ...]:
        names = (self.base, self.teacher, self.student)
        return tuple(name for name in names if name is not None and FUNCTION.fullmatch(name))

    def with_base_rate(self, settings: TrainingSettings) -> TrainingSettings:
        """Return training settings with the learning rate `base_rate` * `rate_share`; unchanged if `base_rate` is None.

        A base is trained further with a small share of its original learning rate.
        """
        return settings if self.base_rate is None else replace(settings, learning_rate=self.base_rate * self.rate_share)

    def problems(self, where: str, gates: tuple[str, ...]) -> list[Problem]:
        """Check all attributes, when a project is loaded; return a problem for each invalid value, [] if all are valid.

        `where` names the declaration in the messages. `gates` has the names of the metrics that have a gate.
        """
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        distilled = self.teacher is not None
        needs_teacher = "0: there is no teacher"
        checks = [
            ("base", (self.base is None) == distilled, "either a base or a teacher"),
            ("student", self.student is None or distilled, "None: the student is the base"),
            ("student", self.student is None or bool(FUNCTION.fullmatch(self.student)), '"module:function"'),
            ("context", self.context >= 2, "at least 2"),
            ("replay", 0 <= self.replay < 1, "at least 0, less than 1"),
            (
                "replay",
                distilled or self.replay != 0 or REGRESSION in gates,
                f'more than 0, or a Gate("{REGRESSION}", at_most=...) that limits how much the model may forget',
            ),
            ("vocabulary", self.vocabulary in ("shared", "pruned"), '"shared" or "pruned"'),
            ("divergence", self.divergence in ("forward", "reverse", "jsd"), '"forward", "reverse" or "jsd"'),
            ("beta", 0 < self.beta < 1, "more than 0, less than 1"),
            ("top_k", self.top_k is None or self.top_k >= 1, "at least 1, or None"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            ("soft_weight", 0 < self.soft_weight < 1, "more than 0, less than 1: the control has no teacher"),
            ("sequences", 0 <= self.sequences <= 1, "0 to 1"),
            ("on_policy", 0 <= self.on_policy <= 1, "0 to 1"),
            ("on_policy", self.on_policy + self.sequences <= 1, f"at most 1 with the {self.sequences:g} of sequences"),
            ("sequences", distilled or not self.sequences, needs_teacher),
            ("on_policy", distilled or not self.on_policy, needs_teacher),
            ("prompt", 1 <= self.prompt < self.context, f"at least 1, less than the context of {self.context}"),
            ("base_rate", self.base_rate is None or 0 < self.base_rate < math.inf, "more than 0"),
            ("rate_share", 0 < self.rate_share <= 1, "more than 0, at most 1"),
            ("lora", self.lora is None or not distilled, "None: a new student has no pretrained weights to keep"),
            (
                "license",
                not self._forbidden,
                "a license that allows distillation and changes",
            ),
        ]
        problems = failed_checks(self, where, checks)
        problems += self.decoding.problems(f"{where}: decoding")
        problems += self.lora.problems(f"{where}: lora") if self.lora else []
        own = [
            ("end", not self.decoding.end, "(): the tokenizer of the model already sets the end token"),
            ("executorch", not self.decoding.executorch, f"False, and {RUNTIMES} in the distillation"),
        ]
        return problems + failed_checks(self.decoding, f"{where}: decoding", own)

    @property
    def _forbidden(self) -> bool:
        name = self.license.lower()
        return name in _FORBID or "nd" in name.split("-")

    def template_problems(self, where: str, contract: Contract, service: str) -> list[Problem]:
        from isthmus.package.generation.prompt import unknown_features

        problems = unknown_features(self.decoding.template, contract, service)
        return [replace(problem, where=f"{where}: decoding: {problem.where}") for problem in problems]

    def spine_problems(self, where: str, spine: Spine) -> list[Problem]:
        """Return a problem if the label column of the spine (the table of training examples) is not of type Int64.

        `where` names the declaration in the message.
        """
        name, dtype = spine.label.name, spine.label.dtype
        if dtype == Int64:
            return []
        return [
            Problem(
                f"{where}: label {name}",
                f"is of type {dtype}",
                "Int64: 1 for domain texts, 0 for general texts",
            )
        ]
