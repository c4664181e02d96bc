"""Train the student on the teacher's vectors of several hundred thousand texts: `python pretrain.py`, after `texts.py`.

Writes data/start.safetensors, from which `isthmus distill` then starts. The teacher's vectors are computed once and
cached, and a stopped training continues from its last checkpoint. Texts of docstrings that belong to the validation or
the test part are left out.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from corpus import FILE as PASSAGES
from definitions import docsearch
from encoder import Array, Embedder, student
from safetensors.torch import save_file
from search import PASSAGE, QUESTION, SHAPE, START, minilm, nearest, shared
from texts import FILE as TEXTS
from tokenizers import Tokenizer
from torch import Tensor, nn

from isthmus.losses import cosine, lists
from isthmus.tasks import Split, split_by_value
from isthmus.teachers import NetworkTeacher, OutputCache, identities, pretrained
from isthmus.training import Stopped, Training, TrainingProfile, TrainingSettings, accelerator, discard, threads

BUCKET = 256
"""Texts per step, all of about the same length, so that little is padding."""
TEMPERATURE = 0.03
"""Temperature for cosines; small, so that mostly the ten nearest passages count."""
FOLDER = Path(__file__).parent / "data"


class Texts(NamedTuple):
    """Tokens (n, positions), padded with 0, and the teacher's vectors (n, width)."""

    tokens: Tensor
    vectors: Tensor


class Buckets:
    """Batches of texts of about the same length."""

    def __init__(self, parts: list[tuple[Texts, int]]) -> None:
        self._groups: list[Texts] = []
        for texts, size in parts:
            order = (texts.tokens != 0).sum(1).argsort(stable=True)
            # Drop the last, incomplete batch.
            for rows in order[: len(order) // size * size].split(size):
                longest = int((texts.tokens[rows] != 0).sum(1).max())
                self._groups.append(Texts(texts.tokens[rows, :longest], texts.vectors[rows]))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, places: Tensor) -> Texts:
        tokens, vectors = self._groups[int(places)]
        return Texts(tokens.long(), vectors.float())


def held_out(passages: Mapping[str, list[str]], parts: Split) -> set[str]:
    """Return the questions of validation and test, normalized by `plain`."""
    return {plain(passages["question"][row]) for row in (*parts.validation.tolist(), *parts.test.tolist())}


def plain(text: str) -> str:
    """Return lower-case letters and digits, so that punctuation does not distinguish questions."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def chosen(questions: list[str], without: set[str]) -> list[str]:
    """Return the training texts without duplicates: questions, then first paragraphs, then other sentences."""
    questions = [question for question in questions if plain(question) not in without]
    more = pq.read_table(TEXTS).to_pydict()
    parts: tuple[list[str], list[str]] = ([], [])
    for text, question, first in zip(more["text"], more["question"], more["first"], strict=True):
        if plain(question) not in without and plain(text) not in without:
            parts[not first].append(text)
    known = {*parts[0], *parts[1]}
    parts[0].extend(dict.fromkeys(question for question in questions if question not in known))
    draw = np.random.default_rng(0)
    mixed = [part[place] for part in parts for place in draw.permutation(len(part))]
    return [*dict.fromkeys([*questions, *mixed])]


def tokens(texts: list[str], length: int) -> Tensor:
    """Tokenize texts as int16 (n, length), padded with 0."""
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    parts = [tokenizer.encode_batch(texts[at : at + 10_000]) for at in range(0, len(texts), 10_000)]
    return torch.tensor(np.array([one.ids for part in parts for one in part], np.int16))


def answered(teacher: NetworkTeacher, name: str, found: Tensor) -> Texts:
    """Return the texts with the teacher's vectors, cached or computed now."""

    def read(rows: Array) -> tuple[Tensor, Tensor]:
        part = found[torch.from_numpy(rows)].long()
        part = part[:, : int((part != 0).sum(1).max())]
        return part, (part != 0).long()

    rows = identities({"tokens": found})
    outputs = OutputCache(FOLDER / "outputs", teacher, rows, read, contract="docsearch", batch=64)
    outputs.fill(lambda text, _done: say(f"{name}: {text}"))
    return Texts(found, outputs[np.arange(len(found))]["vector"])


def by_length(found: Tensor, span: int = 8192) -> Tensor:
    """Sort texts by length within spans, so that the teacher's batches have little padding."""
    return torch.cat([part[(part != 0).sum(1).argsort(stable=True)] for part in found.split(span)])


