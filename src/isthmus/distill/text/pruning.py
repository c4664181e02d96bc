"""Students that are cut from a BERT: copied layers, with fewer heads, units and embeddings of tokens."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from isthmus.distill.language.text import Encoder, PrunedEncoder, Text
from isthmus.distill.settings import failed_checks
from isthmus.distill.text.students import BertForm, EncoderNetwork
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from transformers import BertModel, PretrainedConfig, PreTrainedModel
    from transformers.models.bert.modeling_bert import BertLayer


def prune(
    teacher: "PreTrainedModel", text: Text, declared: PrunedEncoder, counts: Array, where: str, *, first: bool
) -> EncoderNetwork:
    """Cut a student from a BERT, without its head; the student's layer `last` copies its input.

    Args:
        teacher: a model of transformers.
        text: declaration of the task, with the number of tokens and the dropout.
        declared: parts of the teacher to keep.
        counts: frequency of each token of the tokenizer, (tokens,). If the teacher's embeddings are padded to more
            rows, the others are left out.
        where: place for messages.
        first: True if the student uses the last state of the first token, False for the mean.

    Raises:
        ConfigurationError: the teacher is not a BERT, or has less than `declared` keeps.
    """
    config = teacher.config
    if config.model_type != "bert" or config.hidden_act != "gelu":
        found = f"a {type(teacher).__name__} with {getattr(config, 'hidden_act', 'another activation')}"
        remedy = "use an Encoder, which any teacher can teach"
        raise ConfigurationError(where, [Problem("teacher", found, "a BERT with gelu")], remedy=remedy)
    _require_parts(declared, config, len(counts), text.tokens, where)
    body: BertModel = teacher.base_model
    source = body.embeddings
    kept = np.sort(np.argsort(-counts, kind="stable")[: declared.vocabulary])
    student = Encoder(
        layers=len(declared.layers), width=config.hidden_size, heads=declared.heads or config.num_attention_heads,
        inner=declared.inner or config.intermediate_size, rank=declared.rank,
    )  # fmt: skip
    form = BertForm(len(counts), config.hidden_size // config.num_attention_heads, config.layer_norm_eps, first)
    network = EncoderNetwork(len(kept), student, text.tokens, config.hidden_size, text.dropout, form)
    with torch.no_grad():
        table = source.word_embeddings.weight[: len(counts)].float()
        weights = {"places": nearest_kept(table, torch.from_numpy(kept)), "tokens.weight": table[kept]}
        if declared.rank is not None:
            weights["tokens.weight"], weights["widened.weight"] = factorized(table[kept], counts[kept], declared.rank)
        # All tokens of a text are of the first type.
        positions = source.position_embeddings.weight[: text.tokens]
        weights["positions.weight"] = positions + source.token_type_embeddings.weight[0]
        weights |= {"last.weight": torch.eye(config.hidden_size), "last.bias": torch.zeros(config.hidden_size)}
        weights |= {f"norm.{name}": value for name, value in source.LayerNorm.state_dict().items()}
        for number, place in enumerate(declared.layers):
            layer = _pruned_layer(body.encoder.layer[place], config.num_attention_heads, student)
            weights |= {f"layers.{number}.{name}": value for name, value in layer.items()}
    network.load_state_dict({**network.state_dict(), **weights})
    return network


def nearest_kept(embeddings: Tensor, kept: Tensor) -> Tensor:
    """Return for each embedding, (tokens, width), the index into `kept` of the embedding with the nearest direction."""
    unit = normalize(embeddings, dim=1)
    places = torch.cat([(part @ unit[kept].T).argmax(1) for part in torch.split(unit, 2048)])
    places[kept] = torch.arange(len(kept))
    return places


def factorized(embeddings: Tensor, counts: Array, rank: int) -> tuple[Tensor, Tensor]:
    """Factorize embeddings, (tokens, width), into matrices (tokens, rank) and (width, rank) with the least error.

    The squared error of a token is weighted by its frequency in `counts`, (tokens,), plus one.
    """
    table = embeddings.double()
    _, directions = torch.linalg.eigh((table * torch.from_numpy(counts + 1.0)[:, None]).T @ table)
    kept = directions.flip(1)[:, :rank].float()
    return embeddings @ kept, kept


def _pruned_layer(layer: "BertLayer", heads: int, student: Encoder) -> dict[str, Tensor]:
    """Return the weights of an `EncoderLayer`: of the heads and units of a layer that have the largest weights."""
    attention, mixed, up, down = layer.attention.self, layer.attention.output, layer.intermediate.dense, layer.output
    parts = (attention.query, attention.key, attention.value)
    pairs = attention.value.weight.view(heads, -1), mixed.dense.weight.T.reshape(heads, -1)
    largest = (pairs[0].norm(dim=1) * pairs[1].norm(dim=1)).topk(student.heads).indices.sort().values
    rows = torch.arange(len(attention.value.weight)).view(heads, -1)[largest].flatten()
    units = (up.weight.norm(dim=1) * down.dense.weight.norm(dim=0)).topk(student.inner).indices.sort().values
    return {
        "attention.weight": torch.cat([part.weight[rows] for part in parts]),
        "attention.bias": torch.cat([part.bias[rows] for part in parts]),
        "mixed.weight": mixed.dense.weight[:, rows],
        "mixed.bias": mixed.dense.bias,
        "up.weight": up.weight[units],
        "up.bias": up.bias[units],
        "down.weight": down.dense.weight[:, units],
        "down.bias": down.dense.bias,
        **{f"norms.0.{name}": value for name, value in mixed.LayerNorm.state_dict().items()},
        **{f"norms.1.{name}": value for name, value in down.LayerNorm.state_dict().items()},
    }


def _require_parts(declared: PrunedEncoder, config: "PretrainedConfig", words: int, tokens: int, where: str) -> None:
    most = {
        "heads": config.num_attention_heads, "inner": config.intermediate_size, "rank": config.hidden_size,
        "vocabulary": words,
    }  # fmt: skip
    checks = [(name, (getattr(declared, name) or 0) <= most, f"at most {most:,}, as in the teacher")
              for name, most in most.items()]  # fmt: skip
    last = config.num_hidden_layers - 1
    problems = failed_checks(declared, where, [("layers", max(declared.layers) <= last, f"0 to {last}"), *checks])
    if tokens > config.max_position_embeddings:
        problems.append(Problem(f"{where}: tokens", f"{tokens}", f"at most {config.max_position_embeddings}"))
    if problems:
        raise ConfigurationError(where, problems)
