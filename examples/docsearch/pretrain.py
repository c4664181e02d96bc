"""Teaches the student where its teacher puts several hundred thousand texts. `python pretrain.py`, after `texts.py`.

It writes data/start.safetensors, with which `isthmus distill` begins then. The teacher answers once for each text, and
its answers are kept; a training that was stopped goes on from its last checkpoint. No text of the test or of the
validation is learned from, and nothing that stands in the same docstring.
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
from isthmus.teachers import NetworkTeacher, TeacherOutputs, identities, pretrained
from isthmus.training import Stopped, Training, TrainingProfile, TrainingSettings, accelerator, discard, threads

BUCKET = 256
"""Texts of a step, all of about one length: then little of it is padding."""
TEMPERATURE = 0.03
"""Of cosines: it makes the ten nearest passages count, and few beyond them."""
FOLDER = Path(__file__).parent / "data"


class Texts(NamedTuple):
    """Texts as the teacher sees them: tokens (n, positions), 0 is padding, and its vectors (n, width)."""

    tokens: Tensor
    vectors: Tensor


class Buckets:
    """Texts in groups of about one length, each the batch of a step."""

    def __init__(self, parts: list[tuple[Texts, int]]) -> None:
        self._groups: list[Texts] = []
        for texts, size in parts:
            order = (texts.tokens != 0).sum(1).argsort(stable=True)
            # The last may be small, and so a step of few texts as long as any.
            for rows in order[: len(order) // size * size].split(size):
                longest = int((texts.tokens[rows] != 0).sum(1).max())
                self._groups.append(Texts(texts.tokens[rows, :longest], texts.vectors[rows]))

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, places: Tensor) -> Texts:
        tokens, vectors = self._groups[int(places)]
        return Texts(tokens.long(), vectors.float())


def held_out(passages: Mapping[str, list[str]], parts: Split) -> set[str]:
    """The questions of validation and test, as `plain` has them."""
    return {plain(passages["question"][row]) for row in (*parts.validation.tolist(), *parts.test.tolist())}


def plain(text: str) -> str:
    """Its letters and digits, so that a comma makes no other question of one."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def chosen(questions: list[str], without: set[str]) -> list[str]:
    """What is learned from: these questions, then first paragraphs, which are such, then sentences; each once."""
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
    """Tokens (n, length) int16; 0 is padding."""
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    parts = [tokenizer.encode_batch(texts[at : at + 10_000]) for at in range(0, len(texts), 10_000)]
    return torch.tensor(np.array([one.ids for part in parts for one in part], np.int16))


def answered(teacher: NetworkTeacher, name: str, found: Tensor) -> Texts:
    """Texts with the teacher's vectors of them: from the folder of outputs, or computed now."""

    def read(rows: Array) -> tuple[Tensor, Tensor]:
        part = found[torch.from_numpy(rows)].long()
        part = part[:, : int((part != 0).sum(1).max())]
        return part, (part != 0).long()

    rows = identities({"tokens": found})
    outputs = TeacherOutputs(FOLDER / "outputs", teacher, rows, read, contract="docsearch", batch=64)
    outputs.fill(lambda text, _done: say(f"{name}: {text}"))
    return Texts(found, outputs[np.arange(len(found))]["vector"])


def by_length(found: Tensor, span: int = 8192) -> Tensor:
    """Texts in spans of some thousand, each by length, so that a batch of the teacher is little padded."""
    return torch.cat([part[(part != 0).sum(1).argsort(stable=True)] for part in found.split(span)])


def recall(embedder: nn.Module, questions: Texts, index: Tensor) -> float:
    """The share of the ten nearest of an index by the teacher's vectors that are found by the student's."""
    mask = (questions.tokens != 0).long()
    parts = zip(questions.tokens.split(64), mask.split(64), strict=True)
    ours = torch.cat([embedder(part.long(), said) for part, said in parts])
    return shared(nearest(ours @ index.T), nearest(questions.vectors.float() @ index.T))


def main(steps: int, most: int, cores: int) -> None:
    """Writes the weights that `isthmus distill` begins with."""
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
    counts[:104] += len(taught)  # the special ones, whatever was met
    torch.manual_seed(0)
    embedder = student(module, positions=PASSAGE, counts=counts, **SHAPE)
    with threads(cores):
        if profile.precision == "bf16":  # targets are off by far less than any student
            module.bfloat16()
        teacher = NetworkTeacher(Embedder(module), ["vector"])
        asked = answered(teacher, "questions", tokens([passages["question"][row] for row in validation], QUESTION))
        index = answered(teacher, "passages", said)
        texts = answered(teacher, "texts", by_length(found))
        learn(embedder, texts, index, asked, profile, steps)
    save_file({name: weights.contiguous() for name, weights in embedder.state_dict().items()}, START)
    discard(FOLDER / "run")
    say(f"{START} is what isthmus distill begins with")


def learn(embedder: Embedder, texts: Texts, index: Texts, asked: Texts, profile: TrainingProfile, steps: int) -> None:
    """Trains the embedder, and leaves it with the weights that find most of the validation."""
    learned = len(index.tokens) - len(asked.tokens)
    # The bank whose order is learned has half of the passages. The other half, with those of the validation, is
    # searched: so that no passage of which the order was learned counts.
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
    options = argparse.ArgumentParser(description="Teaches the student where its teacher puts unlabelled texts.")
    options.add_argument("--steps", type=int, default=6000, help="of the optimizer, 256 texts each")
    options.add_argument("--texts", type=int, default=400_000, help="that the teacher is asked about, at most")
    options.add_argument("--threads", type=int, default=2)
    given = options.parse_args()
    for needed, script in ((PASSAGES, "corpus.py"), (TEXTS, "texts.py")):
        if not needed.exists():
            sys.exit(f"{needed} is not there: python {script}")
    try:
        main(given.steps, given.texts, given.threads)
    except Stopped as error:
        sys.exit(str(error))
