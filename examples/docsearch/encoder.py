"""Text encoders: the student, its initialization from the teacher, and its graph."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize, scaled_dot_product_attention
from transformers import BertModel
from transformers.modeling_outputs import BaseModelOutput

from isthmus.teachers import pooled

Array = np.ndarray[Any, Any]
OPSET = 20


class Embedder(nn.Module):
    """Embeds texts as vectors of length 1.

    Args:
        encoder: a model of transformers, or an `Encoder`.
        head: module applied to the mean of the last states; the identity by default.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head or nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed tokens (n, positions) with a mask that is 1 at real tokens, both int64, as (n, width)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        # Normalize in float32: under autocast the length would be off by a thousandth.
        return normalize(self.head(pooled(states, attention_mask)).float(), dim=-1)


class Layer(nn.Module):
    """A BERT layer with any number of heads and inner units, which `BertConfig` does not allow."""

    def __init__(self, width: int, heads: int, head_width: int, inner: int, epsilon: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.attention = nn.Linear(width, 3 * heads * head_width)
        self.mixed = nn.Linear(heads * head_width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width, eps=epsilon) for _ in range(2)])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Transform states (n, positions, width) with a mask (n, 1, 1, positions) that is true at real tokens."""
        rows, positions, _ = states.shape
        parts = self.attention(states).view(rows, positions, 3 * self.heads, self.head_width).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=1)
        heads = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        states = self.norms[0](states + self.mixed(heads.transpose(1, 2).reshape(rows, positions, -1)))
        return self.norms[1](states + self.down(gelu(self.up(states))))


class Encoder(nn.Module):
    """A smaller BERT with the vocabulary of a larger one.

    Args:
        places: row of the embedding table for each token of the vocabulary, (tokens,); several tokens may share a row.
        rank: width of token embeddings; a linear layer maps them to `width`.
        width: width of the states.
        positions: maximum tokens of a text.
        layers: encoder layers.
        epsilon: epsilon of the first normalization.
    """

    places: Tensor

    def __init__(
        self, places: Tensor, *, rank: int, width: int, positions: int, layers: Sequence[Layer], epsilon: float
    ) -> None:
        super().__init__()
        self.register_buffer("places", places)
        self.tokens, self.matrix = nn.Embedding(int(places.max()) + 1, rank), nn.Linear(rank, width)
        self.positions = nn.Embedding(positions, width)
        self.norm, self.layers = nn.LayerNorm(width, eps=epsilon), nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> BaseModelOutput:
        """Return the last states, (n, positions, width), for tokens and mask, int64 (n, positions)."""
        tokens = self.matrix(self.tokens(self.places[input_ids]))
        states = self.norm(tokens + self.positions.weight[: input_ids.shape[1]])
        mask = (attention_mask != 0)[:, None, None, :]
        for layer in self.layers:
            states = layer(states, mask)
        return BaseModelOutput(last_hidden_state=states)


class Pairs(nn.Module):
    """Embeds questions and passages with one embedder."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(
        self, question: Tensor, question_mask: Tensor, passage: Tensor, passage_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors of questions and passages."""
        return self.embedder(question, question_mask), self.embedder(passage, passage_mask)


def student(
    teacher: BertModel, *, rank: int, layers: Sequence[int], inner: int, positions: int, counts: Array,
    heads: int | None = None, vocabulary: int | None = None,
) -> Embedder:  # fmt: skip
    """Return a smaller BERT, initialized with parts of the teacher.

    Args:
        teacher: source of layers and width.
        rank: width of token embeddings; a linear layer maps them to the teacher's width.
        layers: indices of the teacher's layers to copy.
        inner: units of each feed-forward part; the teacher's units with the largest weights are copied.
        positions: maximum tokens of a text.
        counts: frequency of each token, (tokens,).
        heads: attention heads per layer, chosen like the inner units; None for all.
        vocabulary: number of tokens with their own embedding, the most frequent ones; every other token uses the
            embedding whose direction in the teacher is nearest. None for all.
    """
    config, source = teacher.config, teacher.embeddings
    table = source.word_embeddings.weight.detach()
    kept = np.sort(np.argsort(-counts, kind="stable")[:vocabulary])
    own = Encoder(
        nearest_kept(table, torch.from_numpy(kept)), rank=rank, width=config.hidden_size, positions=positions,
        layers=[_narrowed(teacher, place, heads or config.num_attention_heads, inner) for place in layers],
        epsilon=config.layer_norm_eps,
    )  # fmt: skip
    head = nn.Linear(config.hidden_size, config.hidden_size)
    with torch.no_grad():
        tokens, matrix = factorised(table[kept], counts[kept], rank)
        own.tokens.weight.copy_(tokens)
        own.matrix.weight.copy_(matrix)
        # All tokens of a text are of the first type.
        own.matrix.bias.copy_(source.token_type_embeddings.weight[0])
        own.positions.weight.copy_(source.position_embeddings.weight[:positions])
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    own.norm.load_state_dict(source.LayerNorm.state_dict())
    return Embedder(own, head)


def nearest_kept(embeddings: Tensor, kept: Tensor) -> Tensor:
    """Return for each embedding, (tokens, width), the index into `kept` of the embedding with the nearest direction."""
    unit = normalize(embeddings, dim=1)
    places = torch.cat([(part @ unit[kept].T).argmax(1) for part in unit.split(2048)])
    places[kept] = torch.arange(len(kept))
    return places


def factorised(embeddings: Tensor, counts: Array, rank: int) -> tuple[Tensor, Tensor]:
    """Factorize embeddings into two matrices, with errors weighted by token frequency.

    Args:
        embeddings: matrix (tokens, width).
        counts: token frequencies, (tokens,); one is added to each, so that every token has a weight.
        rank: inner dimension.

    Returns:
        Matrices (tokens, rank) and (width, rank).
    """
    table = embeddings.detach()
    weights = torch.from_numpy(counts + 1.0)[:, None]
    _, directions = torch.linalg.eigh((table.double() * weights).T @ table.double())
    kept = directions.flip(1)[:, :rank].float()
    return table @ kept, kept


def _narrowed(teacher: BertModel, place: int, heads: int, inner: int) -> Layer:
    """Return a layer of the teacher reduced to the heads and inner units with the largest weights."""
    config, whole = teacher.config, teacher.encoder.layer[place]
    own_width = config.hidden_size // config.num_attention_heads
    layer = Layer(config.hidden_size, heads, own_width, inner, config.layer_norm_eps)
    attention, mixed = whole.attention.self, whole.attention.output.dense
    up, down = whole.intermediate.dense, whole.output.dense
    with torch.no_grad():
        by_head = attention.value.weight.view(config.num_attention_heads, -1)
        out = mixed.weight.T.reshape(config.num_attention_heads, -1)
        chosen = (by_head.norm(dim=1) * out.norm(dim=1)).topk(heads).indices.sort().values
        rows = (chosen[:, None] * own_width + torch.arange(own_width)).flatten()
        parts = (attention.query, attention.key, attention.value)
        layer.attention.weight.copy_(torch.cat([part.weight[rows] for part in parts]))
        layer.attention.bias.copy_(torch.cat([part.bias[rows] for part in parts]))
        layer.mixed.weight.copy_(mixed.weight[:, rows])
        layer.mixed.bias.copy_(mixed.bias)
        units = (up.weight.norm(dim=1) * down.weight.norm(dim=0)).topk(inner).indices.sort().values
        layer.up.weight.copy_(up.weight[units])
        layer.up.bias.copy_(up.bias[units])
        layer.down.weight.copy_(down.weight[:, units])
        layer.down.bias.copy_(down.bias)
    for ours, theirs in zip(layer.norms, (whole.attention.output.LayerNorm, whole.output.LayerNorm), strict=True):
        ours.load_state_dict(theirs.state_dict())
    return layer


def _longest(encoder: nn.Module) -> int:
    """Return the maximum number of tokens of a text."""
    if isinstance(encoder, Encoder):
        return encoder.positions.num_embeddings
    assert isinstance(encoder, BertModel)  # noqa: S101 - for mypy
    return int(encoder.config.max_position_embeddings)


def exported(embedder: Embedder) -> onnx.ModelProto:
    """Export an embedder: `input_ids` and `attention_mask`, int64 (N, P), to `vector`, float32 (N, width)."""
    # Two tensors, because the exporter merges two inputs that are the same tensor.
    tokens, mask = (torch.ones((2, 8), dtype=torch.int64) for _ in range(2))
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("P", max=_longest(embedder.encoder))}
    # The exporter logs hints about other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # emitted by the exporter itself
        program = torch.onnx.export(
            embedder.eval(), (tokens, mask), dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
            dynamic_shapes=(sizes, sizes), input_names=["input_ids", "attention_mask"], output_names=["vector"],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - never None with dynamo
    return program.model_proto
