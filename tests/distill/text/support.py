"""Notes of four intents, and teachers that know them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from isthmus import Bag, Distillation, Entity, FeatureService, Field, RequestSource, Settings, Spine, String, Text
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.distill.text.vocabulary import PAD, UNKNOWN, StudentTokenizer
from isthmus.features.profiles import TrainingProfile
from isthmus.package.inputs import ModelInput
from isthmus.transforms.preparation.fit import Preparation

WORDS = {
    "alarm": ["wake", "alarm", "timer", "ring", "minutes", "morning", "snooze"],
    "bank": ["pay", "transfer", "account", "balance", "card", "money", "loan"],
    "music": ["play", "song", "album", "loud", "singer", "radio", "volume"],
    "weather": ["rain", "sun", "umbrella", "forecast", "cold", "wind", "snow"],
}
FILL = ["please", "the", "a", "me", "my", "can", "you", "now", "for", "to", "today"]
INPUT = ModelInput("body", String)
HERE = "tests.distill.text.support"


def notes(count: int = 600) -> pa.Table:
    draw = random.Random(0)
    rows = []
    for number in range(count):
        intent = draw.choice(list(WORDS))
        words = [draw.choice(WORDS[intent] if draw.random() < 0.4 else FILL) for _ in range(draw.randint(3, 9))]
        rows.append((f"n{number}", " ".join(words), intent))
    names, texts, intents = zip(*rows, strict=True)
    times = pa.array(np.arange(count) * 3_600_000_000, pa.timestamp("us", tz="UTC"))
    return pa.table({"id": names, "event_timestamp": times, "known_at": times, "body": texts, "intent": intents})


def _no_preparation(*_: Any) -> Preparation:
    raise AssertionError("a Text has no preparation")


def material(table: pa.Table, root: Path, text: Text | None = None, **changes: Any) -> Material:
    device = FeatureService("device", features=[RequestSource("said", schema=[Field("body", String)])])
    declared: dict[str, Any] = {
        "task": text or Text(teacher=f"{HERE}:knowing", student=Bag(vocabulary=200, width=8)),
        "settings": Settings(epochs=20, batch=32, learning_rate=2e-2), "seeds": 1, "gates": [], "split_by": "id",
        "split": (0.6, 0.2, 0.2), **changes,
    }  # fmt: skip
    spine = Spine("notes", [Entity("note", join_keys={"id": String})], Field("intent", String), [])
    return Material(
        Distillation("intents", spine, device, device, **declared), table, [INPUT], [INPUT], "intent",
        f"set-{len(table)}", "contract", TrainingProfile(threads=1), RequestInputs(), _no_preparation, root=root,
    )  # fmt: skip


def knowing() -> Any:
    """A model that knows each intent's words."""

    def predict(features: Any) -> Any:
        counts = [
            [1 + sum(word in text.split() for word in words) for words in WORDS.values()] for text in features["body"]
        ]
        shares = np.array(counts, float) ** 3
        return shares / shares.sum(1, keepdims=True), list(WORDS)

    return predict


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    file = StudentTokenizer(texts, 100, 32).file
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_buffer(file), pad_token=PAD, unk_token=UNKNOWN)


def sentences(folder: Path, table: pa.Table, **config: Any) -> BertModel:
    """Save a small BERT with drawn weights, whose vectors tell texts apart, with its tokenizer."""
    sizes = {
        "vocab_size": 112, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "max_position_embeddings": 32, "initializer_range": 0.05,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = BertModel(BertConfig(**{**sizes, **config})).eval()
    model.save_pretrained(folder)
    tokenizer_of(table["body"].to_pylist()).save_pretrained(folder)
    return model


def bert(folder: Path, table: pa.Table, steps: int = 60) -> None:
    """Save a small BERT with its tokenizer, fine-tuned on the notes."""
    texts = table["body"].to_pylist()
    tokenizer = tokenizer_of(texts)
    names = dict(enumerate(WORDS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, id2label=names, label2id={name: number for number, name in names.items()},
        ))  # fmt: skip
        read = tokenizer(texts, padding=True, return_tensors="pt")
        intents = table["intent"].to_pylist()
        labels = torch.tensor([[float(name in intent) for name in WORDS] for intent in intents])
        labels = labels.argmax(1) if isinstance(intents[0], str) else labels
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            model(**read, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Longest(torch.nn.Module):
    """A student of the user's: the largest embedding over a text."""

    def __init__(self, size: int, outputs: int) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(size, outputs)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = (attention_mask == 0).unsqueeze(-1)
        largest: torch.Tensor = self.tokens(input_ids).masked_fill(hidden, -9.0).amax(1)
        return largest


def longest(size: int, outputs: int) -> torch.nn.Module:
    return Longest(size, outputs)


def too_wide(size: int, outputs: int) -> torch.nn.Module:
    return Longest(size, outputs + 1)


def no_network(size: int, outputs: int) -> list[int]:
    return [size, outputs]


def informed() -> Any:
    """A model that knows each intent's words, and the plan and the amount of alarms."""
    told = knowing()

    def predict(features: Any) -> Any:
        shares, names = told(features)
        alarms = (features["user__plan"] == "team") | (features["input_ids"] < 3)
        shares[alarms.to_numpy()] = np.eye(len(names))[0] * 0.96 + 0.01
        return shares, names

    return predict
