"""Texts of two kinds, a tokenizer of them, and a small model that has learned one of them."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from isthmus.distill.accelerator import threads
from isthmus.distill.causal.network import Packed, losses
from isthmus.distill.causal.texts import pack
from isthmus.distill.declaration import Distillation
from isthmus.distill.language.causal import Causal
from isthmus.distill.settings import Settings
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.features.definition.spec import FeatureService, Field, Spine
from isthmus.features.profiles import TrainingProfile
from isthmus.features.types import Int64, String
from isthmus.package.inputs import ModelInput

END = "<|end|>"
HERE = "tests.distill.causal.support"
PROFILE = TrainingProfile(epochs=2, batch=16, threads=1)
ANIMALS, ACTS, PLACES = ("fox", "crow", "hare", "pike"), ("sees", "hears", "fears", "eats"), ("hill", "lake", "wood")
TYPES, NAMES, CALLS = ("int", "str", "list", "dict"), ("rows", "keys", "value", "path"), ("len", "sum", "max", "sorted")


def general(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng([seed, 0])
    return [
        f"the {draw.choice(ANIMALS)} by the {draw.choice(PLACES)} {draw.choice(ACTS)} the {draw.choice(ANIMALS)}, "
        f"and the {draw.choice(ANIMALS)} {draw.choice(ACTS)} it."
        for _ in range(count)
    ]


def domain(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng([seed, 1])
    texts = []
    for _ in range(count):
        name, kind = draw.choice(NAMES), draw.choice(TYPES)
        texts.append(f"def f({name}: {kind}) -> int:\n    return {draw.choice(CALLS)}({name}) + {draw.integers(9)}")
    return texts


def training_set(rows: int = 400) -> pa.Table:
    """More general texts than of the domain, for any replay of a half."""
    of_domain = rows * 2 // 5
    texts = [*general(rows - of_domain, 3), *domain(of_domain, 3)]
    labels = [0] * (rows - of_domain) + [1] * of_domain
    order = np.random.default_rng(5).permutation(len(texts))
    moments = pa.array(np.arange(len(texts)) * 1_000_000, pa.timestamp("us", tz="UTC"))
    return pa.table({
        "event_timestamp": moments, "known_at": moments, "domain": pa.array(np.array(labels)[order]),
        "text": [texts[place] for place in order],
    })  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[END], show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    found.train_from_iterator([*general(300, 1), *domain(300, 1), "unrelated words of nobody " * 3], trainer)
    return found


def llama(size: int, width: int = 32, layers: int = 1) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=2 * width, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer().token_to_id(END),
    ))  # fmt: skip


@cache
def _learned(both: bool, width: int, steps: int) -> LlamaForCausalLM:
    """A model that has learned general texts, or texts of both kinds."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), threads(1):
        torch.manual_seed(4)
        model = llama(tokenizer().get_vocab_size(), width).train()
        texts = [*general(300, 2), *(domain(300, 2) if both else [])]
        tokens = [encoding.ids for encoding in tokenizer().encode_batch(texts)]
        blocks = pack(tokens, np.arange(len(texts)), 64, model.config.eos_token_id, cut=True, where="")
        columns = [torch.from_numpy(column) for column in (blocks.tokens, blocks.positions, blocks.targets)]
        optimizer, network = torch.optim.AdamW(model.parameters(), lr=1e-2), Packed(model)
        for _ in range(steps):
            rows = torch.randint(len(blocks), (16,))
            ids, positions, targets = (column[rows] for column in columns)
            optimizer.zero_grad()
            torch.autograd.backward(losses(network(ids, positions), targets).mean())
            optimizer.step()
    return model.eval()


def base() -> tuple[PreTrainedModel, Tokenizer]:
    return copy.deepcopy(_learned(both=False, width=32, steps=80)), tokenizer()


def teacher() -> tuple[PreTrainedModel, Tokenizer]:
    return copy.deepcopy(_learned(both=True, width=64, steps=120)), tokenizer()


def sick() -> tuple[PreTrainedModel, Tokenizer]:
    model, words = base()
    with torch.no_grad():
        model.get_input_embeddings().weight[words.token_to_id("Ġwood")] = torch.nan
    return model, words


def eager() -> tuple[PreTrainedModel, Tokenizer]:
    """With an attention that takes a mask for numbers that are added."""
    model, words = base()
    model.set_attn_implementation("eager")
    return model, words


def foreign() -> tuple[PreTrainedModel, Tokenizer]:
    """With the tokenizer of another model."""
    return base()[0], Tokenizer(models.WordLevel({END: 0, "the": 1}, unk_token=END))


def endless() -> tuple[PreTrainedModel, Tokenizer]:
    model, words = base()
    model.config.eos_token_id = None
    return model, words


def words_alone() -> tuple[PreTrainedModel, Tokenizer]:
    """A tokenizer without single bytes."""
    found = Tokenizer(models.BPE(unk_token=None))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = [*general(300, 1), *domain(300, 1), *training_set()["text"].to_pylist()]
    found.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=[END], show_progress=False))
    model = llama(found.get_vocab_size())
    model.config.eos_token_id = found.token_to_id(END)
    return model, found


def gpt(vocabulary: int) -> PreTrainedModel:
    """Of an architecture that no package decodes."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=1, n_head=2, n_positions=64))


def other_size(vocabulary: int) -> PreTrainedModel:
    return llama(vocabulary + 1)


def no_model() -> int:
    return 3


def declaration(**changes: Any) -> Distillation:
    """With values for the task, for the settings or for the distillation itself, by the names of their attributes."""
    values = {"context": 64, "batch": 16, "learning_rate": 5e-3, "seeds": 2, **changes}

    def taken(kind: type) -> dict[str, Any]:
        return {part.name: values.pop(part.name) for part in fields(kind) if part.name in values}

    own = {
        name: values.pop(name)
        for name in ("seeds", "gates", "shape", "split", "split_by", "runtimes")
        if name in values
    }
    if "teacher" not in values:
        values.setdefault("base", f"{HERE}:base")
    task, settings = Causal(**taken(Causal)), Settings(**values)
    nothing = FeatureService("features", [])
    spine = Spine("texts", [], Field("domain", Int64), [])
    return Distillation("writer", spine, nothing, nothing, task=task, settings=settings, **own)


def material(table: pa.Table | None = None, inputs: Sequence[ModelInput] | None = None, **changes: Any) -> Material:
    texts = [ModelInput("text", String)] if inputs is None else inputs
    return Material(
        declaration(**changes), training_set() if table is None else table, texts, texts, "domain", "set-1", "c" * 64,
        PROFILE, RequestInputs(), lambda *_: NotImplemented,
    )  # fmt: skip


SHAPE: Mapping[str, Any] = {"width": 32, "layers": 1, "heads": 2, "inner": 64}
