"""Students that learn a teacher's vectors of texts, alone and in pairs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from isthmus import Bag, Embedding, Pretrained, PrunedEncoder, Settings, Temperature, Text
from isthmus.distill.distillation import distill
from isthmus.distill.evaluation.metrics import retrieval
from isthmus.distill.export.export import export
from isthmus.distill.restore import provenance, restore
from isthmus.distill.tasks.task import Material
from isthmus.distill.tasks.vectors import ranking
from isthmus.distill.teachers.pretrained import pooled
from isthmus.distill.text.embedding import EmbeddingTask
from isthmus.distill.text.task import TextTask
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.profiles import ServingProfile
from isthmus.losses import info_nce
from tests.distill.text.support import HERE, INPUT, WORDS, bert, material, notes, sentences

PAIR = Text(
    column=("body", "title"), predicts=Embedding(index=50), teacher=Pretrained("bert"), tokens=16, dropout=0.0,
    student=PrunedEncoder(layers=(1,), heads=3, inner=24, rank=12),
)  # fmt: skip
ALONE = replace(PAIR, column="body", predicts=Embedding(), student=Bag(vocabulary=200, width=16))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Notes whose title has some of their words."""
    found = notes()
    return found.append_column("title", pa.array([" ".join(text.split()[:3]) for text in found["body"].to_pylist()]))


def embedding(table: pa.Table, root: Path, text: Text = PAIR, **changes: Any) -> Material:
    inputs = [INPUT, replace(INPUT, name="title")] if text.column == ("body", "title") else [INPUT]
    settings = {"settings": Settings(steps=60, batch=32, learning_rate=1e-2), **changes}
    return replace(material(table, root, text, **settings), student_inputs=inputs)


def report(of: Material, folder: Path) -> Mapping[str, Any]:
    return distill(of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs").data


def student_folder(folder: Path) -> Path:
    return next((folder / "models").glob("*/report.json")).parent


@pytest.mark.accept
def test_a_pair_learns_the_teachers_vectors_and_is_packaged(table: pa.Table, tmp_path: Path) -> None:
    model = sentences(tmp_path / "bert", table)
    of = embedding(table, tmp_path)
    found = report(of, tmp_path)
    quality = {name: found["models"][name]["quality"] for name in ("teacher", "student", "control")}
    assert quality["teacher"]["recall_at_10"] == 1
    assert quality["student"]["recall_at_10"] > quality["control"]["recall_at_10"]
    assert quality["student"]["mrr"] > 0
    assert found["agreement"]["student"]["cosine"] > found["agreement"]["control"]["cosine"]
    assert found["measures"]["texts_cut"] == 0
    folder = student_folder(tmp_path)
    contract: dict[str, Any] = {"views": {}}
    patient = ServingProfile(latency_objective_ms=1000)
    made = export(of, folder, tmp_path / "packages", contract=contract, profile=patient, cache=tmp_path / "cache")
    listed = json.loads((made.path / "index.json").read_bytes())
    rows = of.parts.test[:50]
    assert [row["id"] for row in listed] == table["id"].take(rows).to_pylist()
    texts = table["title"].take(rows).to_pylist()
    assert [row["text"] for row in listed] == texts
    vectors = np.frombuffer((made.path / "index.i8").read_bytes(), np.int8).reshape(50, 32)
    task = EmbeddingTask(of)
    read = task._pretrained.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**read).last_hidden_state
    expected = normalize(pooled(states, read["attention_mask"]), dim=-1).numpy()
    np.testing.assert_allclose(vectors / 127, expected, atol=0.005)
    restored = restore(of, folder)
    feeds = restored.task.feeds(rows)
    answers = restored.task.expected(restored.student, feeds)["vector"]
    np.testing.assert_allclose(np.linalg.norm(answers, axis=1), 1, atol=1e-5)


