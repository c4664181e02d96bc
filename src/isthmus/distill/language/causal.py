"""The declaration of a causal language model: trained further on a domain, or taught by a larger one."""

import math
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from isthmus.distill.language.decoding import DecodingSettings
from isthmus.distill.language.lora import Lora
from isthmus.distill.settings import TrainingSettings, failed_checks
from isthmus.features.contract.schema import Contract
from isthmus.features.definition.failure import mistyped
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem
from isthmus.features.types import Int64

GAIN, REGRESSION = "gain", "regression"
"""Figures of a model that is trained further, against what it was before."""

UNSHAPED = "nothing: the student is the base, or what its function returns"
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
RUNTIMES = 'runtimes=("onnxruntime", "executorch")'
_FORBID = ("llama2", "llama3")
"""Licences, as the hub names them, that let no other language model learn from what a model says."""


@dataclass(frozen=True, kw_only=True)
class Causal:
    """A language model that continues texts. The label of the spine is 1 for a text of the domain, 0 for a general one.

    Attributes:
        base: a model to train further on the domain, with its tokenizer: a folder with `config.json`,
            `model.safetensors` and `tokenizer.json`, or "module:function", a function beside the definitions that
            returns both. The report has what it gains on the domain (`gain`), and loses elsewhere (`regression`).
        teacher: a model, declared alike, from which a smaller one learns. Either this or `base`.
        student: "module:function" that returns a new student of a vocabulary's size; None for a Llama of the task's
            `shape` (width, layers, heads, inner).
        text: the input that is the text; None if there is only one.
        context: tokens of a block. Texts are packed into blocks, and none of them attends to another.
        cut: whether a text may continue in the next block; if not, one that is longer than the context is refused.
        replay: share of general texts among the tokens that are learned from, at least 0, less than 1.
        vocabulary: "shared" with the base or the teacher, or "pruned": the tokens of the training texts, what these
            are merged from, single bytes and special tokens. Probabilities of the teacher are then of these alone.
        divergence: from the teacher's tokens: "forward" or "reverse" KL, or "jsd", between both.
        beta: of "jsd": towards 0 it is as the forward, towards 1 as the reverse KL.
        top_k: of the teacher's probabilities of a token, this many are kept, and all others as one; None for all.
        temperature: of both in the divergence.
        soft_weight: share of the divergence in the loss; the rest is that of the texts themselves.
        sequences: share of batches in which the student learns what the teacher itself writes after their prompts.
        on_policy: share of batches that the student writes itself after their prompts, judged by the teacher at once.
        prompt: first tokens of a block which these continue.
        base_rate: the largest learning rate with which the base was trained; with it, `rate_share` of it is that of
            the settings.
        rate_share: see there.
        lora: of a base, what is learned beside its weights, which stay; None if these are learned themselves.
        license: of the base or the teacher, as the hub names it, for the card.
        decoding: what the package is like that continues texts: its prompts, limits and precisions.
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
        """What a student depends on: all but the package that it becomes."""
        values = asdict(self)
        del values["decoding"]
        return values

    @property
    def measured(self) -> tuple[str, ...]:
        """The figures that a report adds."""
        return () if self.base is None else (GAIN, REGRESSION)

    @property
    def mixed(self) -> float:
        """The `beta` of the divergence."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.divergence]

    @property
    def shaped(self) -> bool:
        """Whether the student is made with the task's `shape`."""
        return self.base is None and self.student is None

    @property
    def functions(self) -> tuple[str, ...]:
        """Those beside the definitions."""
        names = (self.base, self.teacher, self.student)
        return tuple(name for name in names if name is not None and FUNCTION.fullmatch(name))

    def paced(self, settings: TrainingSettings) -> TrainingSettings:
        """The settings, with the learning rate that is a share of the base's."""
        return settings if self.base_rate is None else replace(settings, learning_rate=self.base_rate * self.rate_share)

    def problems(self, where: str, gates: tuple[str, ...]) -> list[Problem]:
        """The invalid values, each with what would be valid; `gates` are the figures that declared gates are about."""
        if wrong := mistyped(self, f"{where}: "):
            return wrong
        taught = self.teacher is not None
        only_taught = "0: there is no teacher"
        checks = [
            ("base", (self.base is None) == taught, "either a base or a teacher"),
            ("student", self.student is None or taught, "None: the student is the base"),
            ("student", self.student is None or bool(FUNCTION.fullmatch(self.student)), '"module:function"'),
            ("context", self.context >= 2, "at least 2"),
            ("replay", 0 <= self.replay < 1, "at least 0, less than 1"),
            (
                "replay",
                taught or self.replay != 0 or REGRESSION in gates,
                f'more than 0, or a Gate("{REGRESSION}", at_most=...) that says how much may be forgotten',
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
            ("sequences", taught or not self.sequences, only_taught),
            ("on_policy", taught or not self.on_policy, only_taught),
            ("prompt", 1 <= self.prompt < self.context, f"at least 1, less than the context of {self.context}"),
            ("base_rate", self.base_rate is None or 0 < self.base_rate < math.inf, "more than 0"),
            ("rate_share", 0 < self.rate_share <= 1, "more than 0, at most 1"),
            ("lora", self.lora is None or not taught, "None: a new student has no weights that could stay"),
            ("license", not self._forbidden, "a licence that allows to learn from the model, and to change it"),
        ]
        problems = failed_checks(self, where, checks)
        problems += self.decoding.problems(f"{where}: decoding")
        problems += self.lora.problems(f"{where}: lora") if self.lora else []
        own = [
            ("end", not self.decoding.end, "nothing: the token that ends the texts it learned from"),
            ("executorch", not self.decoding.executorch, f"False, and {RUNTIMES} in the distillation"),
        ]
        return problems + failed_checks(self.decoding, f"{where}: decoding", own)

    @property
    def _forbidden(self) -> bool:
        name = self.license.lower()
        return name in _FORBID or "nd" in name.split("-")

    def unknown(self, where: str, contract: Contract, service: str) -> list[Problem]:
        """What the template of its prompts names that is no feature of the service."""
        from isthmus.package.generation.prompt import unknown_features

        found = unknown_features(self.decoding.template, contract, service)
        return [replace(problem, where=f"{where}: decoding: {problem.where}") for problem in found]

    def unfit(self, where: str, spine: Spine) -> list[Problem]:
        """A label that does not say which texts are of the domain."""
        name, dtype = spine.label.name, spine.label.dtype
        if dtype == Int64:
            return []
        return [Problem(f"{where}: label {name}", f"is of type {dtype}", "Int64: 1 for the domain, 0 for general")]
