"""Generate text with a causal language model: read a prompt in parts, then one token at a time, with a cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.errors import PackageError, RequestError
from isthmus.package.generation.prompt import LOGITS, NEW, PAST, TOKENS, Generation

PART = 256
"""Tokens of a prompt read at once: attention needs memory for each of them times all tokens before it."""

Array = np.ndarray[Any, Any]
Run = Callable[[dict[str, Array]], Mapping[str, Array]]
"""Runs a graph."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of a model after some tokens.

    `logits` has shape (vocabulary,). `token` is the most likely token, and `lead` its logit minus the second highest
    one.
    """

    logits: Array
    token: int
    lead: float


class Cache:
    """Attention keys and values of a text so far, for one model file.

    `owner` is the SHA-256 of the file, and `shape` the shape per token. Memory for `most` tokens is allocated when the
    cache is created, so that a step appends without copying.
    """

    def __init__(self, owner: str, shape: Sequence[int], most: int) -> None:
        self.owner, self.shape, self.length = owner, tuple(shape), 0
        self._values = np.empty((most, *shape), np.float32)

    @property
    def most(self) -> int:
        return len(self._values)

    @property
    def values(self) -> Array:
        return self._values[: self.length]

    def append(self, new: Array) -> None:
        self._values[self.length : self.length + len(new)] = new
        self.length += len(new)


@dataclass(frozen=True)
class Decoder:
    """A language model that continues texts, without the runtime that computes its graph.

    `where` names the model in messages, and `owner` is the SHA-256 of its file. `shape` is the shape of the cache per
    token: (2 * layers, heads, width). `part` is the number of tokens read at once.
    """

    where: str
    generation: Generation
    owner: str
    shape: tuple[int, ...]
    part: int = PART

    def cache(self, most: int | None = None) -> Cache:
        return Cache(self.owner, self.shape, min(most or self.generation.context, self.generation.context))

    def require_prompt(self, tokens: Sequence[int]) -> int:
        context = self.generation.context
        if not tokens:
            raise RequestError("prompt", "has no tokens", expected="a text")
        if len(tokens) >= context:
            raise self.generation.too_long(f"{len(tokens):,} tokens")
        return min(context - len(tokens), self.generation.most)

    def feeds(self, tokens: Sequence[int], cache: Cache) -> dict[str, Array]:
        if (cache.owner, cache.shape) != (self.owner, self.shape):
            raise PackageError(
                self.where, f"got the cache of model {cache.owner[:12]}, with {list(cache.shape)} per token",
                expected=f"a cache of model {self.owner[:12]}, {list(self.shape)}", remedy="read the text again",
            )  # fmt: skip
        if cache.length + len(tokens) > cache.most:
            raise RequestError("prompt", f"{cache.length + len(tokens):,} tokens", expected=f"{cache.most:,} at most")
        return {TOKENS: np.array([tokens], np.int64), PAST: cache.values[None]}

    def take(self, outputs: Mapping[str, Array], cache: Cache) -> StepOutput:
        (logits,) = outputs[LOGITS]
        # Infinite logits have no lead: infinity minus itself is NaN.
        if not np.isfinite(logits).all():
            raise PackageError(
                self.where, f"has {np.count_nonzero(~np.isfinite(logits)):,} logits that are NaN or infinite after "
                f"{cache.length:,} tokens",
                expected="finite numbers", remedy="export the model again, or train it without overflow",
            )  # fmt: skip
        cache.append(outputs[NEW][0])
        token = int(logits.argmax())
        lead = float(logits[token] - np.partition(logits, -2)[-2]) if len(logits) > 1 else np.inf
        return StepOutput(logits, token, lead)

    def read(self, run: Run, tokens: Sequence[int], cache: Cache) -> StepOutput:
        """Run the model on tokens that follow the tokens in `cache`, and return the output after the last one.

        Needs at least one token. Adds the tokens to `cache`. `run` computes the graph of the model. Long inputs are
        computed in parts of limited size. Raises RequestError if the cache is too small. Raises PackageError if the
        cache belongs to another model, or if a logit is NaN or infinite. After an error, earlier parts stay in the
        cache.
        """
        for part in self.parts(tokens):
            output = self.take(run(self.feeds(part, cache)), cache)
        return output

    def parts(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        for begin in range(0, len(tokens), self.part):
            yield tokens[begin : begin + self.part]

    def greedy(self, run: Run, prompt: Sequence[int], most: int | None = None) -> Iterator[StepOutput]:
        """Continue a prompt with the most likely token at each step; yield the output for each new token.

        `run` computes the graph of the model. Ends after a token that ends the text, or after `most` tokens. The limit
        in the package's settings always applies. Raises RequestError if the prompt is empty or fills the context, and
        PackageError if a logit is NaN or infinite.
        """
        room = self.require_prompt(prompt)
        room = room if most is None else min(most, room)
        cache = self.cache(len(prompt) + room)
        fed = list(prompt)
        for _ in range(room):
            output = self.read(run, fed, cache)
            yield output
            if output.token in self.generation.end:
                return
            fed = [output.token]