@pytest.mark.accept
def test_a_student_with_a_vocabulary_of_its_own_embeds_single_texts(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    settings = Settings(steps=200, batch=32, learning_rate=2e-2)
    found = report(embedding(table, tmp_path, ALONE, settings=settings), tmp_path)
    quality = {name: found["models"][name]["quality"] for name in ("student", "control")}
    assert quality["student"]["recall_at_10"] > quality["control"]["recall_at_10"] + 0.05
    assert quality["student"].keys() == {"recall_at_10", "recall_at_10_of_its_index"}
    assert "untrained" in found["models"]["control"]["about"]


@pytest.mark.accept
@pytest.mark.slowest
def test_a_student_starts_from_the_weights_of_another(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    short = Settings(steps=2, batch=32)
    first = replace(PAIR, column="body", predicts=Embedding())
    report(embedding(table, tmp_path, first, settings=short), tmp_path)
    weights = student_folder(tmp_path) / "student.safetensors"
    (tmp_path / "start.safetensors").write_bytes(weights.read_bytes())
    task = EmbeddingTask(embedding(table, tmp_path, replace(PAIR, start="start.safetensors")))
    before = EmbeddingTask(embedding(table, tmp_path))
    kept = restore(embedding(table, tmp_path, first, settings=short), student_folder(tmp_path)).student
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in task.student().state_dict().items())
    assert provenance(task)["training"] != provenance(before)["training"]
    wide = replace(PAIR, start="start.safetensors", student=PrunedEncoder(layers=(0, 1)))
    with pytest.raises(ConfigurationError, match=r"start\.safetensors: .*expected weights of a student of this"):
        EmbeddingTask(embedding(table, tmp_path, wide)).student()
    with pytest.raises(ConfigurationError, match=r"none\.safetensors"):
        EmbeddingTask(embedding(table, tmp_path, replace(PAIR, start="none.safetensors"))).student()


@pytest.mark.accept
def test_a_label_is_learned_by_a_pruned_teacher(table: pa.Table, tmp_path: Path) -> None:
    bert(tmp_path / "bert", table)
    text = Text(teacher=Pretrained("bert"), column="body", student=PrunedEncoder(layers=(0,), heads=1, rank=8))
    found = report(material(table, tmp_path, replace(text, tokens=16)), tmp_path)
    assert found["models"]["student"]["quality"]["accuracy"] > 0.7
    task = TextTask(material(table, tmp_path, replace(text, tokens=16)))
    tokenizer = task._pretrained.tokenizer
    body = table["body"][0].as_py()
    (ids,) = task.feeds(np.array([0]))["input_ids"].tolist()
    assert ids == tokenizer(body)["input_ids"]
    one, other = (task.student().state_dict() for _ in range(2))
    assert torch.equal(one["network.layers.0.up.weight"], other["network.layers.0.up.weight"])
    assert one["network.last.bias"].shape == (len(WORDS),)
    assert not torch.equal(one["network.last.weight"], other["network.last.weight"])


def test_texts_that_cannot_be_embedded_are_refused(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    titles = pa.array([None, *table["title"].to_pylist()[1:]])
    with pytest.raises(DataError, match="column title: 1 nulls"):
        EmbeddingTask(embedding(table.set_column(5, "title", titles), tmp_path))
    alone = replace(embedding(table, tmp_path), student_inputs=[INPUT])
    with pytest.raises(ConfigurationError, match="'title' is not a String of the student's service"):
        EmbeddingTask(alone)


def test_a_tokenizer_that_is_not_the_teachers_is_refused(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    words = EmbeddingTask(embedding(table, tmp_path))._pretrained.tokenizer.get_vocab()
    names = sorted(words, key=words.__getitem__)
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(names) + "\n")
    EmbeddingTask(embedding(table, tmp_path))
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join([*names[:9], names[10], names[9], *names[11:]]))
    with pytest.raises(ConfigurationError, match=r"numbers '.*' as 10, and vocab\.txt does not"):
        EmbeddingTask(embedding(table, tmp_path))
    (tmp_path / "bert" / "vocab.txt").unlink()
    sentences(tmp_path / "bert", table, vocab_size=60)
    with pytest.raises(ConfigurationError, match="tokens, and the model 60"):
        EmbeddingTask(embedding(table, tmp_path))
    sentences(tmp_path / "bert", table, pad_token_id=names.index("[CLS]"))
    task = EmbeddingTask(embedding(table, tmp_path, ALONE))
    with pytest.raises(ConfigurationError, match="pads with token 0, and the model with 2"):
        task.options()
    settings = tmp_path / "bert" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"pad_token": "[PAD]"', '"pad_token": "[CLS]"'))
    with pytest.raises(ConfigurationError, match="pads with token 2; expected 0, to prune its model"):
        EmbeddingTask(embedding(table, tmp_path))


def test_a_teacher_in_a_package_must_be_installed(table: pa.Table, tmp_path: Path) -> None:
    missing = replace(PAIR, teacher=Pretrained("package:no_such_package/model"))
    with pytest.raises(DependencyError, match="no_such_package, which contains its file, is not installed"):
        EmbeddingTask(embedding(table, tmp_path, missing))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": f"{HERE}:knowing"}, "one Pretrained, whose vectors are learned"),
        ({"teacher": [Pretrained("bert"), Pretrained("other")]}, "one Pretrained, whose vectors are learned"),
        ({"teacher": Pretrained("bert", column="body")}, "None: the teacher reads the columns of the Text"),
        ({"column": ("body",)}, "one, or two for an Embedding"),
        ({"column": ("body", "body")}, "one, or two for an Embedding"),
        ({"column": "body"}, "index=0 for a single column"),
        ({"predicts": Embedding(index=-1)}, "a whole number of at least 0"),
        ({"predicts": Embedding(pooling="last")}, '"mean" or "first"'),  # type: ignore[arg-type]
        ({"weight": "id"}, "not set: it is for labels"),
        ({"soft_weight": 0.5}, "not set: it is for labels"),
        ({"calibration": Temperature()}, "not set: it is for labels"),
        ({"start": "/data/start.safetensors"}, "a relative path within the project"),
        ({"student": PrunedEncoder(layers=())}, "numbers of layers, from 0"),
        ({"student": PrunedEncoder(layers=(-1,))}, "numbers of layers, from 0"),
        ({"student": PrunedEncoder(layers=(0,), heads=0)}, "at least 1"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(
    table: pa.Table, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    problems = embedding(table, tmp_path, replace(PAIR, **changes)).declaration.problems()
    assert message in " ".join(map(str, problems))


def test_a_pruned_student_of_a_label_needs_one_pretrained_teacher(table: pa.Table, tmp_path: Path) -> None:
    text = Text(teacher=f"{HERE}:knowing", student=PrunedEncoder(layers=(0,)))
    problems = material(table, tmp_path, text).declaration.problems()
    assert "one Pretrained, from which the student is cut" in " ".join(map(str, problems))
    pair = Text(teacher=f"{HERE}:knowing", column=("body", "title"))
    assert "one, or two for an Embedding" in " ".join(map(str, material(table, tmp_path, pair).declaration.problems()))


@given(st.integers(12, 40), st.booleans(), st.integers(0, 9))
def test_a_search_is_measured_as_by_hand(count: int, alone: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    queries, candidates, taught, index = draw.normal(size=(4, count, 8)).astype(np.float32)
    if alone:
        candidates, index = queries, taught

    def ten(ours: Any, theirs: Any) -> list[set[int]]:
        places = [[place for place in range(count) if not (alone and place == row)] for row in range(count)]
        return [
            set(sorted(places[row], key=lambda place: -float(ours[row] @ theirs[place]))[:10]) for row in range(count)
        ]

    found, wanted = retrieval(queries, candidates, taught, index, alone=alone), ten(taught, index)
    for name, searched in (("recall_at_10", candidates), ("recall_at_10_of_its_index", index)):
        shared = [len(mine & theirs) for mine, theirs in zip(ten(queries, searched), wanted, strict=True)]
        assert found[name] == pytest.approx(np.mean(shared) / 10)
    ranks = [
        1 + sum(float(query @ other) > float(query @ candidates[row]) for other in candidates)
        for row, query in enumerate(queries)
    ]
    assert ("mrr" in found) != alone
    if not alone:
        assert found["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))


def test_ten_texts_are_too_few_for_a_search(table: pa.Table, tmp_path: Path) -> None:
    few = np.eye(10, dtype=np.float32)
    assert all(np.isnan(value) for value in retrieval(few, few, few, few).values())
    sentences(tmp_path / "bert", table)
    with pytest.raises(DataError, match=r"the validation part has 8 rows; expected at least 11"):
        EmbeddingTask(embedding(table.slice(0, 40), tmp_path, split_by=None))


def test_each_of_several_equal_texts_is_found() -> None:
    vectors = np.repeat(np.eye(6, dtype=np.float32), 20, axis=0)
    near = vectors + np.random.default_rng(0).normal(0, 1e-8, vectors.shape).astype(np.float32)
    assert set(retrieval(near, near, vectors, vectors, alone=True).values()) == {1.0}


def test_the_padding_token_may_be_part_of_a_text(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    texts = pa.array(["play [PAD] song rain", *table["body"].to_pylist()[1:]])
    pruned = replace(PAIR, column="body", predicts=Embedding())
    task = EmbeddingTask(embedding(table.set_column(3, "body", texts), tmp_path, pruned))
    fed = task.feeds(np.array([0]))
    assert 0 in fed["input_ids"][0, 1:-1]
    assert fed["attention_mask"].all()
    assert fed["input_ids"].tolist() == [task._pretrained.tokenizer("play [PAD] song rain")["input_ids"]]


def test_another_normalizer_is_another_teacher(table: pa.Table, tmp_path: Path) -> None:
    sentences(tmp_path / "bert", table)
    before = EmbeddingTask(embedding(table, tmp_path)).options()
    file = tmp_path / "bert" / "tokenizer.json"
    read = json.loads(file.read_text())
    read["normalizer"]["lowercase"] = not read["normalizer"]["lowercase"]
    file.write_text(json.dumps(read))
    assert EmbeddingTask(embedding(table, tmp_path)).options() != before


def test_a_large_search_is_measured_in_parts() -> None:
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(2500, 4)).astype(np.float32)
    noise = vectors + 0.1 * draw.normal(size=vectors.shape).astype(np.float32)
    found = retrieval(noise, noise, vectors, vectors)
    order = np.argsort(-(noise @ noise.T), 1)[:, :10], np.argsort(-(vectors @ vectors.T), 1)[:, :10]
    shared = [len({*ours} & {*theirs}) for ours, theirs in zip(*map(np.ndarray.tolist, order), strict=True)]
    assert found["recall_at_10"] == pytest.approx(np.mean(shared) / 10)


def test_pairs_are_nearest_to_each_other() -> None:
    torch.manual_seed(0)
    queries, candidates = torch.randn(5, 3), torch.randn(5, 3)
    scores = np.exp((normalize(queries, dim=-1) @ normalize(candidates, dim=-1).T).numpy() / 0.1)
    by_hand = [-np.log(scores[row, row] / scores[row].sum()) for row in range(5)]
    assert float(info_nce(queries, candidates, temperature=0.1)) == pytest.approx(np.mean(by_hand), rel=1e-5)
    with pytest.raises(ConfigurationError, match="temperature"):
        info_nce(queries, candidates, temperature=0)


def test_a_ranking_leaves_out_the_text_itself() -> None:
    vectors, other = normalize(torch.randn(6, 4), dim=-1), normalize(torch.randn(6, 4), dim=-1)
    assert float(ranking(vectors, vectors, vectors, vectors, alone=True)) == pytest.approx(0, abs=1e-6)
    assert float(ranking(vectors, vectors, other, other, alone=True)) > 0.1
    assert float(ranking(vectors[:1], vectors[:1], other[:1], other[:1], alone=False)) == 0
