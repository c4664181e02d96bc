"""The work of one decoder call, from the model's sizes alone: bytes read, operations, and numbers written."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.distill.decoder.weights import BITS, BLOCK
from isthmus.distill.language.decoding import Precision
from isthmus.features.errors import ConfigurationError, Problem

_NODES, _NODES_PER_LAYER = 23, 38
"""Operators of the graph after ONNX Runtime's fusions."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama: `heads` query heads and `shared` key and value heads, each `head` wide.

    `inner` is the feed-forward width. `tied` is True if the embeddings are also the output layer's weights.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    shared: int
    head: int
    inner: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> "Sizes":
        if (kind := config.get("model_type")) != "llama":
            raise ConfigurationError(
                where,
                [Problem("model_type", f"is {kind}", "llama, the only one that can decode")],
            )
        width, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            vocabulary=config["vocab_size"], width=width, layers=config["num_hidden_layers"], heads=heads,
            shared=config.get("num_key_value_heads") or heads, head=config.get("head_dim") or width // heads,
            inner=config["intermediate_size"], tied=config.get("tie_word_embeddings", False),
        )  # fmt: skip

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.shared * self.head

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        queries, width = self.queries, self.width
        return (width, queries + 2 * self.keys), (queries, width), (width, 2 * self.inner), (self.inner, width)

    @property
    def matrices(self) -> int:
        return self.layers * sum(takes * gives for takes, gives in self.products)

    @property
    def nodes(self) -> int:
        return _NODES + _NODES_PER_LAYER * self.layers

    def layer_bytes(self, precision: Precision) -> int:
        return self.layers * sum(matrix_bytes(takes, gives, precision) for takes, gives in self.products)

    def head_bytes(self, precision: Precision) -> int:
        return matrix_bytes(self.width, self.vocabulary, precision)

    def cache_bytes(self, past: int) -> int:
        return 4 * past * 2 * self.layers * self.keys

    def flops(self, tokens: int, past: int) -> int:
        attention = 2 * (past + tokens) * self.layers * self.queries
        return 2 * (tokens * (self.matrices + attention) + self.width * self.vocabulary)

    def bytes(self, precision: Precision, past: int) -> int:
        return self.layer_bytes(precision) + self.head_bytes(precision) + self.cache_bytes(past)

    def numbers(self, tokens: int, past: int) -> int:
        width, queries, keys, every = self.width, self.queries, self.keys, past + tokens
        residuals = 6 * width  # two norms, two products, two sums
        turns = (queries + 2 * keys) * 2 + (queries + keys) * 13 // 2  # the product; split, turned, split again
        mixed = 4 * queries  # scaled, transposed, summed, transposed
        inner = 6 * self.inner  # the product, split, the gate, both
        each = tokens * (residuals + turns + mixed + inner + 2 * keys)
        layer = each + 2 * keys * (past + every) + 3 * self.heads * tokens * every
        return self.layers * layer + tokens * (width + 2 * self.head) + 2 * width + self.vocabulary


def matrix_bytes(input_width: int, output_width: int, precision: Precision) -> int:
    if precision == "fp32":
        return 4 * input_width * output_width
    bits, blocks = BITS[precision], -(-input_width // BLOCK)
    return output_width * (blocks * BLOCK * bits // 8 + 4 * blocks + -(-blocks * bits // 8))
