"""What a package says of generating text, and the prompt that it is made from."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.schema import SEPARATOR, Contract
from isthmus.features.errors import Problem, RequestError, one_of
from isthmus.features.types import DataType

TOKENS, PAST, LOGITS, NEW = "tokens", "past", "logits", "new"
"""The inputs and the outputs of a graph: see `distill.decoding.graph`."""

PROMPT = "prompt"
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token that steers a model, which no text of a user may become."""

    text: str
    token: int


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a package says of generating text.

    Attributes:
        context: tokens of a prompt and its continuation together.
        most: tokens of a continuation.
        end: the tokens that end a text.
        begin: the tokens before every prompt.
        control: the special tokens of the tokenizer.
        template: the prompt around what a user asks: `{prompt}` is that, `{view__feature}` a feature of the service.
            Control tokens of the template steer the model.
        missing: the text of a feature that is null.
        tokenizer: the file of the tokenizer, as the library tokenizers writes it.
        prompts: the file of the golden prompts.
    """

    context: int
    most: int
    end: tuple[int, ...]
    begin: tuple[int, ...] = ()
    control: tuple[Control, ...] = ()
    template: str = "{prompt}"
    missing: str = "unknown"
    tokenizer: str = "tokenizer.json"
    prompts: str = "prompts.json"

    @property
    def features(self) -> list[str]:
        """The features that the template names, in order, each once."""
        return template_features(self.template)

    def too_long(self, tokens: str) -> RequestError:
        """Return the error that refuses a prompt of `tokens`, a count in words."""
        return RequestError("prompt", f"has {tokens}, and the context of the model {self.context:,}",
                            expected=f"{self.context - 1:,} tokens at most", remedy="shorten it")  # fmt: skip

    def parts(self, prompt: str, features: Mapping[str, str] | None = None) -> list[str | int]:
        """A prompt as texts and control tokens, in order.

        What a user or the online store says is text, whatever it looks like. It is joined to the words beside it, so
        that its tokens are those of the whole text.

        Raises:
            RequestError: a feature of the template is missing.
        """
        values = {**(features or {}), PROMPT: prompt}
        if absent := [name for name in _FIELD.findall(self.template) if name not in values]:
            raise RequestError("prompt", f"feature {absent[0]} is missing", expected=one_of(self.features))
        tokens = {control.text: control.token for control in self.control}
        pieces = _split(self.template, [*tokens])
        filled = (tokens[piece] if piece in tokens else _FIELD.sub(lambda match: values[match[1]], piece)
                  for piece in pieces)  # fmt: skip
        return [part for part in filled if part != ""]


def template_features(template: str) -> list[str]:
    """The features that a template names, in order, each once."""
    return [name for name in dict.fromkeys(_FIELD.findall(template)) if name != PROMPT]


def unknown_features(template: str, contract: Contract, service: str) -> list[Problem]:
    """What a template names that is no feature of the service."""
    known = prompt_features(contract, service)
    return [
        Problem("template", f"names {name}", f"{{prompt}} or a feature of {service}: {one_of(known)}")
        for name in template_features(template)
        if name not in known
    ]


def prompt_features(contract: Contract, service: str) -> dict[str, tuple[str, str]]:
    """The features that a template may name, each to its view or request transform and its name there."""
    declared = contract.service(service)
    return {SEPARATOR.join(pair): pair for pair in (*declared.features, *declared.computed)}


def shown(value: Any, dtype: DataType) -> str:
    """A feature as a text of a prompt: texts as they are, whatever else as in JSON.

    A number of 32 bits has no more digits than tell it from others: 0.1, and not 0.10000000149011612.
    """
    if isinstance(value, str):
        return value
    if "Float32" in dtype.name:
        value = np.array(value, np.float32) if isinstance(value, list) else np.float32(value)
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


class GoldenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt and what must follow it.

    Attributes:
        text: as a user writes it.
        features: those of the template.
        tokens: the whole prompt.
        answers: model file to its greedy tokens, as far as none of them was a close decision.
    """

    text: str
    features: dict[str, str]
    tokens: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]


def _split(text: str, words: Sequence[str]) -> list[str]:
    """A text cut before and after each of some words, the longest first."""
    if not words:
        return [text]
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return [piece for piece in re.split(f"({pattern})", text) if piece]
