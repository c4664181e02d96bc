"""Settings of the package of a causal language model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem

Precision = Literal["fp32", "int8", "int4"]
Form = Literal["onnx", "ort"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TOLERANCES: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.25, "int4": 1.0}
"""Largest allowed difference of a logit from the model's, as a share of the largest logit.

A model file must pass this limit and `AGREEMENT`.
"""
AGREEMENT: Mapping[str, float] = {"fp32": 0.99, "int8": 0.9, "int4": 0.5}
"""Minimum share of tokens for which a file picks the same token as the model, given the model's own text."""
MOST = 256


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """Settings of a package that continues texts token by token.

    Attributes:
        context: maximum tokens of a prompt and its continuation together; default: the model's context.
        most: maximum tokens of a continuation; default: 256, or half of the context if that is less.
        end: tokens that end a text; default: the model's `eos_token_id`.
        template: text around the user's prompt, see `Generation`.
        prompts: golden prompts, as users write them. Default for `Causal`: the beginnings of three texts of the test
            part.
        features: values of the template's features for the golden prompts; default: "unknown".
        golden_tokens: number of greedy tokens to record for each golden prompt.
        formats: file formats for ONNX Runtime; "ort" is required.
        executorch: True to add an ExecuTorch file in fp32. `Causal` sets it from the distillation's `runtimes`.
        agreement: minimum share of tokens, by precision, for which a file and the model choose the same token; default:
            0.99 for fp32, 0.9 for int8, 0.5 for int4.
        threads: threads used to measure tokens per second.
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
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        shares = all(name in PRECISIONS and 0 <= share <= 1 for name, share in self.agreement.items())
        checks = [
            ("context", self.context is None or self.context >= 2, "at least 2"),
            ("most", self.most is None or self.most >= 1, "at least 1"),
            ("template", "{prompt}" in self.template, "a text that contains {prompt}, where the user's text goes"),
            ("prompts", all(self.prompts), "non-empty texts, as users write them"),
            ("golden_tokens", self.golden_tokens >= 1, "at least 1"),
            ("precisions", self.precisions and {*self.precisions} <= {*PRECISIONS}, "|".join(PRECISIONS)),
            ("agreement", shares, f"shares by precision, {'|'.join(PRECISIONS)}"),
            ("formats", {"ort"} <= {*self.formats} <= {"onnx", "ort"}, '"ort", alone or with "onnx"'),
            ("threads", self.threads >= 1, "at least 1"),
        ]  # fmt: skip
        return failed_checks(self, where, [(name, bool(holds), expected) for name, holds, expected in checks])

    def tokens(self, context: int) -> int:
        return self.most or max(1, min(MOST, context // 2))
