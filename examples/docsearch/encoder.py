"""Encoders of texts: the student's, and what makes pairs of vectors of any."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel
from transformers.models.bert.modeling_bert import BertLayer

from isthmus.distill.losses import drop_layers
from isthmus.distill.teachers.pretrained import pooled

Array = np.ndarray[Any, Any]
OPSET = 20


class Embedder(nn.Module):
    """Texts as vectors of length 1.

    Args:
        encoder: a model of transformers.
        head: what is done to the mean of its last states.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head or nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Of int64 (n, positions), 1 in the mask where a position counts, (n, width)."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return normalize(self.head(pooled(states, attention_mask)), dim=-1)


class Pairs(nn.Module):
    """Questions and passages as vectors, by one embedder."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__()
        self.embedder = embedder

    def forward(self, question: Tensor, asked: Tensor, passage: Tensor, said: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the questions, tokens and mask of the passages."""
        return self.embedder(question, asked), self.embedder(passage, said)


def student(
    teacher: BertModel, *, rank: int, layers: Sequence[int], inner: int, positions: int, counts: Array
) -> Embedder:
    """A smaller BERT that begins with what its teacher has.

    Args:
        teacher: whose layers are taken, and whose width is kept.
        rank: width of the embedding of a token, from which a matrix makes the width of the states.
        layers: of the teacher, that it begins with.
        inner: units of the feed-forward part of each layer: those of the teacher that have the largest weights.
        positions: most tokens of a text.
        counts: (tokens,) how often each token is met.
    """
    config = BertConfig(**{
        **teacher.config.to_dict(), "num_hidden_layers": len(layers), "intermediate_size": inner,
        "max_position_embeddings": positions, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    })  # fmt: skip
    own = BertModel(config, add_pooling_layer=False)
    width = config.hidden_size
    tokens, matrix = nn.Embedding(config.vocab_size, rank), nn.Linear(rank, width, bias=False)
    head = nn.Linear(width, width)
    theirs, ours = teacher.embeddings, own.embeddings
    with torch.no_grad():
        for weights, factor in zip(
            (tokens, matrix), factorised(theirs.word_embeddings.weight, counts, rank), strict=True
        ):
            weights.weight.copy_(factor)
        ours.position_embeddings.weight.copy_(theirs.position_embeddings.weight[:positions])
        nn.init.eye_(head.weight)
        nn.init.zeros_(head.bias)
    ours.word_embeddings = nn.Sequential(tokens, matrix)
    narrow = nn.ModuleList([_narrowed(teacher, place, inner) for place in layers])
    pairs: dict[str, tuple[nn.Module, nn.Module]] = {
        "types": (theirs.token_type_embeddings, ours.token_type_embeddings),
        "normalization": (theirs.LayerNorm, ours.LayerNorm),
    }
    drop_layers(narrow, own.encoder.layer, "first", pairs=pairs)
    return Embedder(own, head)


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


def _narrowed(teacher: BertModel, place: int, inner: int) -> nn.Module:
    """A layer of the teacher with the inner units of the largest weights, in and out."""
    config = BertConfig(**{**teacher.config.to_dict(), "intermediate_size": inner})
    layer = BertLayer(config)
    whole = teacher.encoder.layer[place].state_dict()
    rise, fall = whole["intermediate.dense.weight"], whole["output.dense.weight"]
    units = (rise.norm(dim=1) * fall.norm(dim=0)).topk(inner).indices.sort().values
    for name in ("intermediate.dense.weight", "intermediate.dense.bias"):
        whole[name] = whole[name][units]
    whole["output.dense.weight"] = fall[:, units]
    layer.load_state_dict(whole)
    return layer


def exported(embedder: Embedder) -> onnx.ModelProto:
    """The graph of an embedder: `input_ids` and `attention_mask`, int64 (N, P), to `vector`, float32 (N, width)."""
    # Two tensors: of one that is given twice the exporter makes one input.
    tokens, mask = (torch.ones((2, 8), dtype=torch.int64) for _ in range(2))
    sizes = {0: torch.export.Dim("N"), 1: torch.export.Dim("P", max=embedder.encoder.config.max_position_embeddings)}
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
