"""A causal language model behind its graph: prompts in parts, then a token at a time, over a cache of its own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.errors import PackageError, RequestError
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation

PART = 256
"""Tokens of a prompt that are read at once: attention takes memory for each of them times all before it."""

Array = np.ndarray[Any, Any]
Run = Callable[[dict[str, Array]], Mapping[str, Array]]
"""Runs a graph."""


@dataclass(frozen=True, slots=True)
class Read:
    """What a model says behind some tokens: logits, (vocabulary,), the likeliest token and its lead over the next."""

    logits: Array
    token: int
    lead: float


class Cache:
    """Keys and values of the tokens of a text so far, of one model alone.

    Its memory is planned ahead, so that a step appends to it and copies nothing.

    Attributes:
        owner: the SHA-256 of the model file.
        shape: of what it has for a token.
        length: how many tokens it has.
    """

    def __init__(self, owner: str, shape: Sequence[int], most: int) -> None:
        self.owner, self.shape, self.length = owner, tuple(shape), 0
        self._values = np.empty((most, *shape), np.float32)

    @property
    def most(self) -> int:
        """How many tokens it can have."""
        return len(self._values)

    @property
    def values(self) -> Array:
        """Those of the tokens so far, (length, *shape)."""
        return self._values[: self.length]

    def append(self, new: Array) -> None:
        """Adds those of further tokens."""
        self._values[self.length : self.length + len(new)] = new
        self.length += len(new)


@dataclass(frozen=True)
class Decoder:
    """A model that continues texts.

    Attributes:
        where: the model in messages.
        generation: of its package.
        owner: the SHA-256 of the model file.
        shape: of the cache for a token: (2 * layers, heads, width).
        part: tokens that are read at once.
    """

    where: str
    generation: Generation
    owner: str
    shape: tuple[int, ...]
    part: int = PART

    def cache(self, most: int | None = None) -> Cache:
        """An empty cache for so many tokens, by default those of the context."""
        return Cache(self.owner, self.shape, min(most or self.generation.context, self.generation.context))

    def require_prompt(self, tokens: Sequence[int]) -> int:
        """How many tokens may follow a prompt; raises a RequestError if it is empty or leaves no room for one."""
        context = self.generation.context
        if not tokens:
            raise RequestError("prompt", "has no token", expected="a text")
        if len(tokens) >= context:
            raise self.generation.too_long(f"{len(tokens):,} tokens")
        return min(context - len(tokens), self.generation.most)

    def feeds(self, tokens: Sequence[int], cache: Cache) -> dict[str, Array]:
        """What the graph is fed for tokens behind those of a cache.

        Raises:
            PackageError: the cache is that of another model.
            RequestError: the tokens do not fit it.
        """
        if (cache.owner, cache.shape) != (self.owner, self.shape):
            raise PackageError(
                self.where, f"is asked with the cache of model {cache.owner[:12]}, {list(cache.shape)} for a token",
                expected=f"one of model {self.owner[:12]}, {list(self.shape)}", remedy="read the text again",
            )  # fmt: skip
        if cache.length + len(tokens) > cache.most:
            raise RequestError("prompt", f"{cache.length + len(tokens):,} tokens", expected=f"{cache.most:,} at most")
        return {TOKENS: np.array([tokens], np.int64), PAST: cache.values[None]}

    def take(self, outputs: Mapping[str, Array], cache: Cache) -> Read:
        """What the graph answered, and appends to the cache.

        Raises:
            PackageError: the logits are not numbers.
        """
        (logits,) = outputs[LOGITS]
        # Infinity minus itself is no lead either.
        if not np.isfinite(logits).all():
            raise PackageError(
                self.where, f"has no logits behind {cache.length:,} tokens: {np.count_nonzero(~np.isfinite(logits)):,} "
                "of them are NaN or infinite",
                expected="finite numbers", remedy="export the model again, or train it without overflow",
            )  # fmt: skip
        cache.append(outputs[NEW][0])
        token = int(logits.argmax())
        lead = float(logits[token] - np.partition(logits, -2)[-2]) if len(logits) > 1 else np.inf
        return Read(logits, token, lead)

    def read(self, run: Run, tokens: Sequence[int], cache: Cache) -> Read:
        """Reads tokens in parts; returns what the model says behind the last one."""
        for part in self.parts(tokens):
            said = self.take(run(self.feeds(part, cache)), cache)
        return said

    def parts(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """A prompt in parts."""
        for begin in range(0, len(tokens), self.part):
            yield tokens[begin : begin + self.part]

    def greedy(self, run: Run, prompt: Sequence[int], most: int | None = None) -> Iterator[Read]:
        """The likeliest tokens behind a prompt, to the end of the text or of the room for it.

        The token that ends the text is the last one.
        """
        room = self.require_prompt(prompt)
        room = room if most is None else min(most, room)
        cache = self.cache(len(prompt) + room)
        fed = list(prompt)
        for _ in range(room):
            said = self.read(run, fed, cache)
            yield said
            if said.token in self.generation.end:
                return
            fed = [said.token]
