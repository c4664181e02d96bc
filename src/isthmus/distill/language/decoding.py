"""What a package of a causal language model is like, that continues texts token by token."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import mistyped
from isthmus.features.errors import Problem

Precision = Literal["fp32", "int8", "int4"]
Form = Literal["onnx", "ort"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.25, "int4": 1.0}
"""Largest difference of a logit from the model's, as a share of its largest logit: what counts is the agreement."""
AGREEMENT: Mapping[str, float] = {"fp32": 0.99, "int8": 0.9, "int4": 0.5}
"""Least share of tokens that a file says as the model does, each behind the model's own text."""
MOST = 256


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """What a package of a causal language model is like.

    Attributes:
        context: tokens of a prompt and its continuation together; by default those of the model.
        most: tokens of a continuation; by default 256, or half of the context.
        end: the tokens that end a text; by default the model's `eos_token_id`.
        template: the prompt around what a user asks, see `Generation`.
        prompts: golden prompts, as users write them. By default, those of a `Causal` are the beginnings of three texts
            of the test part.
        features: texts of the features that the template names, for the golden prompts; by default "unknown".
        golden_tokens: greedy tokens that are recorded of each golden prompt.
        precisions: of the model files.
        formats: likewise, of ONNX Runtime.
        executorch: whether there is a file for ExecuTorch, too, in fp32; of a `Causal`, its `runtimes` say so.
        agreement: least share of equal tokens, by precision, where it is another than `AGREEMENT`.
        threads: with which tokens per second are measured.
    """

    context: int | None = None
    most: int | None = None
    end: tuple[int, ...] = ()
    template: str = "{prompt}"
    prompts: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)
    golden_tokens: int = 32
    precisions: tuple[Precision, ...] = PRECISIONS
    formats: tuple[Form, ...] = ("onnx", "ort")
    executorch: bool = False
    agreement: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1

    def problems(self, where: str) -> list[Problem]:
        """The invalid values, each with what would be valid."""
        if wrong := mistyped(self, f"{where}: "):
            return wrong
        shares = all(name in PRECISIONS and 0 <= share <= 1 for name, share in self.agreement.items())
        checks = [
            ("context", self.context is None or self.context >= 2, "at least 2"),
            ("most", self.most is None or self.most >= 1, "at least 1"),
            ("template", "{prompt}" in self.template, "a text with {prompt}, the place of what a user asks"),
            ("prompts", all(self.prompts), "some texts, as users write them"),
            ("golden_tokens", self.golden_tokens >= 1, "at least 1"),
            ("precisions", self.precisions and {*self.precisions} <= {*PRECISIONS}, "|".join(PRECISIONS)),
            ("agreement", shares, f"shares by precision, {'|'.join(PRECISIONS)}"),
            ("formats", {"ort"} <= {*self.formats} <= {"onnx", "ort"}, '"ort", alone or with "onnx"'),
            ("threads", self.threads >= 1, "at least 1"),
        ]  # fmt: skip
        return failed_checks(self, where, [(name, bool(holds), expected) for name, holds, expected in checks])

    def tokens(self, context: int) -> int:
        """Tokens of a continuation in a context."""
        return self.most or max(1, min(MOST, context // 2))
