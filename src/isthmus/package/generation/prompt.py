"""Generation settings of a package, its prompt template, and its golden prompts."""

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
"""Inputs and outputs of a graph: see `distill.decoder.graph`."""

PROMPT = "prompt"
_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A special token of a tokenizer, and its text. The text of a user never becomes this token."""

    text: str
    token: int


class Generation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Generation settings of a package.

    Attributes:
        context: maximum tokens of a prompt and its continuation together.
        most: maximum tokens of a continuation.
        end: tokens that end a text.
        begin: tokens before every prompt.
        template: text around the user's prompt: `{prompt}` is the prompt, `{view__feature}` a feature of the service.
            Control tokens in the template control the model.
        missing: text for a feature that is null.
        tokenizer: file of the tokenizer, in the format of the library tokenizers.
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
        return template_features(self.template)

    def too_long(self, tokens: str) -> RequestError:
        return RequestError("prompt", f"has {tokens}, and the context of the model {self.context:,}",
                            expected=f"{self.context - 1:,} tokens at most", remedy="shorten it")  # fmt: skip

    def parts(self, prompt: str, features: Mapping[str, str] | None = None) -> list[str | int]:
        """Fill the prompt template with a user's prompt and features; return texts and ids of control tokens in order.

        The caller tokenizes the texts. `features` has the text of each feature in the template. Raises RequestError if
        one is missing. Control tokens come only from the template, never from the prompt or a feature. Between two
        control tokens, everything is joined to one text.
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
    return [name for name in dict.fromkeys(_FIELD.findall(template)) if name != PROMPT]


def unknown_features(template: str, contract: Contract, service: str) -> list[Problem]:
    known = prompt_features(contract, service)
    return [
        Problem("template", f"names {name}", f"{{prompt}} or a feature of {service}: {one_of(known)}")
        for name in template_features(template)
        if name not in known
    ]


def prompt_features(contract: Contract, service: str) -> dict[str, tuple[str, str]]:
    declared = contract.service(service)
    return {SEPARATOR.join(pair): pair for pair in (*declared.features, *declared.computed)}


def format_feature(value: Any, dtype: DataType) -> str:
    if isinstance(value, str):
        return value
    if "Float32" in dtype.name:
        value = np.array(value, np.float32) if isinstance(value, list) else np.float32(value)
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY).decode()


class GoldenPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded prompt with its tokens and the answer of each model file, to check that a package still works.

    `answers` has the most likely tokens after the prompt by name of the model file. They end before the first token
    whose lead is so small that another processor might choose differently.
    """

    text: str
    features: dict[str, str]
    tokens: tuple[int, ...]
    answers: dict[str, tuple[int, ...]]


def _split(text: str, words: Sequence[str]) -> list[str]:
    if not words:
        return [text]
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    return [piece for piece in re.split(f"({pattern})", text) if piece]
