"""A Llama as a torch module with a cache, for torch.export and as the reference for ONNX graphs."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isthmus.features.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

_ROPE = ("default", "linear", "llama3")
"""Rotary embeddings whose angles do not depend on the length of the text."""


class CachedModel(nn.Module):
    """A Llama that returns the logits after some tokens, and the cache entries for the next call.

    It shares the weights of `model`. `context` limits the number of tokens, cached ones included; None keeps the
    model's own limit. It has `heads` query heads and `shared` key and value heads, each `width` wide; `cache` is the
    shape of one token in the cache. Raises a ConfigurationError if the model is not supported (see
    `require_supported`).
    """

    def __init__(self, model: "LlamaForCausalLM", context: int | None = None) -> None:
        super().__init__()
        config: Any = require_supported(model)
        self.body, self.head = model.model, model.lm_head
        self.context = min(context or config.max_position_embeddings, config.max_position_embeddings)
        self.heads = config.num_attention_heads
        pairs, self.shared, self.width = self.cache = cache_shape(config)
        self.layers = pairs // 2
        with torch.no_grad():
            cosine, sine = self.body.rotary_emb(torch.zeros(1), torch.arange(self.context)[None])
        self.register_buffer("cosine", cosine[0], persistent=False)
        self.register_buffer("sine", sine[0], persistent=False)

    @property
    def rotations(self) -> tuple[Tensor, Tensor]:
        return self.get_buffer("cosine"), self.get_buffer("sine")

    def forward(self, tokens: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logits of the token after `tokens`, and the cache entries of `tokens`.

        To generate text, call it again with the next token and with the cache entries of all earlier calls,
        concatenated along axis 1, of at most `context` tokens in all.

        Args:
            tokens: token ids, int64 (1, n).
            past: cache entries of the earlier tokens of the text, float32 (1, earlier tokens, 2 * layers, shared,
                width), where `shared` is the number of key and value heads; empty along axis 1 for a new text.

        Returns:
            The logits, (1, vocabulary), and the cache entries, (1, n, 2 * layers, shared, width).
        """
        tokens, past = tokens[0], past[0]
        count, before = tokens.shape[0], past.shape[0]
        groups = self.heads // self.shared
        places = before + torch.arange(count)
        cosine, sine = (turn[places][:, None] for turn in self.rotations)
        later = torch.arange(before + count)[None, :] > places[:, None]
        values = self.body.embed_tokens(tokens)
        new = []
        for place, layer in enumerate(self.body.layers):
            attention, inner = layer.self_attn, layer.input_layernorm(values)
            query = attention.q_proj(inner).reshape(count, self.heads, self.width)
            key, value = (
                project(inner).reshape(count, self.shared, self.width)
                for project in (attention.k_proj, attention.v_proj)
            )
            query, key = (_rotated(each, cosine, sine) for each in (query, key))
            new += [key, value]
            key = torch.cat([past[:, 2 * place], key]).permute(1, 2, 0)
            value = torch.cat([past[:, 2 * place + 1], value]).permute(1, 0, 2)
            query = (query * self.width**-0.5).reshape(count, self.shared, groups, self.width).permute(1, 2, 0, 3)
            query = query.contiguous().reshape(self.shared, groups * count, self.width)
            scores = (query @ key).reshape(self.shared, groups, count, before + count)
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            weights = weights.reshape(self.shared, groups * count, before + count)
            mixed = (weights @ value).reshape(self.shared, groups, count, self.width).permute(2, 0, 1, 3)
            mixed = mixed.contiguous().reshape(count, self.heads * self.width)
            values = values + attention.o_proj(mixed)
            values = values + layer.mlp(layer.post_attention_layernorm(values))
        return self.head(self.body.norm(values[-1:])), torch.stack(new, 1)[None]


def cache_shape(config: Any) -> tuple[int, int, int]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers, config.num_key_value_heads, width


def require_supported(model: "LlamaForCausalLM", where: str = "decoding") -> Any:
    """Check that packages can run a language model, and return its configuration.

    Packages run a Llama with the activation SiLU, and with rotary embeddings whose angles do not depend on the length
    of the text. Raises a ConfigurationError for all other models; `where` names the declaration in its message.
    """
    config: Any = model.config
    problems = []
    if type(model).__name__ != "LlamaForCausalLM":
        problems.append(Problem("model", f"is a {type(model).__name__}", "a LlamaForCausalLM of transformers"))
    else:
        rope = config.rope_parameters["rope_type"]
        if rope not in _ROPE:
            problems.append(Problem("model", f"has rotations of type {rope}", " or ".join(_ROPE)))
        if config.hidden_act != "silu":
            problems.append(Problem("model", f"has the activation {config.hidden_act}", "silu"))
    if problems:
        raise ConfigurationError(where, problems)
    return config


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-second, first], -1) * sine
