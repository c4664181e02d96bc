"""Encoders of texts: the student's, and what makes pairs of vectors of any."""

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
    """Texts as vectors of length 1.

    Args:
        encoder: a model of transformers, or an `Encoder`.
        head: what is done to the mean of its last states.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head or nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Of int64 (n, positions), 1 in the mask where a position counts, (n, width)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        # Under autocast a length of bf16 would be off by a thousandth.
        return normalize(self.head(pooled(states, attention_mask)).float(), dim=-1)


class Layer(nn.Module):
    """A layer of BERT with fewer heads and inner units than its width asks for, which `BertConfig` does not allow."""

    def __init__(self, width: int, heads: int, head_width: int, inner: int, epsilon: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, head_width
        self.attention = nn.Linear(width, 3 * heads * head_width)
        self.mixed = nn.Linear(heads * head_width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width, eps=epsilon) for _ in range(2)])

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Of (n, positions, width) and a mask (n, 1, 1, positions), true where a position counts."""
        rows, positions, _ = states.shape
        parts = self.attention(states).view(rows, positions, 3 * self.heads, self.head_width).transpose(1, 2)
        query, key, value = parts.chunk(3, dim=1)
        heads = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        states = self.norms[0](states + self.mixed(heads.transpose(1, 2).reshape(rows, positions, -1)))
        return self.norms[1](states + self.down(gelu(self.up(states))))


class Encoder(nn.Module):
    """A smaller BERT that reads the tokens of a larger one.

    Args:
        places: (tokens of the larger,), the place in the table below of each; tokens without one of their own share.
        rank: width of the embedding of a token, from which a matrix makes the width of the states.
        width: of the states.
        positions: most tokens of a text.
        layers: of the encoder.
        epsilon: of the first normalization.
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
        """Of int64 (n, positions), the last states (n, positions, width)."""
        tokens = self.matrix(self.tokens(self.places[input_ids]))
        states = self.norm(tokens + self.positions.weight[: input_ids.shape[1]])
        mask = (attention_mask != 0)[:, None, None, :]
        for layer in self.layers:
            states = layer(states, mask)
        return BaseModelOutput(last_hidden_state=states)


class Pairs(nn.Module):
    """Questions and passages as vectors, by one embedder."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, question: Tensor, asked: Tensor, passage: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the questions, tokens and mask of the passages."""
        return self.embedder(question, asked), self.embedder(passage, said)


def student(
    teacher: BertModel, *, rank: int, layers: Sequence[int], inner: int, positions: int, counts: Array,
    heads: int | None = None, vocabulary: int | None = None,
) -> Embedder:  # fmt: skip
    """A smaller BERT that begins with what its teacher has.

    Args:
        teacher: whose layers are taken, and whose width is kept.
        rank: width of the embedding of a token, from which a matrix makes the width of the states.
        layers: of the teacher, that it begins with.
        inner: units of the feed-forward part of each layer: those of the teacher that have the largest weights.
        positions: most tokens of a text.
        counts: (tokens,) how often each token is met.
        heads: of each layer, likewise; None for all.
        vocabulary: tokens with an embedding of their own, those that are met most often; the others take that of the
            token whose embedding in the teacher has the nearest direction. None for all.
    """
    config, theirs = teacher.config, teacher.embeddings
    table = theirs.word_embeddings.weight.detach()
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
        own.matrix.bias.copy_(theirs.token_type_embeddings.weight[0])
        own.positions.weight.copy_(theirs.position_embeddings.weight[:positions])
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    own.norm.load_state_dict(theirs.LayerNorm.state_dict())
    return Embedder(own, head)


def nearest_kept(embeddings: Tensor, kept: Tensor) -> Tensor:
    """For each of (tokens, width) embeddings, the place among those kept of the one with the nearest direction."""
    unit = normalize(embeddings, dim=1)
    places = torch.cat([(part @ unit[kept].T).argmax(1) for part in unit.split(2048)])
    places[kept] = torch.arange(len(kept))
    return places


def factorised(embeddings: Tensor, counts: Array, rank: int) -> tuple[Tensor, Tensor]:
    """Two matrices whose product is nearest to embeddings, each weighed by how often its token is met.

    Args:
        embeddings: (tokens, width).
        counts: (tokens,), to each of which one is added, so that none is worth nothing.
        rank: width between the two.

    Returns:
        (tokens, rank) and (width, rank).
    """
    table = embeddings.detach()
    weights = torch.from_numpy(counts + 1.0)[:, None]
    _, directions = torch.linalg.eigh((table.double() * weights).T @ table.double())
    kept = directions.flip(1)[:, :rank].float()
    return table @ kept, kept


def _narrowed(teacher: BertModel, place: int, heads: int, inner: int) -> Layer:
    """A layer of the teacher with the heads and inner units of the largest weights, in and out."""
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
    """Most tokens of a text."""
    if isinstance(encoder, Encoder):
        return encoder.positions.num_embeddings
    assert isinstance(encoder, BertModel)  # noqa: S101 - there are no others
    return int(encoder.config.max_position_embeddings)


def exported(embedder: Embedder) -> onnx.ModelProto:
    """The graph of an embedder: `input_ids` and `attention_mask`, int64 (N, P), to `vector`, float32 (N, width)."""
    # Two tensors: of one that is given twice the exporter makes one input.
    tokens, mask = (torch.ones((2, 8), dtype=torch.int64) for _ in range(2))
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("P", max=_longest(embedder.encoder))}
    # It says what it could do for networks of other libraries.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(
            embedder.eval(), (tokens, mask), dynamo=True, opset_version=OPSET, verbose=False, external_data=False,
            dynamic_shapes=(sizes, sizes), input_names=["input_ids", "attention_mask"], output_names=["vector"],
        )  # fmt: skip
    assert program is not None  # noqa: S101 - with dynamo
    return program.model_proto
