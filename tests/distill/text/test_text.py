import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from isthmus import (
    Array,
    Bag,
    Binary,
    Classes,
    Encoder,
    Field,
    Number,
    Pretrained,
    Rank,
    Settings,
    String,
    TeacherFunction,
    Temperature,
    Text,
)
from isthmus.distill.distillation import distill
from isthmus.distill.export.conversion import in_ort_format, in_precision
from isthmus.distill.export.export import export
from isthmus.distill.restore import provenance, restore
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.task import Material
from isthmus.distill.text.baseline import classifier
from isthmus.distill.text.task import TextTask
from isthmus.distill.text.vocabulary import StudentTokenizer
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.profiles import ServingProfile
from isthmus.package.manifest import open_package
from tests.distill.support import check_package
from tests.distill.text.support import HERE, WORDS, bert, material, notes

TEXT = Text(teacher=f"{HERE}:knowing", student=Bag(vocabulary=200, width=8))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return notes()


def report(of: Material, folder: Path, notes: list[str] | None = None) -> Mapping[str, Any]:
    said: list[str] = [] if notes is None else notes
    return distill(
        of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs",
        progress=lambda text, _done: said.append(text),
    ).data  # fmt: skip


def accuracy(found: Mapping[str, Any], model: str = "student") -> float:
    return float(found["models"][model]["quality"]["accuracy"])


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        replace(TEXT, calibration=Temperature()),
        replace(TEXT, student=Encoder(layers=1, width=16, heads=2, inner=16, rank=8, vocabulary=200)),
        replace(TEXT, student=f"{HERE}:longest"),
    ],
    ids=["bag", "calibrated", "encoder", "function"],
)
def test_a_student_learns_the_topics_and_is_restored(table: pa.Table, tmp_path: Path, text: Text) -> None:
    of = material(table, tmp_path, text)
    found = report(of, tmp_path)
    assert accuracy(found) > 0.7
    assert accuracy(found, "reference") > 0.7
    assert found["measures"]["texts_cut"] == 0
    folder = next((tmp_path / "models").glob("*/report.json")).parent
    restored = restore(of, folder)
    rows = of.parts.test
    feeds = restored.task.feeds(rows)
    answers = restored.task.expected(restored.student, feeds)["probabilities"]
    right = np.array(list(WORDS))[answers.argmax(1)] == table["intent"].to_numpy(zero_copy_only=False)[rows]
    assert right.mean() == pytest.approx(accuracy(found))


@pytest.mark.accept
def test_texts_without_a_label_learn_from_the_teacher_alone(table: pa.Table, tmp_path: Path) -> None:
    train = material(table, tmp_path).parts.train
    hidden = np.zeros(len(table), bool)
    hidden[train[20:]] = True
    some = table.set_column(4, "intent", pa.array(table["intent"].to_pylist(), mask=hidden))
    found = report(material(some, tmp_path), tmp_path)
    assert accuracy(found) > accuracy(found, "control") + 0.05
    assert found["gap_closed"]["value"] > 0.5


@pytest.mark.accept
@pytest.mark.slowest
def test_several_labels_are_learned_from_a_pretrained_model_and_packaged(table: pa.Table, tmp_path: Path) -> None:
    words = [{*text.split()} for text in table["body"].to_pylist()[:300]]
    intents = [[name for name, known in WORDS.items() if {*known} & text] for text in words]
    some = table.slice(0, 300).set_column(4, "intent", pa.array(intents))
    bert(tmp_path / "bert", some)
    text = replace(TEXT, predicts=Classes(several=True), teacher=Pretrained("bert"))
    of = material(some, tmp_path, text, settings=Settings(epochs=40, batch=32, learning_rate=2e-2))
    spine = replace(of.declaration.spine, label=Field("intent", Array(String)))
    of = replace(of, declaration=replace(of.declaration, spine=spine))
    assert of.declaration.problems() == []
    found = report(of, tmp_path)
    assert min(model["quality"]["micro_f1"] for model in found["models"].values()) > 0.8
    folder = next((tmp_path / "models").glob("*/report.json")).parent
    patient = ServingProfile(latency_objective_ms=1000)
    made = export(of, folder, tmp_path / "packages", contract={"views": {}}, profile=patient, cache=tmp_path / "cache")
    package = open_package(made.path)
    assert (package.manifest.classes, package.manifest.several) == (tuple(WORDS), True)
    assert {verdict.differing for verdict in check_package(of, package, folder, rows=20).values()} == {0}
    tokenizer = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    checks = json.loads((made.path / "tokens.json").read_bytes())
    assert len(checks["pairs"]) > 8
    for pair in checks["pairs"]:
        assert tokenizer.encode(pair["text"]).ids == pair["input_ids"]
        assert 1 <= len(pair["input_ids"]) <= checks["tokens"]

    bert(tmp_path / "bert", table, steps=1)
    with pytest.raises(ConfigurationError, match=r"problem_type of config\.json: 'single_label_classification'"):
        TextTask(of).teacher().ask(np.arange(2))


