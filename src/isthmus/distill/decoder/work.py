"""What decoding takes: the bytes, operations and numbers of a call of the graph, from a model's sizes alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus.distill.decoder.weights import BITS, BLOCK
from isthmus.distill.language.decoding import Precision
from isthmus.features.errors import ConfigurationError, Problem

_NODES, _NODES_PER_LAYER = 23, 38
"""Of the graph as ONNX Runtime computes it, with what it fuses."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama.

    Attributes:
        vocabulary: tokens.
        width: of what layers pass on.
        layers: of the model.
        heads: of the queries.
        shared: heads of keys and values.
        head: width of a head.
        inner: width between the two products of a layer's second half.
        tied: whether the embeddings are the head's weights, too.
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
        """Those of a `config.json`; a ConfigurationError if it is of another architecture, which does not decode."""
        if (kind := config.get("model_type")) != "llama":
            raise ConfigurationError(where, [Problem("model_type", f"is {kind}", "llama: other models do not decode")])
        width, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            vocabulary=config["vocab_size"], width=width, layers=config["num_hidden_layers"], heads=heads,
            shared=config.get("num_key_value_heads") or heads, head=config.get("head_dim") or width // heads,
            inner=config["intermediate_size"], tied=config.get("tie_word_embeddings", False),
        )  # fmt: skip

    @property
    def queries(self) -> int:
        """Numbers of all queries of a token."""
        return self.heads * self.head

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token, and of all values."""
        return self.shared * self.head

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Of a layer's matrices, what they take and give."""
        queries, width = self.queries, self.width
        return (width, queries + 2 * self.keys), (queries, width), (width, 2 * self.inner), (self.inner, width)

    @property
    def parameters(self) -> int:
        """All weights."""
        tables = self.vocabulary * self.width * (1 if self.tied else 2)
        return self.matrices + self.layers * 2 * self.width + self.width + tables

    @property
    def matrices(self) -> int:
        """Weights of the matrices of all layers."""
        return self.layers * sum(takes * gives for takes, gives in self.products)

    @property
    def nodes(self) -> int:
        """Operators that a call launches."""
        return _NODES + _NODES_PER_LAYER * self.layers

    def layer_bytes(self, precision: Precision) -> int:
        """Bytes of the matrices of all layers, all of which a call reads."""
        return self.layers * sum(matrix_bytes(takes, gives, precision) for takes, gives in self.products)

    def head_bytes(self, precision: Precision) -> int:
        """Bytes of the last matrix, which a call reads for its last token alone."""
        return matrix_bytes(self.width, self.vocabulary, precision)

    def cache_bytes(self, past: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        return 4 * past * 2 * self.layers * self.keys

    def flops(self, tokens: int, past: int) -> int:
        """Operations of a call's products, two for each multiplication with its addition, those of attention too."""
        attention = 2 * (past + tokens) * self.layers * self.queries
        return 2 * (tokens * (self.matrices + attention) + self.width * self.vocabulary)

    def bytes(self, precision: Precision, past: int) -> int:
        """Bytes that a call reads: weights and cache."""
        return self.layer_bytes(precision) + self.head_bytes(precision) + self.cache_bytes(past)

    def numbers(self, tokens: int, past: int) -> int:
        """Floats that the operators of a call write, copies of the cache included."""
        width, queries, keys, every = self.width, self.queries, self.keys, past + tokens
        residuals = 6 * width  # two norms, two products, two sums
        turns = (queries + 2 * keys) * 2 + (queries + keys) * 13 // 2  # the product; split, turned, split again
        mixed = 4 * queries  # scaled, transposed, summed, transposed
        inner = 6 * self.inner  # the product, split, the gate, both
        each = tokens * (residuals + turns + mixed + inner + 2 * keys)
        layer = each + 2 * keys * (past + every) + 3 * self.heads * tokens * every
        return self.layers * layer + tokens * (width + 2 * self.head) + 2 * width + self.vocabulary


def matrix_bytes(takes: int, gives: int, precision: Precision) -> int:
    """Bytes of a matrix: floats, or whole numbers in blocks along what it takes, with scales and zero points."""
    if precision == "fp32":
        return 4 * takes * gives
    bits, blocks = BITS[precision], -(-takes // BLOCK)
    return gives * (blocks * BLOCK * bits // 8 + 4 * blocks + -(-blocks * bits // 8))
