"""The project of the language model, from texts to a server and a page, with a teacher of a few weights."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Page, expect
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.artifacts import verdict_file
from isthmus.orchestration.models.students import distill, export
from isthmus.orchestration.planning.plan import plan
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.package.generation.tokenizer import GrowingText
from isthmus.package.manifest import open_package, package_digest
from isthmus.package.prompts import open_tokenizer, read_prompts
from tests.distill.decoder.support import greedy_naively
from tests.end_to_end.api import deployed
from tests.end_to_end.files import served

pytestmark = [pytest.mark.accept, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "docwriter"
TINY = '''\
"""A teacher that was drawn at random, and its tokenizer of the texts."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM


def teacher():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
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
    settings = root / "isthmus.toml"
    settings.write_text(settings.read_text().replace('precision = "fastest"', 'precision = "fp32"'))
    (root / "writer.py").write_text(TINY)
    definitions = (
        (EXAMPLE / "definitions.py").read_text().replace('{"width": 128, "layers": 3', '{"width": 32, "layers": 1')
    )
    definitions = definitions.replace('Gate("taught", at_least=0), Gate("student.agreement", at_least=0.15)', "")
    sys.path.insert(0, str(EXAMPLE))
    try:
        corpus = importlib.import_module("corpus")
    finally:
        sys.path.remove(str(EXAMPLE))
        sys.modules.pop("corpus", None)
    (root / "data").mkdir()
    pq.write_table(corpus.corpus(120, ("networkx",)), root / "data" / "texts.parquet")
    # The general texts describe the installed packages, which may have few words.
    assert definitions.count("replay=0.25") == 1
    definitions = definitions.replace("replay=0.25", "replay=0.15")
    (root / "definitions.py").write_text(
        definitions.replace("epochs=4", "epochs=1").replace("context=128", "context=64")
    )
    return root


def test_a_language_model_goes_from_texts_to_a_server_and_a_page_that_write(
    folder: Path, tmp_path: Path, phone: Callable[[str], Page]
) -> None:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    report = distill(project)
    assert report.data["task"] == "causal"
    assert report.data["models"]["student"]["parameters"] < report.data["models"]["teacher"]["parameters"]
    assert "license: Apache-2.0" in report.data["models"]["teacher"]["about"]
    assert not distill(project).trained
    package = export(project).path
    opened = open_package(package)
    assert (opened.manifest.task, opened.manifest.metric) == ("causal", "agreement")
    assert opened.files.read("tokenizer.json") == (report.path / "tokenizer.json").read_bytes()
    assert len(json.loads(opened.files.read("tokenizer.json"))["model"]["vocab"]) <= 600
    assert all(b"site-packages" not in file.read_bytes() for file in package.iterdir())
    assert export(project).digest == package_digest(package)
    decoding = plan(project)["models"]["docwriter"]["decoding"]
    assert decoding["prompt"] == 32
    assert {*decoding["precisions"]} == {each.precision for each in opened.manifest.variants}
    plain = decoding["precisions"]["fp32"]
    assert plain["check"]["measured_seconds"] > 0 < plain["prefill"]["devices"]["this host"]["tokens_per_second"]
    prompt = read_prompts(opened)[0]
    said = greedy_naively(student(report.path), prompt.tokens, 8)
    tokenizer = open_tokenizer(opened)
    text = GrowingText(tokenizer)
    expected = "".join(map(text.add, said)) + text.end()
    with deployed(project, tmp_path / "server.log") as http:
        verdict = read_verdict(project)
        assert {"model.fp32.ort", "model.fp32.ort behind prompts"} <= {*verdict["files"]}
        answer = http.post("/generate", json={"prompt": prompt.text, "max_tokens": 8})
        found = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:5] == "data:"]
        assert "".join(event.get("text", "") for event in found) == expected
        assert found[-1]["tokens"] == len(said)
    site(project, None, tmp_path / "site")
    with served(tmp_path / "site") as address:
        page = phone(address)
        page.get_by_label("Prompt", exact=True).fill(prompt.text)
        page.get_by_role("button", name="Write").click()
        expect(page.locator("#text")).to_have_attribute("data-done", "yes")
        assert (page.locator("#text").text_content() or "").startswith(expected)


def student(folder: Path) -> LlamaForCausalLM:
    """As anyone opens it."""
    model: Any = LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_bytes())))
    weights = load_file(folder / "student.safetensors")
    model.load_state_dict({name.removeprefix("packed.model."): values for name, values in weights.items()})
    return model.eval()


def read_verdict(project: Project) -> dict[str, Any]:
    return dict(json.loads(verdict_file(project, project.definitions.distillations["docwriter"]).read_bytes()))