@pytest.mark.parametrize("student", [Bag(vocabulary=200, width=64), Encoder(layers=1, width=64, heads=2, inner=64)])
def test_no_precision_stores_embeddings_in_32_bits(table: pa.Table, tmp_path: Path, student: Bag | Encoder) -> None:
    task = TextTask(material(table, tmp_path, replace(TEXT, student=student)))
    network = task.student().eval()
    with torch.no_grad():
        graph, edges = student_graph(task, network), task.edges(network)
    whole = in_ort_format(in_precision(task, graph, "fp32", ()), "fp32")
    for precision in ("int8", "mixed", "w8", "fp16"):
        content = in_precision(task, graph, precision, edges)
        sizes = {tensor.name: np.prod(tensor.dims) for tensor in onnx.load_model_from_string(content).graph.initializer
                 if tensor.data_type == onnx.TensorProto.FLOAT}  # fmt: skip
        assert max(sizes.values()) < 4096, precision
        # Each node takes more bytes in ORT format; the weights must not.
        assert len(in_ort_format(content, precision)) < 0.85 * len(whole), precision


@pytest.mark.accept
def test_long_texts_are_cut_and_counted(table: pa.Table, tmp_path: Path) -> None:
    found = report(material(table, tmp_path, replace(TEXT, tokens=4)), tmp_path)
    lengths = np.array([1 + len(text.split()) for text in table["body"].to_pylist()])
    assert found["measures"]["texts_cut"] == pytest.approx((lengths[material(table, tmp_path).parts.test] > 4).mean())


