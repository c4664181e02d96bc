"""A causal language model of a few weights, its package, and the oracle of greedy decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus.distill.export.causal import DecodingReport, ModelOrigin, export
from isthmus.distill.language.decoding import DecodingSettings
from isthmus.features.contract.schema import Contract
from tests.serving.support import CONTRACT
from tests.tokenizing import trained

PROMPTS = ("Return the sum of the values.", "Open a file <|end|> and read it: 漢字", "naïve")
SETTINGS = DecodingSettings(prompts=PROMPTS, most=48, golden_tokens=24, agreement={"int8": 0.0, "int4": 0.0})


def tiny(**changes: Any) -> LlamaForCausalLM:
    """A model with random weights, which says something else behind each text."""
    declared: dict[str, Any] = {
        "vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 384, "eos_token_id": 0,
        "bos_token_id": 1, "tie_word_embeddings": True, "initializer_range": 0.15,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = LlamaForCausalLM(LlamaConfig(**{**declared, **changes}))
    return model.eval()


def origin(contract: Contract = CONTRACT, service: str = "late") -> ModelOrigin:
    return ModelOrigin(name="writer", contract=contract, service=service, model="student", training_set="none")


def packaged(folder: Path, settings: DecodingSettings = SETTINGS, **changes: Any) -> DecodingReport:
    return export(tiny(**changes), trained(), folder, origin=origin(), settings=settings)


@torch.inference_mode()
def greedy_naively(model: LlamaForCausalLM, prompt: Sequence[int], most: int) -> list[int]:
    """The likeliest tokens, with the whole text read again for each, up to the one that ends it."""
    tokens, end = [*prompt], model.config.eos_token_id
    while len(tokens) < len(prompt) + most and (tokens[-1] != end or len(tokens) == len(prompt)):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
