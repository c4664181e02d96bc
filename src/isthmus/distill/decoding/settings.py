"""What a package of a causal language model is like, and where it comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.distill.decoding.weights import Precision
from isthmus.features.contract.contract import Contract
from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.package.manifest import WHOLE, Format

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8", "int4")
TOLERANCES: Mapping[Precision, float] = {"fp32": 1e-4, "int8": 0.25, "int4": 1.0}
"""Largest difference of a logit from the model's, as a share of its largest logit: what counts is the agreement."""
AGREEMENT: Mapping[Precision, float] = {"fp32": 0.99, "int8": 0.9, "int4": 0.5}
"""Least share of tokens that a file says as the model does, each behind the model's own text."""


@dataclass(frozen=True, kw_only=True)
class DecodingSettings:
    """What a package of a causal language model is like.

    Attributes:
        context: tokens of a prompt and its continuation together; by default those of the model.
        most: tokens of a continuation.
        end: the tokens that end a text; by default the model's `eos_token_id`.
        template: the prompt around what a user asks, see `Generation`.
        prompts: golden prompts, as users write them.
        features: texts of the features that the template names, for the golden prompts.
        golden_tokens: greedy tokens that are recorded of each golden prompt.
        precisions: of the model files.
        formats: likewise, of ONNX Runtime.
        executorch: whether there is a file for ExecuTorch, too, in fp32.
        agreement: least share of equal tokens, by precision, where it is another than `AGREEMENT`.
        threads: with which tokens per second are measured.
    """

    context: int | None = None
    most: int = 256
    end: tuple[int, ...] = ()
    template: str = "{prompt}"
    prompts: tuple[str, ...] = ()
    features: Mapping[str, str] = field(default_factory=dict)
    golden_tokens: int = 32
    precisions: tuple[Precision, ...] = PRECISIONS
    formats: tuple[Format, ...] = ("onnx", "ort")
    executorch: bool = False
    agreement: Mapping[Precision, float] = field(default_factory=dict)
    threads: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not self.prompts:
            problems.append(Problem("prompts", "there is none", "some texts, as users write them"))
        if unknown := [each for each in self.precisions if each not in PRECISIONS]:
            problems.append(Problem("precisions", unknown[0], "|".join(PRECISIONS)))
        if unknown := [each for each in self.agreement if each not in PRECISIONS]:
            problems.append(Problem("agreement", unknown[0], "|".join(PRECISIONS)))
        if others := [each for each in self.formats if each not in WHOLE]:
            problems.append(Problem("formats", others[0], "|".join(WHOLE)))
        if self.golden_tokens < 1 or self.threads < 1:
            problems.append(Problem("golden_tokens and threads", f"{self.golden_tokens}, {self.threads}", "1 or more"))
        if not self.precisions or "ort" not in self.formats:
            problems.append(Problem("precisions and formats", "name no file in ORT format", "a file that servers open"))
        if problems:
            raise ConfigurationError("decoding", problems)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model comes from, as a manifest says it.

    Attributes:
        name: of the package.
        contract: that of the features.
        service: the feature service whose features the template may name.
        model: id of the student.
        training_set: id of what it learned from.
        task: the class that made it.
    """

    name: str
    contract: Contract
    service: str
    model: str
    training_set: str
    task: str = "causal"