@given(st.lists(st.text(max_size=40), min_size=1, max_size=20))
def test_a_vocabulary_reads_every_text_the_same_each_time(texts: list[str]) -> None:
    one, other = (StudentTokenizer(texts, 100, 12) for _ in range(2))
    assert one.file == other.file
    tokens, lengths = one.read([*texts, "never seen \U0001f600"])
    assert one.size <= 100
    assert (tokens[:, 0] == 2).all()
    assert (np.minimum(lengths, 12) == (tokens != 0).sum(1)).all()
    saved = Tokenizer.from_buffer(one.file)
    for text, row in zip(texts, tokens, strict=False):
        assert saved.encode(text).ids == row[row != 0].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "teacher"),
        ({"teacher": Pretrained("../outside")}, "a relative path within the project"),
        ({"teacher": Pretrained("large", tokens=0)}, "at least 1"),
        ({"predicts": Rank(within="id")}, "Classes, Binary or Number"),
        ({"student": "nothing"}, 'a Bag, an Encoder, a PrunedEncoder or "module:function"'),
        ({"student": Encoder(width=10, heads=4)}, "a multiple of 4"),
        ({"student": Bag(vocabulary=10)}, "at least 100"),
        ({"tokens": 1}, "at least 2"),
        ({"soft_weight": 0.0}, "more than 0"),
        ({"calibration": Temperature(), "predicts": Number()}, "None, or a calibration"),
        ({"predicts": Binary()}, "is of type String"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(
    table: pa.Table, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    problems = material(table, tmp_path, replace(TEXT, **changes)).declaration.problems()
    assert message in " ".join(map(str, problems))


def test_the_text_must_be_a_string_of_the_service(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'topic' is not a String"):
        TextTask(material(table, tmp_path, replace(TEXT, column="topic")))


def test_a_function_must_return_a_network_of_the_right_width(table: pa.Table, tmp_path: Path) -> None:
    task = TextTask(material(table, tmp_path, replace(TEXT, student=f"{HERE}:too_wide")))
    with pytest.raises(ConfigurationError, match=r"returns \(2, 5\) for two texts.*expected \(2, 4\)"):
        task.student()
    task = TextTask(material(table, tmp_path, replace(TEXT, student=f"{HERE}:no_network")))
    with pytest.raises(ConfigurationError, match="returns a list; expected a torch module"):
        task.student()
    task = TextTask(material(table, tmp_path, replace(TEXT, student=f"{HERE}:knowing")))
    absent = TextTask(material(table, tmp_path, replace(TEXT, student=f"{HERE}:absent")))
    with pytest.raises(ConfigurationError, match="absent: cannot be imported"):
        provenance(absent)
    with pytest.raises(ConfigurationError, match=r"knowing: raises TypeError: .* takes 0 positional arguments"):
        task.student()


def test_null_texts_are_empty_texts(table: pa.Table, tmp_path: Path) -> None:
    texts = [None, *table["body"].to_pylist()[1:]]
    some = table.set_column(3, "body", pa.array(texts, pa.string()))
    task = TextTask(material(some, tmp_path))
    assert task.feeds(np.array([0]))["input_ids"].tolist() == [[2]]


def test_a_class_that_only_the_test_part_has_is_refused(table: pa.Table, tmp_path: Path) -> None:
    test = material(table, tmp_path).parts.test
    intents = table["intent"].to_pylist()
    intents[test[0]] = "rare"
    with pytest.raises(DataError, match="name a class that no row of the train"):
        TextTask(material(table.set_column(4, "intent", pa.array(intents)), tmp_path))


def test_a_fitted_teacher_is_another_one_for_other_parts(table: pa.Table, tmp_path: Path) -> None:
    by_time = TextTask(material(table, tmp_path, split_by=None)).teacher().fingerprint()
    assert TextTask(material(table, tmp_path)).teacher().fingerprint() != by_time


def test_texts_without_words_have_a_reference() -> None:
    features = pd.DataFrame({"body": ["a", "b c", "", "?"]})
    model = classifier(features, np.array([0, 1, 0, 1]))
    assert model.predict(features).shape == (4,)


@pytest.mark.accept
def test_teachers_are_listed_with_their_code(table: pa.Table, tmp_path: Path) -> None:
    both = replace(
        TEXT, teacher=[TeacherFunction(f"{HERE}:knowing"), (f"{HERE}:knowing", 2.0)], student=f"{HERE}:longest"
    )
    assert both.functions == (f"{HERE}:knowing", f"{HERE}:knowing", f"{HERE}:longest")
    assert accuracy(report(material(table, tmp_path, both), tmp_path), "teacher") > 0.9


@pytest.mark.accept
def test_a_pretrained_model_teaches(table: pa.Table, tmp_path: Path) -> None:
    bert(tmp_path / "bert", table)
    found = report(material(table, tmp_path, replace(TEXT, teacher=Pretrained("bert"))), tmp_path)
    assert accuracy(found, "teacher") > 0.7
    assert accuracy(found) > 0.7
    assert found["models"]["teacher"]["parameters"] > 1000


def changed(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_pretrained_model_that_does_not_fit_is_refused(table: pa.Table, tmp_path: Path) -> None:
    bert(tmp_path / "bert", table, steps=0)
    text = replace(TEXT, teacher=Pretrained("bert"))

    def refused() -> str:
        with pytest.raises((ConfigurationError, DataError, DependencyError)) as caught:
            report(material(table, tmp_path, text), tmp_path)
        return str(caught.value)

    names = json.loads((tmp_path / "bert" / "config.json").read_text())["id2label"]
    changed(tmp_path / "bert", id2label={**names, "0": "sports"}, label2id={})
    assert "without 'alarm' and with 'sports'" in refused()
    changed(tmp_path / "bert", id2label={number: f"LABEL_{number}" for number in names})
    assert "classes: unknown" in refused()
    changed(tmp_path / "bert", id2label=names, pad_token_id=3)
    assert "pads with token 0, and the model with 3" in refused()
    changed(tmp_path / "bert", pad_token_id=0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "bert" / "tokenizer.json"))
    tokenizer.add_tokens([f"more{number}" for number in range(100)])
    tokenizer.save(str(tmp_path / "bert" / "tokenizer.json"))
    assert "tokens, and the model 100" in refused()
    (tmp_path / "bert" / "tokenizer.json").unlink()
    assert "has no tokenizer that can be read" in refused()
    text = replace(TEXT, teacher=Pretrained("no-such-folder-or-model"))
    assert "is not a folder and cannot be downloaded" in refused()


def test_logits_that_are_not_numbers_are_refused(table: pa.Table, tmp_path: Path) -> None:
    bert(tmp_path / "bert", table, steps=0)
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, tmp_path / "bert" / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="is nan"):
        report(material(table, tmp_path, replace(TEXT, teacher=Pretrained("bert"))), tmp_path)