def recall(embedder: nn.Module, questions: Texts, index: Tensor) -> float:
    """Return the share of the teacher's ten nearest passages that are also the student's."""
    mask = (questions.tokens != 0).long()
    parts = zip(questions.tokens.split(64), mask.split(64), strict=True)
    ours = torch.cat([embedder(part.long(), said) for part, said in parts])
    return shared(nearest(ours @ index.T), nearest(questions.vectors.float() @ index.T))


def main(steps: int, most: int, cores: int) -> None:
    """Write the weights from which `isthmus distill` starts."""
    passages = pq.read_table(PASSAGES).to_pydict()
    parts = split_by_value(pq.read_table(PASSAGES)["question"], docsearch.split)
    train, validation = parts.train.tolist(), parts.validation.tolist()
    without = held_out(passages, parts)
    taught = chosen([passages["question"][row] for row in train], without)[:most]

    module = pretrained(minilm(), ["embedding"]).module
    profile = TrainingProfile(precision="bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32")
    found = tokens(taught, QUESTION)
    said = tokens([passages["text"][row] for row in train + validation], PASSAGE)
    counts = np.bincount(torch.cat([found.flatten(), said[: len(train)].flatten()]).numpy(), minlength=30522)
    counts[:104] += len(taught)  # special tokens always count
    torch.manual_seed(0)
    embedder = student(module, positions=PASSAGE, counts=counts, **SHAPE)
    with threads(cores):
        if profile.precision == "bf16":  # targets lose far less than the student's error
            module.bfloat16()
        teacher = NetworkTeacher(Embedder(module), ["vector"])
        asked = answered(teacher, "questions", tokens([passages["question"][row] for row in validation], QUESTION))
        index = answered(teacher, "passages", said)
        texts = answered(teacher, "texts", by_length(found))
        learn(embedder, texts, index, asked, profile, steps)
    save_file({name: weights.contiguous() for name, weights in embedder.state_dict().items()}, START)
    discard(FOLDER / "run")
    say(f"{START} was written; isthmus distill starts from it")


def learn(embedder: Embedder, texts: Texts, index: Texts, asked: Texts, profile: TrainingProfile, steps: int) -> None:
    """Train the embedder and leave it with the weights that have the best recall on the validation questions."""
    learned = len(index.tokens) - len(asked.tokens)
    # The ranking loss uses half of the training passages. Recall is measured on the other half and those of the
    # validation, so that no ranked passage counts.
    bank = index.vectors[:learned:2].float()
    searched = torch.cat([index.vectors[1:learned:2], index.vectors[learned:]]).float()
    said = Texts(index.tokens[:learned], index.vectors[:learned])
    data = Buckets([(texts, BUCKET), (said, BUCKET // 2)])

    def step(module: nn.Module, batch: Texts, _done: float) -> tuple[Tensor, Mapping[str, Tensor]]:
        ours = module(batch.tokens, (batch.tokens != 0).long())
        with torch.autocast("cpu", torch.bfloat16, enabled=profile.precision == "bf16"):
            scores, wanted = ours @ bank.T, batch.vectors @ bank.T
        terms = {
            "cosine": cosine(ours, batch.vectors),
            "nearness": lists(scores, wanted, temperature=TEMPERATURE),
        }
        return terms["cosine"] + 0.1 * terms["nearness"], {name: term.detach() for name, term in terms.items()}

    settings = TrainingSettings(
        steps=steps, batch=1, learning_rate=2e-3, weight_decay=1e-2, warm_up=0.05, clip=1.0, evaluate_every=100,
        gate="recall", checkpoint_seconds=120,
    )  # fmt: skip

    def evaluate(module: nn.Module) -> Mapping[str, float]:
        return {"recall": recall(module, asked, searched)}

    history = Training(
        embedder, data, step, settings, accelerator(profile), evaluate,
        FOLDER / "run", data_id=f"{len(texts.tokens)} texts", where="pretrain", progress=lambda text, _done: say(text),
    ).run()  # fmt: skip
    for entry in history:
        say(f"step {entry['step']}: recall {entry['recall']:.4f}, cosine {1 - entry['cosine']:.4f}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Train the student on the teacher's vectors of unlabelled texts.")
    options.add_argument("--steps", type=int, default=6000, help="optimizer steps of 256 texts")
    options.add_argument("--texts", type=int, default=400_000, help="maximum number of texts")
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    for needed, script in ((PASSAGES, "corpus.py"), (TEXTS, "texts.py")):
        if not needed.exists():
            sys.exit(f"{needed} is missing; run python {script}")
    try:
        main(given.steps, given.texts, given.threads)
    except Stopped as error:
        sys.exit(str(error))
