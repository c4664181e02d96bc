"""The project of the language model, from texts to a package, with a teacher of a few weights."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from isthmus.features.package.manifest import open_package, package_digest
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.build.build import build
from isthmus.orchestration.models.models import distill, export, parity
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.runtimes import compare_runtimes

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "docwriter"
TINY = '''\
"""A teacher that was drawn at random, and its tokenizer of the texts."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM


def teacher():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    texts = pq.read_table(Path(__file__).parent / "data" / "texts.parquet")["text"].to_pylist()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>"], show_progress=False, initial_alphabet=alphabet
    )
    words.train_from_iterator(texts, trainer)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=words.get_vocab_size(), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=128, max_position_embeddings=128, bos_token_id=None, eos_token_id=0,
        )), words
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the docstrings of one package."""
    root = tmp_path_factory.mktemp("docwriter")
    shutil.copy(EXAMPLE / "isthmus.toml", root / "isthmus.toml")
    (root / "writer.py").write_text(TINY)
    definitions = (
        (EXAMPLE / "definitions.py").read_text().replace('{"width": 128, "layers": 3', '{"width": 32, "layers": 1')
    )
    definitions = definitions.replace('Gate("taught", at_least=0), Gate("student.agreement", at_least=0.15)', "")
    (root / "definitions.py").write_text(
        definitions.replace("epochs=4", "epochs=1").replace("context=128", "context=64")
    )
    sys.path.insert(0, str(EXAMPLE))
    try:
        corpus = importlib.import_module("corpus")
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("corpus", None)
    (root / "data").mkdir()
    pq.write_table(corpus.corpus(120, ("networkx",)), root / "data" / "texts.parquet")
    return root


def test_a_language_model_goes_from_texts_to_a_package(folder: Path) -> None:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    report = distill(project)
    assert report.data["task"] == "causal"
    assert report.data["models"]["student"]["parameters"] < report.data["models"]["teacher"]["parameters"]
    assert "licence: Apache-2.0" in report.data["models"]["teacher"]["about"]
    assert not distill(project).trained
    package = export(project).path
    opened = open_package(package)
    manifest = opened.manifest
    assert (manifest.task, manifest.metric) == ("causal", "perplexity")
    assert {variant.precision for variant in manifest.variants} == {"fp32"}
    assert all(b"site-packages" not in file.read_bytes() for file in package.iterdir())
    words = json.loads(opened.files.read("tokenizer.json"))
    assert (project.root / report.path / "tokenizer.json").read_bytes() == opened.files.read("tokenizer.json")
    assert len(words["model"]["vocab"]) <= 600
    with parity(project, project.definitions.distillations["docwriter"], opened) as beside:
        compared = compare_runtimes(beside, opened, all_keys=True)
    assert compared.skipped == {}
    assert {one.differing for one in compared.files.values()} == {0}
    assert export(project).digest == package_digest(package)
